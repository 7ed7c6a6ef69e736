"""The identity of a prompt, and the table that gives every prompt an id."""

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import select, text

from openrlhf_dbb.storage import schema
from openrlhf_dbb.storage.engine import Database
from openrlhf_dbb.storage.records import storable
from openrlhf_dbb.storage.url import StoreError

HASH_BYTES = 16

_REGISTER_CHUNK = 900
"""Prompts of one statement: older releases of SQLite allow 999 values."""

# Another process may have stored some of them since the lookup.
_INSERT = text("""INSERT INTO dbb_prompt (hash, prompt, label) VALUES (:hash, :prompt, :label)
    ON CONFLICT (hash) DO NOTHING""")


def prompt_hash(prompt: str, label: str) -> bytes:
    """Return 16 bytes that identify a prompt with its label, in every database and run.

    The bytes are the BLAKE2b hash of a version tag and of the two texts as UTF-8. The length of each text in bytes (8
    bytes, little-endian) precedes it, so that ("ab", "c") and ("a", "bc") differ. Nothing is normalised; pass the
    prompt as the model sees it. Another label means another reward, hence another prompt.

    Example:
        >>> prompt_hash("1 + 1 = ?", "2").hex()
        'cf41dd1039e7e2bfe8da859a83110c47'
    """
    digest = hashlib.blake2b(b"openrlhf-dbb prompt 1", digest_size=HASH_BYTES)
    for field in (prompt, label):
        # JSON files may contain half a surrogate pair, which strict UTF-8 rejects.
        encoded = field.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.digest()


def register(database: Database, prompts: Sequence[str], labels: Sequence[str]) -> NDArray[np.int64]:
    """Return the (P,) ids of the prompts, as :meth:`openrlhf_dbb.storage.PosteriorStore.register_prompts`."""
    if len(prompts) != len(labels):
        raise StoreError(f"got {len(prompts)} prompts and {len(labels)} labels; give one label (or '') per prompt")
    hashes = [prompt_hash(prompt, label) for prompt, label in zip(prompts, labels, strict=True)]
    rows = {
        digest: {"hash": digest, "prompt": storable(prompt), "label": storable(label)}
        for digest, prompt, label in zip(hashes, prompts, labels, strict=True)
    }
    # Sorted, so that two processes that register at once take their locks in the same order.
    ordered = sorted(rows)
    ids: dict[bytes, int] = {}
    prompt = schema.prompt.c
    for start in range(0, len(ordered), _REGISTER_CHUNK):
        part = ordered[start : start + _REGISTER_CHUNK]
        query = select(prompt.hash, prompt.prompt_id).where(prompt.hash.in_(part))
        with database.transaction(write=True) as connection:
            stored = {digest: prompt_id for digest, prompt_id in connection.execute(query)}
            new = [rows[digest] for digest in part if digest not in stored]
            if new:
                connection.execute(_INSERT, new)
                stored = {digest: prompt_id for digest, prompt_id in connection.execute(query)}
        ids |= stored
    return np.array([ids[digest] for digest in hashes], dtype=np.int64)

"""The identity of a prompt, and the table that gives every prompt an id."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, text

from storage.engine import Database
from storage.records import storable
from storage.url import StoreError

HASH_BYTES = 16
_REGISTER_CHUNK = 10_000


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
    """Return the ids of the prompts, in the order given; new prompts are stored.

    Returns:
        (P,) int64; the same prompt and label have the same id.

    Raises:
        StoreError: the numbers of labels and of prompts differ.
    """
    if len(prompts) != len(labels):
        raise StoreError(f"got {len(prompts)} prompts and {len(labels)} labels; give one label (or '') per prompt")
    hashes = [prompt_hash(prompt, label) for prompt, label in zip(prompts, labels, strict=True)]
    texts = {digest: pair for digest, *pair in zip(hashes, prompts, labels, strict=True)}
    # Sorted, so that two processes that register at once take their locks in the same order.
    ordered = sorted(texts)
    ids: dict[bytes, int] = {}
    for start in range(0, len(ordered), _REGISTER_CHUNK):
        part = ordered[start : start + _REGISTER_CHUNK]
        with database.transaction(write=True) as connection:
            stored = _read_ids(connection, database, part)
            new = [(digest, *map(storable, texts[digest])) for digest in part if digest not in stored]
            if new:
                _insert(connection, database, new)
                stored = _read_ids(connection, database, part)
        ids |= stored
    return np.array([ids[digest] for digest in hashes], dtype=np.int64)


def _insert(connection: Connection, database: Database, rows: Sequence[tuple[Any, ...]]) -> None:
    insert = "INSERT INTO dbb_prompt (hash, prompt, label) "
    # Another process may have stored some of them since the lookup.
    ignore = " ON CONFLICT (hash) DO NOTHING"
    if database.is_sqlite:
        connection.exec_driver_sql(insert + "VALUES (?, ?, ?)" + ignore, rows)
        return
    digests, prompts, labels = (list(column) for column in zip(*rows, strict=True))
    connection.execute(
        text(
            f"""{insert} SELECT * FROM unnest(
                CAST(:hashes AS BYTEA[]), CAST(:prompts AS TEXT[]), CAST(:labels AS TEXT[])) {ignore}"""
        ),
        {"hashes": digests, "prompts": prompts, "labels": labels},
    )


def _read_ids(connection: Connection, database: Database, digests: list[bytes]) -> dict[bytes, int]:
    if database.is_sqlite:
        # One parameter of any length, split by the database: the number of parameters is limited.
        query = f"""
            WITH RECURSIVE position(i) AS
                (SELECT 0 UNION ALL SELECT i + 1 FROM position WHERE i + 1 < :count)
            SELECT p.hash, p.prompt_id
            FROM position CROSS JOIN dbb_prompt p
                ON p.hash = substr(:hashes, i * {HASH_BYTES} + 1, {HASH_BYTES})"""
        parameters = {"count": len(digests), "hashes": b"".join(digests)}
    else:
        query = "SELECT hash, prompt_id FROM dbb_prompt WHERE hash = ANY(CAST(:hashes AS BYTEA[]))"
        parameters = {"hashes": digests}
    return {bytes(digest): prompt_id for digest, prompt_id in connection.execute(text(query), parameters)}

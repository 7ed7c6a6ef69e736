"""The identity of a prompt, and the table that gives every prompt an id."""

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection

from openrlhf_dbb.storage.engine import CHUNK, Database, driver
from openrlhf_dbb.storage.records import storable
from openrlhf_dbb.storage.url import StoreError

HASH_BYTES = 16

# Another process may have stored some of them since the lookup.
_NEW = "INSERT INTO dbb_prompt (hash, prompt, label) {} ON CONFLICT (hash) DO NOTHING"
_INSERT = {"sqlite": _NEW.format("VALUES (?, ?, ?)"),
           "postgresql": _NEW.format("SELECT * FROM unnest(%b::bytea[], %b::text[], %b::text[])")}  # fmt: skip
_FIND = "SELECT hash, prompt_id FROM dbb_prompt WHERE hash "


def prompt_hash(prompt: str, label: str) -> bytes:
    """Return 16 bytes that identify a prompt with its label, in every database and run.

    The bytes are the BLAKE2b hash of a version tag and of the two texts as UTF-8. The length of each text in bytes (8
    bytes, little-endian) precedes it, so that ("ab", "c") and ("a", "bc") differ. Nothing is normalised; pass the
    prompt as the model sees it. Another label means another reward, hence another prompt.

    Example:
        >>> prompt_hash("1 + 1 = ?", "2").hex()
        'cf41dd1039e7e2bfe8da859a83110c47'
    """
    # JSON files may contain half a surrogate pair, which strict UTF-8 rejects.
    text, answer = prompt.encode("utf-8", "surrogatepass"), label.encode("utf-8", "surrogatepass")
    # By one call, since a data set has a million prompts.
    sizes = len(text).to_bytes(8, "little"), len(answer).to_bytes(8, "little")
    data = b"openrlhf-dbb prompt 1" + sizes[0] + text + sizes[1] + answer
    return hashlib.blake2b(data, digest_size=HASH_BYTES).digest()


def register(database: Database, prompts: Sequence[str], labels: Sequence[str]) -> NDArray[np.int64]:
    """Return the (P,) ids of the prompts, as :meth:`openrlhf_dbb.storage.PosteriorStore.register_prompts`."""
    if len(prompts) != len(labels):
        raise StoreError(f"got {len(prompts)} prompts and {len(labels)} labels; give one label (or '') per prompt")
    hashes = list(map(prompt_hash, prompts, labels))
    # Sorted, so that two processes that register at once take their locks in the same order.
    places = sorted({digest: place for place, digest in enumerate(hashes)}.items())
    ids: dict[bytes, int] = {}
    for start in range(0, len(places), CHUNK):
        part = places[start : start + CHUNK]
        with database.transaction(write=True) as connection:
            ids |= _find(connection, [digest for digest, _ in part], len(places))
            new = [(digest, storable(prompts[at]), storable(labels[at])) for digest, at in part if digest not in ids]
            if new:
                _insert(connection, new)
                ids |= _find(connection, [digest for digest, *_ in new], len(places))
    return np.fromiter(map(ids.__getitem__, hashes), dtype=np.int64, count=len(hashes))


# On the driver's connection, since SQLAlchemy takes several times as long for many values.
def _find(connection: Connection, hashes: list[bytes], total: int) -> dict[bytes, int]:
    """Return the ids of the stored ones among these hashes, ascending, perhaps with others; ``total``: of all calls."""
    if connection.dialect.name != "sqlite":
        cursor = driver(connection).cursor(binary=True)
        return dict(cursor.execute(f"{_FIND} = ANY(%b)", (hashes,)).fetchall())
    execute = driver(connection).cursor().execute
    newest = execute("SELECT max(prompt_id) FROM dbb_prompt").fetchone()[0] or 0
    if newest <= 4 * total:  # a look-up takes as long as five rows of a scan
        return dict(execute(f"{_FIND} BETWEEN ? AND ?", (hashes[0], hashes[-1])).fetchall())
    return dict(row for digest in hashes if (row := execute(f"{_FIND} = ?", (digest,)).fetchone()))


def _insert(connection: Connection, rows: list[tuple[bytes, str, str]]) -> None:
    cursor, statement = driver(connection).cursor(), _INSERT[connection.dialect.name]
    if connection.dialect.name == "sqlite":
        cursor.executemany(statement, rows)
    else:
        cursor.execute(statement, tuple(map(list, zip(*rows, strict=True))))

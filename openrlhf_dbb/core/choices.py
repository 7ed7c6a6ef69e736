"""Choices by hash: a resume and another database make the same ones, whatever the order of the data."""

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

from openrlhf_dbb import storage
from openrlhf_dbb.core.checks import Key, Positions, whole


def rows_to_keep(prompts: Sequence[Key], step: int, keep: int | None) -> Positions:
    """Choose the rollouts that are stored with their texts, (K,) rows, ascending.

    Half of the rows belong to the prompts with the lowest hash, which are the same in every epoch. The other half
    belongs to the prompts with the lowest hash of prompt and step, so that every prompt is stored at some time. Groups
    are stored whole, except for the last one of either half. ``keep`` is their number; None keeps all.
    """
    if keep is None or whole("keep", keep) >= len(prompts):
        return np.arange(len(prompts))
    rows_of: dict[Key, list[int]] = {}
    for row, prompt in enumerate(prompts):
        rows_of.setdefault(prompt, []).append(row)
    hashes = {prompt: storage.prompt_hash(*prompt) for prompt in rows_of}
    followed = sorted(rows_of, key=lambda prompt: hashes[prompt])
    drawn = sorted(rows_of, key=lambda prompt: hashlib.blake2b(hashes[prompt], key=str(step).encode()).digest())
    chosen = [row for prompt in followed for row in rows_of[prompt]][: (keep + 1) // 2]
    others = set(chosen)
    chosen += [row for prompt in drawn for row in rows_of[prompt] if row not in others][: keep - len(chosen)]
    return np.array(sorted(chosen), dtype=np.int64)


def probed_prompts(prompts: Iterable[Key], fraction: float, seed: int) -> set[Key]:
    """Choose about ``fraction`` of the prompts to be probed. A larger fraction chooses the same prompts and more.

    Source: paper, section 5.3, probes a tenth of the prompts with M = 128.
    """

    def draw(prompt: Key) -> float:
        digest = hashlib.blake2b(storage.prompt_hash(*prompt), digest_size=6, key=str(seed).encode()).digest()
        return int.from_bytes(digest, "big") / 2**48

    return {prompt for prompt in prompts if draw(prompt) < fraction}


def dataset_digest(prompts: Sequence[str], labels: Sequence[str]) -> str:
    """Return a hash of all prompts and labels in order, 32 hex digits."""
    return hashlib.blake2b(b"".join(map(storage.prompt_hash, prompts, labels)), digest_size=16).hexdigest()

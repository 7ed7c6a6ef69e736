"""Labels that Math-Verify cannot read, found before a training; those that it can are remembered in a file."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from openrlhf_dbb import user_cache
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.rewards.answers import compare_integers, label_expression
from openrlhf_dbb.rewards.verifier_pool import VerifierPool, VerifierStartError

logger = logging.getLogger(__name__)


def unreadable(labels: Iterable[str]) -> dict[str, str]:
    """Labels that Math-Verify cannot read, each with the label and the reason in words.

    Integers are not asked for, nor is what was readable the last time; the others are asked for in several processes.

    Raises:
        UsageError: no verifier can be started.
    """
    known = _Readable.load()
    asked = [each for each in dict.fromkeys(labels) if each not in known.labels and not compare_integers(each, each)]
    if not asked:
        return {}
    try:
        pool = VerifierPool.from_environment()
        try:
            reasons = _ask(pool, asked)
        finally:
            pool.close()
    except (ValueError, VerifierStartError) as error:
        raise UsageError(f"the labels cannot be checked: {str(error).splitlines()[-1]}") from error
    known.add(label for label, reason in zip(asked, reasons, strict=True) if reason is None)
    return {label: f"{_short(label)}, {why}" for label, why in zip(asked, reasons, strict=True) if why is not None}


def _ask(pool: VerifierPool, labels: list[str]) -> list[str | None]:
    from tqdm import tqdm

    with ThreadPoolExecutor(pool.size) as threads:
        answers = threads.map(pool.why_unreadable, map(label_expression, labels))
        return list(
            tqdm(
                answers,
                desc="Math-Verify reads the labels",
                total=len(labels),
                unit="label",
                delay=1.0,
                mininterval=2.0,
            )
        )


def _short(label: str) -> str:
    return repr(label if len(label) <= 60 else f"{label[:57]}...")


class _Readable:
    """The labels that the installed Math-Verify has read, in a file that several processes may write."""

    def __init__(self, path: Path, version: str, labels: set[str]) -> None:
        self._path, self._version, self.labels = path, version, labels

    @classmethod
    def load(cls) -> _Readable:
        """What the file holds; nothing where it is missing, broken or of another Math-Verify."""
        path = user_cache.folder() / "readable_labels.json"
        try:
            installed = version("math-verify")
        except PackageNotFoundError as error:
            raise UsageError("math-verify is not installed, which math_answer needs; install it") from error
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            labels = set(found["labels"]) if found["math-verify"] == installed else set()
        except (OSError, ValueError, LookupError, TypeError):
            labels = set()
        return cls(path, installed, labels)

    def add(self, labels: Iterable[str]) -> None:
        """Write these beside what is there; of two processes at once, one may have to ask for its labels again."""
        everything = {"math-verify": self._version, "labels": sorted(self.load().labels.union(labels))}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._path.parent, delete=False, encoding="utf-8") as file:
                json.dump(everything, file)
            os.replace(file.name, self._path)
        except OSError as error:
            logger.warning("the next start has to check the labels again: %s", error)

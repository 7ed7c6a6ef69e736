"""Evaluations on disk: ``evaluation.json`` and a Parquet file per benchmark, read without the responses.

Axes: R evaluation runs (seeds), P prompts of a benchmark, N samples of a prompt.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from openrlhf_dbb.errors import UsageError

FOLDER = Path("evaluations")
"""Where evaluations are looked for by name."""

MANIFEST = "evaluation.json"
FINISHED = "finished"
"""The manifest's status once all files are written."""

_NEEDED = ("model", "n", "runs", "benchmarks", "status")
_ONE_PER_PROMPT = ("id", "prompt", "label")
_LISTS = ("scores", "answers", "tokens", "truncated")


@dataclass(frozen=True)
class Results:
    """One model's answers on one benchmark.

    Attributes:
        benchmark: its name.
        ids: P, the benchmark's own, or the prompts' places as text.
        scores_R_P_N: the verifier's scores, mostly 0 and 1; NaN is missing: could not be verified.
        answers_R_P_N: the extracted answers (str), None where none was found.
        labels: P correct answers.
        tokens_R_P_N: length of each response, in tokens.
        truncated_R_P_N: whether it was cut at the limit.
        prompts_digest: SHA-256 of all prompts as the model saw them; "" if unknown.
    """

    benchmark: str
    ids: list[str]
    scores_R_P_N: NDArray[np.float64]
    answers_R_P_N: NDArray[np.object_]
    labels: list[str]
    tokens_R_P_N: NDArray[np.int64]
    truncated_R_P_N: NDArray[np.bool_]
    prompts_digest: str = ""

    @property
    def shape(self) -> tuple[int, int, int]:
        """R, P, N."""
        runs, prompts, samples = self.scores_R_P_N.shape
        return runs, prompts, samples


@dataclass(frozen=True)
class Evaluation:
    """A finished evaluation.

    Attributes:
        name: its folder's name.
        manifest: content of ``evaluation.json``.
        results: by benchmark, in the manifest's order.
    """

    name: str
    manifest: dict[str, Any]
    results: dict[str, Results]

    def about(self, benchmark: str) -> dict[str, Any]:
        """What the manifest says about a benchmark, including ``title`` and ``group``."""
        benchmarks = self.manifest["benchmarks"]
        return dict(benchmarks[benchmark]) if isinstance(benchmarks, dict) else {}


def schema() -> Any:
    """The Parquet files' pyarrow schema: a row per (run, prompt), ordered by run, then prompt; lists have N entries."""
    import pyarrow as pa

    whole, text = pa.int32(), pa.string()
    types = {"run": whole, "index": whole, "id": text, "prompt": text, "label": text, "scores": pa.list_(pa.float64())}
    types |= {"answers": pa.list_(text), "responses": pa.list_(text), "tokens": pa.list_(whole)}
    return pa.schema([*types.items(), ("truncated", pa.list_(pa.bool_()))])


def find(name: str) -> Path:
    """The folder of an evaluation, given by its path or by its name under ``evaluations/``.

    Raises:
        UsageError: there is no such evaluation.
    """
    for folder in (Path(name), FOLDER / name):
        if (folder / MANIFEST).is_file():
            return folder
    known = sorted(path.parent.name for path in FOLDER.glob(f"*/{MANIFEST}"))
    there = f"{FOLDER}/ has {', '.join(known)}" if known else f"{FOLDER}/ has no evaluations"
    raise UsageError(f"no evaluation {name!r}: neither {name} nor {FOLDER / name} holds {MANIFEST}; {there}")


def read_evaluation(folder: Path) -> Evaluation:
    """A finished evaluation, without its responses.

    Raises:
        UsageError: the folder is not an evaluation, it is not finished, or its files do not fit together.
    """
    manifest = _read_manifest(folder / MANIFEST)
    if manifest["status"] != FINISHED:
        raise UsageError(
            f"{folder}: status is {manifest['status']!r}, not {FINISHED!r}; run the evaluate command that started it "
            "again: it continues where it stopped"
        )
    results = {
        benchmark: _read_benchmark(folder / f"{benchmark}.parquet", manifest["runs"], manifest["n"])
        for benchmark in manifest["benchmarks"]
    }
    return Evaluation(folder.resolve().name, manifest, results)


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(
            f"{path.parent}: not an evaluation, it has no {MANIFEST}; name a folder written by evaluate"
        ) from None
    except (ValueError, OSError) as error:
        raise UsageError(f"{path}: cannot be read as JSON ({error}); evaluate again under another --name") from None
    missing = [key for key in _NEEDED if not isinstance(manifest, dict) or key not in manifest]
    if missing:
        raise UsageError(f"{path}: {', '.join(missing)} missing; evaluate again under another --name")
    for key in ("n", "runs"):
        if not isinstance(manifest[key], int) or manifest[key] < 1:
            raise UsageError(
                f"{path}: {key} must be an integer of at least 1, got {manifest[key]!r}; "
                "evaluate again under another --name"
            )
    return dict(manifest)


def _read_benchmark(path: Path, runs: int, samples: int) -> Results:
    table = _read_table(path)
    if not table.num_rows or table.num_rows % runs:
        raise _misfit(path, f"{table.num_rows} rows cannot be divided into {runs} runs")
    prompts = table.num_rows // runs
    places = np.stack([table[name].to_numpy() for name in ("run", "index")])
    if not np.array_equal(places, np.indices((runs, prompts)).reshape(2, -1)):
        raise _misfit(path, f"rows are not ordered by run (0 to {runs - 1}), then index (0 to {prompts - 1})")
    texts = {name: table[name].to_pylist() for name in _ONE_PER_PROMPT}
    for name, values in texts.items():
        if values != values[:prompts] * runs:
            raise _misfit(path, f"{name} differs between runs")
    lists = {name: _entries(path, table, name, samples).reshape(runs, prompts, samples) for name in _LISTS}
    return Results(
        benchmark=path.stem,
        ids=texts["id"][:prompts],
        scores_R_P_N=lists["scores"],
        answers_R_P_N=lists["answers"],
        labels=texts["label"][:prompts],
        tokens_R_P_N=lists["tokens"].astype(np.int64),
        truncated_R_P_N=lists["truncated"].astype(np.bool_),
        prompts_digest=hashlib.sha256(json.dumps(texts["prompt"][:prompts]).encode()).hexdigest(),
    )


def _read_table(path: Path) -> Any:
    """The needed columns, in the types of :func:`schema`; not the responses, by far the largest."""
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise UsageError("reading evaluations needs pyarrow: pip install pyarrow") from None
    wanted = [field for field in schema() if field.name != "responses"]
    try:
        absent = sorted({field.name for field in wanted} - set(parquet.read_schema(path).names))
        if absent:
            raise _misfit(path, f"missing columns: {', '.join(absent)}")
        return parquet.read_table(path, columns=[field.name for field in wanted]).cast(pa.schema(wanted))
    except FileNotFoundError:
        raise _misfit(path, "there is no such file") from None
    except pa.ArrowException as error:
        raise _misfit(path, str(error).splitlines()[0]) from None


def _entries(path: Path, table: Any, name: str, samples: int) -> NDArray[Any]:
    """All entries of a column of lists, flattened; null becomes NaN in scores and None in answers."""
    import pyarrow.compute as pc

    lengths = pc.list_value_length(table[name]).unique().to_pylist()
    if lengths != [samples]:
        raise _misfit(path, f"{name} has lists of {', '.join(map(str, lengths))} entries instead of n = {samples}")
    flat = pc.list_flatten(table[name])
    if name in ("tokens", "truncated") and flat.null_count:
        raise _misfit(path, f"{name} has nulls")
    return np.asarray(flat.to_numpy())


def _misfit(path: Path, what: str) -> UsageError:
    return UsageError(f"{path}: {what}; the file is not as evaluate wrote it, evaluate again under another --name")

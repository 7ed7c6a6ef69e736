"""What an evaluation consists of: as requested, as recorded in ``evaluation.json``, and whether the two agree.

Axes: R evaluation runs (seeds), N samples of a prompt.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from openrlhf_dbb.core.best_model import NAME
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.evaluation.engines import SamplingSettings
from openrlhf_dbb.evaluation.evaluated_model import LAST, Model
from openrlhf_dbb.evaluation.journal import Key
from openrlhf_dbb.evaluation.prompting import BenchmarkPrompts
from openrlhf_dbb.evaluation.results import FINISHED, MANIFEST
from openrlhf_dbb.evaluation.writing import write_json

RUNNING = "running"
_SAME = {
    "prompts": "number of prompts",
    "data_digest": "data",
    "chat_template": "chat template",
    "prompts_digest": "prompts",
    "max_new_tokens": "--max_new_tokens",
    "verifier": "verifier",
}
"""What must not change of a benchmark within an evaluation, and its name in messages."""

_PACKAGES = ("openrlhf_dbb", "vllm", "torch", "transformers", "math-verify")


@dataclass(frozen=True)
class Plan:
    """What was requested.

    Attributes:
        name: of the evaluation.
        runs: R.
        seed: of the first engine.
        prompts: by benchmark.
    """

    name: str
    model: Model
    sampling: SamplingSettings
    runs: int
    seed: int
    prompts: dict[str, BenchmarkPrompts]

    def keys(self, runs: int) -> list[Key]:
        """All rows, benchmark by benchmark, run by run."""
        return [
            Key(benchmark, run, index)
            for benchmark, prompts in self.prompts.items()
            for run in range(runs)
            for index in range(len(prompts.texts))
        ]


class Manifest:
    """``evaluation.json``, kept up to date.

    Attributes:
        values: its content.
        path: of the file.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / MANIFEST
        self.values: dict[str, Any] = json.loads(self.path.read_text(encoding="utf-8")) if self.path.exists() else {}

    @property
    def runs(self) -> int:
        return int(self.values["runs"])

    @property
    def finished(self) -> bool:
        return bool(self.values["status"] == FINISHED)

    def agree(self, plan: Plan) -> None:
        """Add what is requested to what is recorded. Nothing is written.

        Further benchmarks, or more runs of all benchmarks, continue an evaluation. If fewer runs are requested, the
        recorded number stays.

        Raises:
            UsageError: the two differ in a way that would mix two evaluations into one.
        """
        asked = _values(plan)
        if not self.values:
            self.values = asked
            return
        self._refuse_others(plan, asked)
        recorded, wanted = self.values["benchmarks"], asked["benchmarks"]
        absent = [name for name in recorded if name not in wanted]
        if absent and not self.finished:
            raise UsageError(
                f"evaluation {plan.name} is not finished and also has {', '.join(absent)}; "
                "add these to --benchmarks, or give another --name"
            )
        if absent and plan.runs > self.runs:
            raise UsageError(
                f"evaluation {plan.name} has {self.runs} runs, also of {', '.join(absent)}; "
                f"for --runs {plan.runs}, add these to --benchmarks"
            )
        if plan.runs > self.runs or any(name not in recorded for name in wanted):
            self.values["status"] = RUNNING
        self.values["runs"] = max(plan.runs, self.runs)
        self.values["benchmarks"] = recorded | wanted

    def _refuse_others(self, plan: Plan, asked: dict[str, Any]) -> None:
        was = self.values
        if was["fingerprint"] != asked["fingerprint"]:
            same = " (the files in it have changed)" if was["model"] == asked["model"] else f", not of {asked['model']}"
            raise UsageError(f"evaluation {plan.name} is of model {was['model']}{same}; give another --name")
        settings = [
            ("--n", was["n"], asked["n"]),
            ("--seed", was["seed"], asked["seed"]),
            *((f"--{key}", was["sampling"][key], asked["sampling"][key]) for key in asked["sampling"]),
        ]
        for name in sorted(was["benchmarks"].keys() & asked["benchmarks"].keys()):
            before, now = was["benchmarks"][name], asked["benchmarks"][name]
            settings += [(f"{label} of {name}", before[key], now[key]) for key, label in _SAME.items()]
        differing = [f"{what} {before}, not {now}" for what, before, now in settings if before != now]
        if differing:
            raise UsageError(
                f"evaluation {plan.name} was made with {'; '.join(differing)}; "
                "give another --name, or the same settings"
            )

    def new_seeds(self, engines: int) -> list[int]:
        """A seed for each engine to be started, none of them used before: it would give the same samples again."""
        used: list[int] = self.values["engine_seeds"]
        first = self.values["seed"] + len(used)
        seeds = list(range(first, first + engines))
        used += seeds
        return seeds

    def finish(self) -> None:
        """Record that all files are written."""
        self.values["status"] = FINISHED
        self.write()

    def write(self) -> None:
        write_json(self.path, self.values)


def _values(plan: Plan) -> dict[str, Any]:
    return {
        "status": RUNNING,
        "model": plan.model.name,
        "revision": plan.model.revision,
        "fingerprint": plan.model.fingerprint,
        "n": plan.sampling.n,
        "runs": plan.runs,
        "sampling": {"temperature": plan.sampling.temperature, "top_p": plan.sampling.top_p},
        "seed": plan.seed,
        "engine_seeds": [],
        "benchmarks": {name: prompts.about() for name, prompts in plan.prompts.items()},
        "versions": {package: _version(package) for package in _PACKAGES},
    }


def _version(package: str) -> str | None:
    for name in (package, f"{package}-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def default_name(model: str) -> str:
    """The model's name, or the name of the run that saved it.

    Example:
        >>> default_name("Qwen/Qwen3-1.7B-Base"), default_name("runs/my-run/model/"), default_name("runs/my-run/best")
        ('Qwen3-1.7B-Base', 'my-run', 'my-run')
    """
    parts: Sequence[str] = Path(model).parts
    return parts[-2] if len(parts) > 1 and parts[-1] in (LAST, NAME) else parts[-1]

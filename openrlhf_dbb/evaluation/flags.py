import argparse
import dataclasses
from pathlib import Path
from typing import Any

from openrlhf_dbb.evaluation import benchmarks, results
from openrlhf_dbb.options import number

SAMPLED, ENGINES, OUTPUT = "what is sampled", "engines", "output"  # headings of the help
_SIZE, _SHARE = number(int, 1), number(float, 0, 1, above=True)
_MODEL = (
    "folder of a run (its best model by validation, else its last) or of a model (runs/RUN/model), or one on the hub"
)
_NAMES = f"any of {', '.join(benchmarks.NAMES)}; NAME=FILE (prompts verbatim); a .toml file; or reasoning_gym:TASK"


def _flag(default: Any, help: str, group: str = "", **form: Any) -> Any:
    """Return a field that is a flag of this group; ``form`` has arguments of argparse."""
    known = "" if default is None or default is False else " (default: %(default)s)"
    return dataclasses.field(default=default, metadata={"group": group, "help": help + known, **form})


@dataclasses.dataclass(frozen=True)
class Options:
    """The settings of an evaluation; each is a flag."""

    model: str = _flag(None, _MODEL)
    benchmarks: str = _flag(None, _NAMES, metavar="NAME,...")
    n: int = _flag(8, "samples per prompt in each run", SAMPLED, type=_SIZE)
    runs: int = _flag(4, "independent runs", SAMPLED, type=_SIZE)
    temperature: float = _flag(0.6, "0 is greedy", SAMPLED, type=number(float, 0), metavar="T")
    top_p: float = _flag(0.95, "nucleus sampling", SAMPLED, type=_SHARE, metavar="P")
    max_new_tokens: int | None = _flag(
        None, "limit on response length (default: the benchmark's: 4096)", SAMPLED, type=_SIZE, metavar="N"
    )
    seed: int = _flag(0, "seed of the engines", SAMPLED, type=int)
    limit: int | None = _flag(None, "only the first K prompts of each benchmark", SAMPLED, type=_SIZE, metavar="K")
    chat_template: bool | None = _flag(
        None,
        "apply the model's chat template to prompts (default: as the benchmark says)",
        SAMPLED,
        action=argparse.BooleanOptionalAction,
    )
    engines: int | None = _flag(
        None, "vLLM engines (default: all GPUs; one without CUDA)", ENGINES, type=_SIZE, metavar="E"
    )
    tensor_parallel_size: int = _flag(1, "GPUs an engine", ENGINES, type=int, metavar="N")
    gpu_memory_utilization: float = _flag(0.9, "share of a GPU's memory", ENGINES, type=float, metavar="F")
    verbose: bool = _flag(False, "show the output of the engines", ENGINES, action="store_true")
    output: Path = _flag(results.FOLDER, "folder for evaluations", OUTPUT, type=Path, metavar="DIR")  # noqa: RUF009
    name: str | None = _flag(None, "name of this evaluation (default: the model's)", OUTPUT)
    run: str | None = _flag(None, "training run that made this model; the results are stored with it", OUTPUT)
    store_url: str | None = None
    trust_remote_code: bool = False

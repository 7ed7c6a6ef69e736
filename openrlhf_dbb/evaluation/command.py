"""The command evaluate: a model on benchmarks; ``compare`` shows differences and needs no torch."""

import argparse
import dataclasses
import warnings
from pathlib import Path
from typing import Any

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.evaluation import benchmarks, compare, results
from openrlhf_dbb.options import add_store, add_trust, number, require_stack

_SAMPLED, _ENGINES, _OUTPUT = "what is sampled", "engines", "output"  # headings of the help
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
    n: int = _flag(8, "samples per prompt in each run", _SAMPLED, type=_SIZE)
    runs: int = _flag(4, "independent runs", _SAMPLED, type=_SIZE)
    temperature: float = _flag(0.6, "0 is greedy", _SAMPLED, type=number(float, 0), metavar="T")
    top_p: float = _flag(0.95, "nucleus sampling", _SAMPLED, type=_SHARE, metavar="P")
    max_new_tokens: int | None = _flag(
        None, "limit on response length (default: the benchmark's: 4096)", _SAMPLED, type=_SIZE, metavar="N"
    )
    seed: int = _flag(0, "seed of the engines", _SAMPLED, type=int)
    limit: int | None = _flag(None, "only the first K prompts of each benchmark", _SAMPLED, type=_SIZE, metavar="K")
    chat_template: bool | None = _flag(
        None,
        "apply the model's chat template to prompts (default: as the benchmark says)",
        _SAMPLED,
        action=argparse.BooleanOptionalAction,
    )
    engines: int | None = _flag(
        None, "vLLM engines (default: all GPUs; one without CUDA)", _ENGINES, type=_SIZE, metavar="E"
    )
    tensor_parallel_size: int = _flag(1, "GPUs an engine", _ENGINES, type=int, metavar="N")
    gpu_memory_utilization: float = _flag(0.9, "share of a GPU's memory", _ENGINES, type=float, metavar="F")
    verbose: bool = _flag(False, "show the output of the engines", _ENGINES, action="store_true")
    output: Path = _flag(results.FOLDER, "folder for evaluations", _OUTPUT, type=Path, metavar="DIR")  # noqa: RUF009
    name: str | None = _flag(None, "name of this evaluation (default: the model's)", _OUTPUT)
    run: str | None = _flag(None, "training run that made this model; the results are stored with it", _OUTPUT)
    store_url: str | None = None
    trust_remote_code: bool = False


def add_commands(add: Any) -> None:
    parser = add("evaluate", command, opens_store=False)
    parser.usage = "%(prog)s --model MODEL --benchmarks NAME,... [flags]\n       %(prog)s compare ..."
    parser.epilog = "Repeat a stopped evaluation to continue it."
    groups = {"": parser} | {title: parser.add_argument_group(title) for title in (_SAMPLED, _ENGINES, _OUTPUT)}
    for each in dataclasses.fields(Options):
        if each.metadata:
            form = dict(each.metadata)
            short = ["-o"] if each.name == "output" else []
            groups[form.pop("group")].add_argument(*short, f"--{each.name}", default=each.default, **form)
    add_trust(parser)
    add_store(groups[_OUTPUT])
    compare.add_command(parser.add_subparsers(prog=parser.prog, metavar="COMMAND", title="commands, instead of flags"))


def command(arguments: argparse.Namespace) -> None:
    """Evaluate a model. Raise UsageError, StoreError, or RayError if an engine fails."""
    if arguments.model is None or arguments.benchmarks is None:
        raise UsageError("evaluate needs --model and --benchmarks, or the command compare")
    evaluate(Options(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(Options)}))


def evaluate(options: Options) -> None:
    require_stack("openrlhf-dbb evaluate --model")
    # From torch's import of a package that OpenRLHF pins; users can do nothing about it.
    warnings.filterwarnings("ignore", message="The pynvml package is deprecated")
    from openrlhf_dbb.evaluation import pipeline
    from openrlhf_dbb.platform import cpu, cuda

    if cpu.active():
        cpu.prepare_driver()
    else:
        cuda.check_machine()
    pipeline.evaluate(options)

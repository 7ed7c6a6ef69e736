"""An evaluation, from the command line to files on disk; wherever it is stopped, the same command continues it."""

from __future__ import annotations

import argparse
import fcntl
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import storage
from openrlhf_dbb.core import best_model
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.evaluation import benchmarks, evaluated_model, loading, prompting, writing
from openrlhf_dbb.evaluation.answering import answer
from openrlhf_dbb.evaluation.benchmarks import Benchmark
from openrlhf_dbb.evaluation.engines import Engines, SamplingSettings, ray_started
from openrlhf_dbb.evaluation.journal import Journal, Key
from openrlhf_dbb.evaluation.plan import Manifest, Plan, default_name
from openrlhf_dbb.evaluation.prompting import BenchmarkPrompts
from openrlhf_dbb.evaluation.record import record
from openrlhf_dbb.evaluation.summary import ProgressBar, summary
from openrlhf_dbb.platform import cpu

JOURNAL = "journal.jsonl"
_LOCK = ".lock"


def evaluate(arguments: argparse.Namespace) -> None:
    """Generate, verify and write what is missing, then print the summary.

    Raises:
        UsageError: the request cannot be carried out; no engine was started.
        ray.exceptions.RayError: an engine failed; finished rows are in the journal.
    """
    check(arguments)
    choose_model(arguments)
    plan = prepare(arguments)
    folder = Path(arguments.output) / plan.name
    with evaluation_folder(folder):
        journal = Journal(folder / JOURNAL)
        manifest = manifest_of(folder, journal)
        manifest.agree(plan)
        done = journal.keys.union(*(writing.written(folder, name) for name in plan.prompts))
        every = plan.keys(manifest.runs)
        left = [key for key in every if key not in done]
        _announce(folder, plan, manifest, len(every), len(left))
        if left:
            try:
                _generate_all(arguments, plan, manifest, left, len(every), journal)
            except UsageError:
                raise
            except BaseException:
                print(f"{folder}: finished responses are kept; repeat the command to continue", file=sys.stderr)
                raise
        if not manifest.finished:
            for name, prompts in plan.prompts.items():
                writing.write(folder, name, prompts, manifest.runs, journal)
            manifest.finish()
        journal.remove()
    print(summary(folder))
    if arguments.run is not None:
        record(arguments.store_url, arguments.run, folder)


def manifest_of(folder: Path, journal: Journal) -> Manifest:
    """What is recorded of an evaluation; empty if it ended before its first row: any settings are still allowed."""
    manifest = Manifest(folder)
    if not journal.keys and not any(folder.glob("*.parquet")):
        manifest.values.clear()
    return manifest


def check(arguments: argparse.Namespace) -> None:
    """Check the values of the arguments, and that ``--run`` exists.

    Raises:
        UsageError: a value is out of range.
        storage.StoreError: there is no such run, or no such store.
    """
    for flag in ("n", "runs", "engines", "tensor_parallel_size", "max_new_tokens", "max_model_len", "limit"):
        value = getattr(arguments, flag)
        if value is not None and value < 1:
            raise UsageError(f"--{flag} must be at least 1, got {value}")
    for flag, allowed, fits in (
        ("temperature", "at least 0", arguments.temperature >= 0),
        ("top_p", "above 0 and at most 1", 0 < arguments.top_p <= 1),
        ("gpu_memory_utilization", "above 0 and at most 1", 0 < arguments.gpu_memory_utilization <= 1),
        ("seed", "at least 0", arguments.seed >= 0),
    ):
        if not fits:
            raise UsageError(f"--{flag} must be {allowed}, got {getattr(arguments, flag)}")
    if arguments.temperature == 0 and (arguments.n > 1 or arguments.runs > 1):
        raise UsageError(
            "--temperature 0 gives the same response every time; use --n 1 --runs 1 or a temperature above 0"
        )
    if arguments.tensor_parallel_size > 1 and cpu.active():
        raise UsageError("--tensor_parallel_size above 1 needs CUDA; use more --engines")
    if arguments.run is not None:
        with storage.open_store(arguments.store_url, create=False) as store:
            store.find_run(arguments.run)


def choose_model(arguments: argparse.Namespace) -> None:
    """Fill in ``--model`` and ``--name`` where a run is named."""
    if arguments.model is not None:
        arguments.name = arguments.name or default_name(arguments.model)
        arguments.model = evaluated_model.choose(arguments.model)
        return
    with storage.open_store(arguments.store_url, create=False) as store:
        run = store.find_run(arguments.run)
    checkpoint_folder, last = (run.config.get(flag) for flag in ("ckpt.path", "ckpt.output_dir"))
    if checkpoint_folder is None or last is None:
        raise UsageError(f"--run {run.name} does not say where its models are; give --model too")
    best = best_model.place(Path(checkpoint_folder))
    arguments.model = evaluated_model.best_or_last(run.name, best, Path(last))
    arguments.name = arguments.name or run.name


def prepare(arguments: argparse.Namespace) -> Plan:
    """Load the tokenizer and the data, cheapest first.

    Raises:
        UsageError: a benchmark or model is unknown, data cannot be loaded, or a prompt does not fit.
    """
    entries, template = _entries(arguments), _template(arguments.template)
    found = evaluated_model.find(arguments.model)
    prompts = {}
    for entry in entries:
        loaded = loading.load(entry, limit=arguments.limit, template=template)
        prompts[entry.name] = prompting.prepare(
            loaded, found, chat_template=arguments.chat_template, max_new_tokens=arguments.max_new_tokens
        )
    prompting.sequence_length(prompts.values(), found, arguments.max_model_len)
    return Plan(
        name=arguments.name or default_name(arguments.model),
        model=found,
        sampling=SamplingSettings(arguments.n, arguments.temperature, arguments.top_p),
        runs=arguments.runs,
        seed=arguments.seed,
        prompts=prompts,
    )


def _entries(arguments: argparse.Namespace) -> list[Benchmark]:
    try:
        return benchmarks.find_all(arguments.benchmarks, question=arguments.input_key, answer=arguments.label_key)
    except UsageError as error:
        raise UsageError(f"--benchmarks: {error}") from error


def _template(name: str | None) -> str | None:
    if name is None:
        return None
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"--template {name} cannot be read ({error}); give a text file that contains {{question}}"
        ) from error


def _generate_all(
    arguments: argparse.Namespace,
    plan: Plan,
    manifest: Manifest,
    keys: Sequence[Key],
    rows: int,
    journal: Journal,
) -> None:
    """Start the engines, and have them answer ``keys``, the remaining ones of all ``rows``."""
    n = plan.sampling.n
    with ray_started(arguments.engines, arguments.tensor_parallel_size, arguments.verbose) as count:
        seeds = manifest.new_seeds(min(count, len(keys)))
        manifest.write()
        with ProgressBar(total=rows * n, done=(rows - len(keys)) * n) as progress:
            engines = Engines(vllm_arguments(arguments, plan), seeds, plan.sampling)
            progress.begin()
            generate(plan.prompts, keys, engines, journal, progress)


def vllm_arguments(arguments: argparse.Namespace, plan: Plan) -> dict[str, Any]:
    """Arguments of ``vllm.LLM``, except the seed."""
    return {
        "model": plan.model.name,
        "revision": plan.model.revision,
        "tokenizer_revision": plan.model.revision,
        "dtype": "bfloat16",  # as in training with CUDA
        "tensor_parallel_size": arguments.tensor_parallel_size,
        "gpu_memory_utilization": arguments.gpu_memory_utilization,
        "max_model_len": prompting.sequence_length(plan.prompts.values(), plan.model, arguments.max_model_len),
    }


def _announce(folder: Path, plan: Plan, manifest: Manifest, rows: int, left: int) -> None:
    """Print what is going to be done."""
    n, runs = plan.sampling.n, manifest.runs
    for name, prompts in plan.prompts.items():
        form = "chat template" if prompts.chat_template else "no chat template"
        print(
            f"{name}: {len(prompts.texts)} prompts x {n} samples x {runs} runs, {form}, "
            f"at most {prompts.max_new_tokens} tokens"
        )
        for note in prompts.notes:
            print(f"  note: {note}")
    if runs > plan.runs:
        print(f"evaluation {plan.name} already has {runs} runs, not {plan.runs}; it keeps them")
    if 0 < left < rows:
        print(f"{folder}: continuing; {(rows - left) * n} of {rows * n} responses are done")
    elif not left:
        print(f"{folder}: all {rows * n} responses are done")


def generate(
    prompts: dict[str, BenchmarkPrompts], keys: Sequence[Key], engines: Engines, journal: Journal, progress: ProgressBar
) -> None:
    """Answer and verify the prompts of ``keys``; each row is written to the journal at once."""
    for row in answer(prompts, keys, engines.generate):
        journal.append(row)
        progress.add(row)


@contextmanager
def evaluation_folder(folder: Path) -> Iterator[None]:
    """Create the folder if it does not exist, and keep other processes from evaluating into it.

    Raises:
        UsageError: another process does, or the folder cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror}; give another --output or --name") from error
    with (folder / _LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released with the file, even if the process is killed
        except BlockingIOError:
            raise UsageError(f"{folder}: another process is evaluating into it; wait, or give another --name") from None
        yield

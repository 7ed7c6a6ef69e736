"""``benchmarks/gpu.py``, the speed table for CUDA machines: what can be known of it without a GPU."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from openrlhf_dbb.driver import arguments, checks
from openrlhf_dbb.evaluation.training_curves import Scalars

ROOT = Path(__file__).parents[1]


def load(name):
    """A file of benchmarks/ as a module; other files there have the names of packages, so that it is on no path."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


random_model = load("random_model")
memory = load("gpu_memory")
gpu = load("gpu")

TWO = tuple(memory.Gpu(str(i), f"GPU-{i}0aa", "NVIDIA H200", "580.65") for i in range(2))


def work(folder, **values):
    made = {"size": "tiny", "prompts": 64, "rollouts": 8, "prompt_tokens": 128, "max_new_tokens": 1024, "steps": 4}
    return gpu.Work(folder, gpus=TWO, **(made | values))


# Embeddings once or twice; a layer: queries and their projection, keys and values, three matrices of the MLP, the norms
# of queries and keys (128 each) and two of the hidden size; the last norm.
@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ("tiny", 4096 * 64 + 2 * (2 * 64 * 4 * 32 + 2 * 64 * 4 * 32 + 3 * 64 * 128 + 2 * 32 + 2 * 64) + 64),
        ("0.6b", 151_936 * 1024 + 28 * (2 * 1024 * 2048 + 2 * 1024 * 1024 + 3 * 1024 * 3072 + 256 + 2048) + 1024),
        ("1.7b", 151_936 * 2048 + 28 * (2 * 2048 * 2048 + 2 * 2048 * 1024 + 3 * 2048 * 6144 + 256 + 4096) + 2048),
        ("4b", 151_936 * 2560 + 36 * (2 * 2560 * 4096 + 2 * 2560 * 1024 + 3 * 2560 * 9728 + 256 + 5120) + 2560),
        ("8b", 2 * 151_936 * 4096 + 36 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288 + 256 + 8192) + 4096),
    ],
)
def test_a_size_has_as_many_parameters_as_its_published_shape(size, expected):
    assert random_model.count_parameters(size) == expected


@pytest.mark.parametrize(
    ("size", "billions", "without_embeddings"),
    [("0.6b", 0.6, 0.44), ("1.7b", 1.7, 1.4), ("4b", 4.0, 3.6), ("8b", 8.2, 6.95)],
)
def test_that_is_the_number_of_parameters_that_qwen_publishes(size, billions, without_embeddings):
    shape = random_model.SHAPES[size]
    parameters = random_model.count_parameters(size)
    embeddings = (1 if shape.tied else 2) * shape.vocabulary * shape.hidden
    assert parameters / 1e9 == pytest.approx(billions, abs=0.05)
    assert (parameters - embeddings) / 1e9 == pytest.approx(without_embeddings, abs=0.05)


def test_a_prompt_has_the_asked_number_of_tokens_and_every_token_has_its_text(tmp_path):
    random_model.write_prompts(tmp_path / "prompts.jsonl", "tiny", 3, 5)
    rows = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    tokenizer = random_model.build_tokenizer("tiny")
    assert [len(tokenizer.encode(row["input"])) for row in rows] == [5, 5, 5]
    assert len({row["input"] for row in rows}) == 3
    assert tokenizer.decode([0, 4093, 4094]) == "w0 w4093 <eos>"
    assert (len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id) == (4096, 4094, 4095)


def logged(values, ends):
    step = np.arange(1.0, len(ends) + 1)
    return {tag: Scalars(step, np.array(of, dtype=float), np.array(ends, dtype=float)) for tag, of in values.items()}


# Four steps of 10 rollouts. The first, the warm-up, took long.
VALUES = {
    "train/policy_loss": [0, 0, 0, 0],
    "train/rollout/num_samples": [10, 10, 10, 10],
    "train/rollout/response_length_mean": [100, 100, 80, 100],
    "train/timing/generation": [50, 4, 2, 5],
    "train/timing/make_experience": [9, 1, 1, 1],
    "train/timing/ppo_train": [9, 2, 4, 3],
    "train/timing/broadcast": [9, 0.5, 0.5, 0.5],
}
ENDS = [1100, 1108, 1116, 1128]


def test_steps_after_the_first_are_measured_with_their_tokens():
    steps = gpu.measured_steps(logged(VALUES, ENDS), prompt_tokens=20)
    assert [step.seconds for step in steps] == [8, 8, 12]
    assert [step.generated for step in steps] == [1000, 800, 1000]
    assert [step.trained for step in steps] == [1200, 1000, 1200]  # 10 x (20 + 100), 10 x (20 + 80)
    assert steps[1].parts == {"generation": 2, "make_experience": 1, "ppo_train": 4, "broadcast": 0.5}


def test_figures_are_medians_over_the_steps_of_all_runs_and_the_highest_peak():
    steps = gpu.measured_steps(logged(VALUES, ENDS), prompt_tokens=20)
    runs = [gpu.Measured(100, steps[:2], 40.0), gpu.Measured(80, steps[2:], 41.0)]
    assert gpu.figures(runs) == {
        "first_step_s": 90,
        "step_s": 8,  # of 8, 8, 12
        "generation_s": 4,  # of 4, 2, 5
        "make_experience_s": 1,
        "ppo_train_s": 3,  # of 2, 4, 3
        "broadcast_s": 0.5,
        "rest_s": 0.5,  # 8 - 7.5 = 0.5, 8 - 7.5 = 0.5, 12 - 9.5 = 2.5
        "generated_per_s": 250,  # 1000 / 4 = 250, 800 / 2 = 400, 1000 / 5 = 200
        "trained_per_s": 400,  # 1200 / 2 = 600, 1000 / 4 = 250, 1200 / 3 = 400
        "peak_gib": 41.0,
    }
    assert gpu.figures([gpu.Measured(100, steps, None)])["peak_gib"] is None


def test_a_peak_counts_until_the_last_step():
    samples = [(1.0, 10.0), (2.0, 30.0), (3.0, 50.0)]
    assert memory.peak(samples, until=2.0) == 30.0
    assert memory.peak([], until=2.0) is None


def test_a_ratio_is_ours_to_the_other_or_none():
    found = {
        "ours": {"step_s": 9.0, "generation_s": 4.0, "ppo_train_s": 3.0, "peak_gib": 66.0},
        "openrlhf": {"step_s": 12.0, "generation_s": 5.0, "ppo_train_s": 3.0, "peak_gib": 60.0},
    }
    compared = gpu.ratios(found)
    assert compared["step / openrlhf"] == 0.75
    assert compared["generation / openrlhf"] == 0.8
    assert compared["peak memory / openrlhf"] == pytest.approx(1.1)
    assert compared["step / ours-padded"] is None
    assert gpu.ratios({"openrlhf": found["openrlhf"]})["step / openrlhf"] is None
    assert gpu.ratios(found | {"ours": found["ours"] | {"peak_gib": None}})["peak memory / openrlhf"] is None


@pytest.mark.parametrize(
    ("step", "memory", "expected"),
    [
        (1.05, 1.2, []),
        (1.06, 1.2, ["step / openrlhf"]),
        (0.9, 1.21, ["peak memory / openrlhf"]),
        (None, None, ["step / openrlhf", "peak memory / openrlhf"]),
    ],
)
def test_a_bound_is_missed_if_the_ratio_is_above_it_or_was_not_measured(step, memory, expected):
    compared = dict.fromkeys(gpu.RATIOS) | {"step / openrlhf": step, "peak memory / openrlhf": memory}
    assert gpu.missed(compared) == expected


@pytest.mark.parametrize(
    ("variable", "expected"),
    [(None, "012"), ("", ""), ("2,0", "20"), ("1,7,0", "1"), ("GPU-20aa", "2"), ("GPU-1, 0", "10"), ("-1", "")],
)
def test_visible_gpus_are_those_of_cuda_visible_devices_up_to_the_first_unknown_one(variable, expected):
    listed = [memory.Gpu(str(i), f"GPU-{i}0aa", "NVIDIA H200", "580.65") for i in range(3)]
    assert "".join(found.index for found in memory.visible(listed, variable)) == expected


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Function: put a stand-in for nvidia-smi on the path, which prints this, and notes how it was called."""

    def install(text, code=0):
        program = tmp_path / "nvidia-smi"
        program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/called\ncat {tmp_path}/said\nexit {code}\n')
        program.chmod(0o755)
        (tmp_path / "said").write_text(text)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        return tmp_path / "called"

    return install


@pytest.mark.parametrize(
    ("said", "code", "expected"), [("2048\n51200\n", 0, 50.0), ("[N/A]\n[N/A]\n", 0, None), ("no driver\n", 9, None)]
)
def test_memory_is_that_of_the_fullest_of_the_gpus_that_are_used(nvidia_smi, said, code, expected):
    called = nvidia_smi(said, code)
    assert memory.gpu_memory(TWO) == expected
    assert called.read_text().split() == ["--id=0,1", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]


def test_gpus_that_torch_cannot_use_are_no_rehearsal(nvidia_smi, monkeypatch):
    import torch

    nvidia_smi("0, GPU-00aa, NVIDIA H200, 580.65\n1, GPU-10aa, NVIDIA H200, 580.65\n")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert memory.find_gpus() == TWO
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit, match=r"nvidia-smi shows 2 GPUs, but torch .* can use 0"):
        memory.find_gpus()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert memory.find_gpus() == ()


def test_the_machine_line_names_the_gpus_or_says_that_there_was_none():
    assert gpu.machine(TWO).startswith("2 x NVIDIA H200; driver 580.65, torch ")
    assert gpu.machine(()).startswith("rehearsal without CUDA: nothing of this was run on a GPU; torch ")


def parsed(name, folder):
    """A candidate's settings on two GPUs."""
    command = gpu.command(name, work(folder), folder / "run")
    assert command[1:4] == ["-m", "openrlhf_dbb", "train"]
    settings = arguments.parse([*command[4:], "--dry_run", "--assume_gpus", "2x80"])
    checks.check(settings)
    return settings


@pytest.mark.parametrize("name", gpu.CANDIDATES)
def test_all_candidates_do_the_same_work_on_all_gpus(name, tmp_path):
    """The flags are those of OpenRLHF 0.11.2, and ours."""
    values = parsed(name, tmp_path).values
    same = work(tmp_path).flags() | {
        "reward.remote_url": [str(tmp_path / "reward.py")],
        "data.max_len": 1152,  # 128 + 1024
        "train.batch_size": 256,  # half of 64 x 8
        "algo.advantage.estimator": "group_norm",
        "algo.kl.init_coef": 0.0,
        "algo.dynamic_filtering_enable": False,
        "algo.advantage.is_correction_level": "off",
        "actor.entropy_coef": 0.0,
        "actor.gradient_checkpointing_enable": True,
        "actor.num_gpus_per_node": 2,
        "vllm.num_engines": 2,
        "vllm.tensor_parallel_size": 1,
        "vllm.gpu_memory_utilization": 0.7,
        "vllm.enable_sleep": True,
        "ds.enable_sleep": True,
        "ds.param_dtype": "bf16",
        "train.colocate_all": True,
        "train.max_epochs": 1,
        "logger.logging_steps": 1,
    }
    assert {flag: values[flag] for flag in same} == {
        flag: str(value) if isinstance(value, Path) else value for flag, value in same.items()
    }


def test_a_candidate_differs_from_ours_in_what_it_is_about(tmp_path):
    ours, padded, limits = (parsed(name, tmp_path).values for name in ("ours", "ours-padded", "ours-vllm-limits"))
    allowed = {
        "ds.packing_samples",
        "train.dynamic_batch_enable",
        "train.max_tokens_per_gpu",
        "rollout.max_tokens_per_gpu",
    }
    assert {flag for flag in ours if ours[flag] != padded[flag]} <= allowed
    assert not padded["ds.packing_samples"] and not padded["train.dynamic_batch_enable"]
    assert {flag: limits[flag] for flag in ours if ours[flag] != limits[flag]} == {
        "vllm.max_num_seqs": 128,
        "vllm.max_num_batched_tokens": 2048,
    }


def test_a_candidate_gets_its_gpus_by_nvidia_smis_numbers_and_no_other_cluster(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    given = gpu.environment(TWO[1:])
    assert (given["CUDA_VISIBLE_DEVICES"], given["CUDA_DEVICE_ORDER"]) == ("1", "PCI_BUS_ID")
    assert "RAY_ADDRESS" not in given


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "3"], "--gpus 3: 2 are visible"),
        (["--steps", "1"], "--steps 1: 1 is warm-up"),
        (["--prompts", "3", "--rollouts", "2"], "3 x --rollouts 2 = 6 rollouts are not a multiple of 4: 2 optimizer"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(words, message, tmp_path):
    with pytest.raises(SystemExit, match=message) as refused:
        gpu.work_of(gpu.build_parser().parse_args(words), [], TWO, tmp_path)
    assert "\n" not in str(refused.value)


def test_defaults_grow_with_the_gpus(tmp_path):
    nothing = gpu.build_parser().parse_args([])
    on_two = gpu.work_of(nothing, ["--x", "1"], TWO, tmp_path)
    assert (on_two.size, on_two.prompts, on_two.rollouts, on_two.max_new_tokens, on_two.steps) == (
        "1.7b",
        64,
        8,
        1024,
        4,
    )
    assert on_two.more == ("--x", "1")
    one = gpu.work_of(gpu.build_parser().parse_args(["--gpus", "1", "--size", "8b"]), [], TWO, tmp_path)
    assert (one.size, one.prompts, one.gpus) == ("8b", 32, TWO[:1])
    assert gpu.work_of(nothing, [], (), tmp_path).size == "tiny"


def test_the_table_is_below_110_columns_wide_and_marks_what_was_not_measured():
    row = dict.fromkeys((figure for figure, *_ in gpu.COLUMNS), 123.456) | {
        "generated_per_s": 123456.7,
        "peak_gib": None,
    }
    lines = gpu.table({"ours-vllm-limits": row}).splitlines()
    assert max(map(len, lines)) < 110
    assert lines[2].split() == [
        "ours-vllm-limits", "123.5", "123.46", "123.46", "123.46", "123.46", "123.46", "123.46", "123,457", "123", "-",
    ]  # fmt: skip


def test_a_candidate_that_fails_is_named_with_the_end_of_its_output_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    def failing(name, work, folder):
        return [sys.executable, "-c", "print('CUDA out of memory'); raise SystemExit(3)"]

    monkeypatch.setattr(gpu, "command", failing)
    monkeypatch.setattr(gpu, "find_gpus", lambda: ())
    monkeypatch.setattr(gpu, "prepare", lambda work: None)
    assert gpu.main(["--only", "ours", "openrlhf", "--folder", str(tmp_path), "--json", str(tmp_path / "line")]) == 1
    error = capsys.readouterr().err
    for name in ("ours", "openrlhf"):
        assert f"{name}: exit code 3; the end of its output:\nCUDA out of memory" in error
    assert json.loads((tmp_path / "line").read_text())["figures"] == {}


# Three steps with OpenRLHF's tags, some seconds apart, and the folder of events: its arguments.
STAND_IN = """
import sys, time
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

values = {"policy_loss": 0.0, "rollout/num_samples": 512, "rollout/response_length_mean": 1024}
values |= {f"timing/{part}": 0.125 for part in ("generation", "make_experience", "ppo_train", "broadcast")}
summary = Summary(value=[Summary.Value(tag=f"train/{tag}", simple_value=value) for tag, value in values.items()])
writer, now = EventFileWriter(sys.argv[2]), time.time()
for step in range(1, 4):
    writer.add_event(Event(wall_time=now + step * float(sys.argv[1]), step=step, summary=summary))
writer.close()
"""


def test_on_gpus_the_peak_is_nvidia_smis_and_a_missed_bound_is_an_error(tmp_path, monkeypatch, capsys):
    """A stand-in for nvidia-smi sees a GPU with 50 GiB in use; one for the training takes 0.8 s a step for ours, 0.4 s
    for OpenRLHF's trainer."""
    program = tmp_path / "nvidia-smi"
    listed = "0, GPU-00aa, NVIDIA H200, 580.65"
    program.write_text(f'#!/bin/sh\ncase "$*" in *memory.used*) echo 51200;; *) echo "{listed}";; esac\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr(gpu, "prepare", lambda work: None)

    def command(name, work, folder):
        return [sys.executable, "-c", STAND_IN, "0.8" if name == "ours" else "0.4", str(folder / "events" / "run")]

    monkeypatch.setattr(gpu, "command", command)
    monkeypatch.setattr(memory, "POLL_S", 0.05)
    words = ["--only", "ours", "openrlhf", "--steps", "3", "--folder", str(tmp_path), "--json", str(tmp_path / "line")]
    assert gpu.main(words) == 0
    assert gpu.main([*words, "--check"]) == 1
    found = json.loads((tmp_path / "line").read_text())
    assert found["machine"].startswith("1 x NVIDIA H200; driver 580.65, torch ")
    assert found["work"] == {
        "size": "1.7b", "prompts": 32, "rollouts": 8, "prompt_tokens": 128, "max_new_tokens": 1024,
    }  # fmt: skip
    assert found["missed"] == ["step / openrlhf"]
    assert found["ratio"]["step / openrlhf"] == pytest.approx(2)
    assert found["ratio"]["peak memory / openrlhf"] == 1
    ours = found["figures"]["ours"]
    assert ours["step_s"] == pytest.approx(0.8)
    assert ours["rest_s"] == pytest.approx(ours["step_s"] - 4 * 0.125)
    assert ours["peak_gib"] == 50
    assert ours["generated_per_s"] == 512 * 1024 * 8
    assert ours["trained_per_s"] == 512 * (1024 + 128) * 8
    assert "rehearsal" not in capsys.readouterr().out


def test_a_candidate_waits_until_the_one_before_has_left_the_gpus(monkeypatch):
    used = iter([60.0, 60.0, 10.4, 0.0])
    monkeypatch.setattr(memory, "gpu_memory", lambda gpus: next(used))
    monkeypatch.setattr(memory, "POLL_S", 0.0)
    memory.settle(TWO, None)  # nothing to compare with: no look
    memory.settle(TWO, 10.0)
    assert next(used) == 0.0


def test_a_step_that_was_not_logged_is_an_error(tmp_path):
    (tmp_path / "log").write_text("the last words")
    with pytest.raises(
        gpu.CandidateError, match=r"ours: 'train/policy_loss' was logged for 0 of 4 steps; the end .*\n.*last"
    ):
        gpu.scalars("ours", work(tmp_path), tmp_path)


@pytest.mark.e2e
@pytest.mark.long
def test_a_rehearsal_measures_everything_and_says_that_it_is_one(tmp_path):
    program = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--steps", "2", "--only", "ours", "openrlhf"]
    done = subprocess.run(
        [*program, "--check", "--json", str(tmp_path / "line"), "--", "--actor.adam.lr", "1e-4"],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)},
        text=True,
        capture_output=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = done.stdout.splitlines()
    assert lines[0].startswith("rehearsal without CUDA: nothing of this was run on a GPU")
    found = json.loads((tmp_path / "line").read_text())
    assert found["more"] == ["--actor.adam.lr", "1e-4"]
    assert found["missed"] == []
    for name in ("ours", "openrlhf"):
        row = next(line.split() for line in lines if line.startswith(f"{name} "))
        assert len(row) == 1 + len(gpu.COLUMNS) and "-" not in row
        figures = found["figures"][name]
        assert all(figures[f"{part}_s"] > 0 for part in gpu.PARTS)
        assert sum(figures[f"{part}_s"] for part in (*gpu.PARTS, "rest")) == pytest.approx(figures["step_s"])
        # 8 prompts with 4 rollouts of 16 tokens; a token in 4,096 ends one.
        assert figures["generated_per_s"] * figures["generation_s"] == pytest.approx(512, abs=32)
        assert figures["trained_per_s"] * figures["ppo_train_s"] == pytest.approx(512 + 8 * 32, abs=32)
        assert 0.5 < figures["peak_gib"] < 16

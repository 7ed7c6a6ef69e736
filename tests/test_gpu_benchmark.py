"""``benchmarks/gpu.py``, the speed table for CUDA machines, as far as it can be tested without a GPU."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]


def load(name):
    """A file of benchmarks/ as a module; that folder holds names of packages and must not be on the path."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


random_model = load("random_model")
event_files = load("event_files")
gpu = load("gpu")


def work(folder, **values):
    defaults = {"size": "tiny", "prompts": 64, "rollouts": 8, "prompt_tokens": 128, "max_new_tokens": 1024, "steps": 4}
    return gpu.Work(folder, gpus=2, **(defaults | values))


# Parameters that Qwen publishes, in billions.
@pytest.mark.parametrize(("size", "billions"), [("0.6b", 0.6), ("1.7b", 1.7), ("4b", 4.0), ("8b", 8.2)])
def test_a_size_has_the_number_of_parameters_that_qwen_publishes(size, billions):
    import torch
    from transformers import Qwen3ForCausalLM

    with torch.device("meta"):
        model = Qwen3ForCausalLM(random_model.build_config(size))
    assert sum(weights.numel() for weights in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.05)


def test_a_prompt_has_the_requested_number_of_tokens(tmp_path):
    random_model.write_prompts(tmp_path / "prompts.jsonl", "tiny", 3, 5)
    rows = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    tokenizer = random_model.build_tokenizer("tiny")
    assert [len(tokenizer.encode(row["input"])) for row in rows] == [5, 5, 5]
    assert len({row["input"] for row in rows}) == 3


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


def test_figures_are_medians_over_the_steps_after_the_first():
    step, ends = np.arange(1.0, 5), np.array([1100.0, 1108, 1116, 1128])
    scalars = {tag: event_files.Scalars(step, np.array(values, dtype=float), ends) for tag, values in VALUES.items()}
    assert gpu.figures(scalars, prompt_tokens=20, began=1000.0) == {
        "first_step_s": 100,
        "step_s": 8,  # of 8, 8, 12
        "generation_s": 4,  # of 4, 2, 5
        "make_experience_s": 1,
        "ppo_train_s": 3,  # of 2, 4, 3
        "broadcast_s": 0.5,
        "rest_s": 0.5,  # 8 - 7.5 = 0.5, 8 - 7.5 = 0.5, 12 - 9.5 = 2.5
        "generated_per_s": 250,  # 1000 / 4 = 250, 800 / 2 = 400, 1000 / 5 = 200
        "trained_per_s": 400,  # 1200 / 2 = 600, 1000 / 4 = 250, 1200 / 3 = 400
    }


def test_a_ratio_is_ours_to_openrlhfs_and_none_where_a_side_is_missing():
    ours = {"step_s": 9.0, "generation_s": 4.0, "ppo_train_s": 3.0, "peak_gib": None}
    theirs = {"step_s": 12.0, "generation_s": 5.0, "ppo_train_s": 3.0, "peak_gib": 60.0}
    compared = gpu.ratios({"ours": ours, "openrlhf": theirs})
    assert compared == {"step": 0.75, "generation": 0.8, "train": 1.0, "peak memory": None}
    assert gpu.ratios({"openrlhf": theirs}) == dict.fromkeys(compared)


@pytest.mark.parametrize(
    ("step", "memory", "expected"),
    [(1.05, 1.2, []), (1.06, 1.2, ["step"]), (0.9, 1.21, ["peak memory"]), (None, None, ["step", "peak memory"])],
)
def test_a_bound_is_missed_if_the_ratio_is_above_it_or_was_not_measured(step, memory, expected):
    assert gpu.missed_bounds(dict.fromkeys(gpu.RATIOS) | {"step": step, "peak memory": memory}) == expected


# Stands in for a training: three steps with OpenRLHF's tags, some seconds apart. Arguments: seconds, folder of events.
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


@pytest.fixture
def one_gpu(tmp_path, monkeypatch):
    """A stand-in for nvidia-smi and torch that shows one GPU with 50 GiB in use; no model is made."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '0, 51200'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda number: "NVIDIA H200")
    monkeypatch.setattr(gpu, "prepare", lambda work: None)
    monkeypatch.setattr(gpu, "POLL_S", 0.05)


def test_the_peak_is_nvidia_smis_and_a_missed_bound_is_an_error(tmp_path, monkeypatch, one_gpu):
    """The stand-in training takes 0.8 s a step for ours and 0.4 s for OpenRLHF's trainer."""

    def command(name, work, folder):
        return [sys.executable, "-c", STAND_IN, "0.8" if name == "ours" else "0.4", str(folder / "events" / "run")]

    monkeypatch.setattr(gpu, "command", command)
    words = ["--steps", "3", "--folder", str(tmp_path), "--json", str(tmp_path / "line")]
    assert gpu.main(words) == 0
    assert gpu.main([*words, "--check"]) == 1
    measured = json.loads((tmp_path / "line").read_text())
    assert (measured["machine"], measured["missed"]) == ("1 x NVIDIA H200", ["step"])
    assert (measured["ratio"]["step"], measured["ratio"]["peak memory"]) == (pytest.approx(2), 1)
    ours = measured["figures"]["ours"]
    assert (ours["step_s"], ours["peak_gib"]) == (pytest.approx(0.8), 50)
    assert ours["generated_per_s"] == 512 * 1024 * 8


def test_a_candidate_that_fails_is_named_and_the_other_goes_on(tmp_path, monkeypatch, capsys, one_gpu):
    fails = "print('CUDA out of memory'); raise SystemExit(3)"
    monkeypatch.setattr(gpu, "command", lambda name, work, folder: [sys.executable, "-c", fails])
    assert gpu.main(["--folder", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    for name in ("ours", "openrlhf"):
        assert f"{name}: exit code 3; the end of its output:\nCUDA out of memory" in error


def test_a_step_that_was_not_logged_is_an_error(tmp_path):
    (tmp_path / "log").write_text("the last words")
    with pytest.raises(gpu.CandidateError, match="policy_loss was logged for 0 of 4 steps"):
        gpu.logged_scalars("ours", work(tmp_path), tmp_path)


@pytest.mark.e2e
@pytest.mark.long
def test_a_rehearsal_measures_everything(tmp_path):
    program = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--steps", "2", "--check"]
    done = subprocess.run(
        [*program, "--json", str(tmp_path / "line"), "--", "--actor.adam.lr", "1e-4"],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)},
        text=True,
        capture_output=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    measured = json.loads((tmp_path / "line").read_text())
    assert measured["machine"].startswith("rehearsal without CUDA")
    assert sorted(measured["figures"]) == ["openrlhf", "ours"]
    for figures in measured["figures"].values():
        assert all(figures[f"{part}_s"] > 0 for part in gpu.PARTS)
        # 8 prompts with 4 rollouts of 16 tokens; a token in 4,096 ends one.
        assert figures["generated_per_s"] * figures["generation_s"] == pytest.approx(512, abs=32)

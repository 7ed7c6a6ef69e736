"""Recorded rollouts: what a file gives back, what is refused, a kill while it is written, and a training on them."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from trainings import rows

from openrlhf_dbb.core.filling import Group
from openrlhf_dbb.core.recorded import Record, RecordedBatch, RecordedRollout, Recorder
from openrlhf_dbb.core.strategies import Drawn

SAME = {"the data set": "abc", "--rollout.batch_size": 2}
ABOUT = {"run": "first", "model": "m", "same": SAME}


def rollout(tokens, actions, log_probs, reward=1.0, **more):
    return RecordedRollout(
        np.array(tokens, dtype=np.int32),
        np.array(actions, dtype=bool),
        np.array(log_probs, dtype=np.float32),
        reward,
        **more,
    )


# Two turns of the policy, with a token of the environment between; and a response of one token.
TWO_TURNS = rollout([5, 6, 7, 8], [True, False, True], [-0.1, -2.5], truncated=True)
SHORT = rollout([5, 9], [True], [-0.25], reward=0.0, logs={"format": 0.5})
BATCH = RecordedBatch(
    trained=(
        Group(("2+2=", "4"), 17, Drawn(17, 0.5, 2.0), 3, (TWO_TURNS, SHORT), np.array([1.0, np.nan]), ("4", None)),
    ),
    filtered=(Group(("\ud800é", ""), 3, rollouts=(SHORT,), scores=np.array([0.0])),),
    skipped=2,
)  # fmt: skip


@pytest.fixture
def recorded(tmp_path):
    """A folder with three steps."""
    folder = tmp_path / "rollouts"
    recorder = Recorder(folder, ABOUT)
    for step in (1, 2, 3):
        recorder.write(step, BATCH)
    return folder


def test_a_batch_comes_back_as_it_was_but_for_the_ids_of_its_store(recorded):
    record = Record(recorded)
    assert (record.steps, record.about["run"]) == (3, "first")
    batch = record.batch(2)
    assert batch.skipped == 2
    [group] = batch.trained
    assert group.prompt == ("2+2=", "4")
    assert (group.prompt_id, group.drawn, group.version) == (0, Drawn(0, 0.5, 2.0), 3)
    assert group.scores.tolist() == pytest.approx([1.0, np.nan], nan_ok=True)
    assert group.read == ("4", None)
    first, second = group.rollouts
    assert first.tokens.tolist() == [5, 6, 7, 8]
    assert first.actions.tolist() == [True, False, True]
    assert first.log_probs.tolist() == TWO_TURNS.log_probs.tolist()
    assert (first.reward, first.truncated, first.logs) == (1.0, True, {})
    assert (second.reward, second.truncated, second.logs) == (0.0, False, {"format": 0.5})
    [other] = batch.filtered
    assert (other.prompt, other.drawn, other.version, other.read) == (
        ("\ud800é", ""),
        None,
        None,
        (),
    )
    assert len(other.rollouts) == 1


def test_a_token_takes_nine_bytes_where_it_is_generated_and_five_in_the_prompt(tmp_path):
    def size(prompt, generated):
        tokens = prompt + generated
        actions = [False] * (prompt - 1) + [True] * generated
        long = rollout([1] * tokens, actions, [-1.0] * generated)
        group = Group(("a", "1"), 0, rollouts=(long,), scores=np.array([1.0]))
        Recorder(tmp_path, ABOUT).write(1, RecordedBatch(trained=(group,)))
        return (tmp_path / "step-000001.npz").stat().st_size

    least = size(10, 10)
    assert size(10, 1010) - least == pytest.approx(9000, abs=200)
    assert size(1010, 10) - least == pytest.approx(5000, abs=200)


def test_a_resume_deletes_later_steps_and_goes_on(recorded):
    recorder = Recorder(recorded, ABOUT)
    recorder.roll_back(1)
    assert Record(recorded).steps == 1
    recorder.write(2, BATCH)
    assert Record(recorded).steps == 2


def test_what_is_not_scored_is_not_recorded(tmp_path):
    unscored = RecordedBatch(trained=(Group(("a", "1"), 0, rollouts=(SHORT,)),))
    with pytest.raises(ValueError, match="a group has no scores"):
        Recorder(tmp_path, ABOUT).write(1, unscored)
    with pytest.raises(ValueError, match="no step"):
        Record(tmp_path)


@pytest.mark.parametrize("name", SAME)
def test_a_record_of_something_else_is_refused_with_both_values(recorded, name):
    record = Record(recorded)
    record.check(SAME | {"what it does not tell": 1})
    with pytest.raises(ValueError, match=f"{name} {SAME[name]}, here it is other; give the same"):
        record.check(SAME | {name: "other"})


def test_log_probs_that_the_loss_takes_have_to_be_there(tmp_path):
    unknown = rollout([1, 2], [True], [np.nan])
    group = Group(("a", "1"), 0, rollouts=(unknown,), scores=np.array([1.0]))
    Recorder(tmp_path, ABOUT).write(1, RecordedBatch(trained=(group,)))
    record = Record(tmp_path)
    assert np.isnan(record.batch(1).trained[0].rollouts[0].log_probs).all()
    with pytest.raises(ValueError, match=r"step-000001.npz lacks log-probs .*; leave out"):
        record.batch(1, with_log_probs=True)


def cut(path):
    path.write_bytes(path.read_bytes()[:-30])


def emptied(path):
    path.write_bytes(b"")


def deleted(path):
    path.unlink()


@pytest.mark.parametrize("damage", [cut, emptied, deleted])
def test_a_step_that_is_cut_or_missing_is_named_before_anything_starts(recorded, damage):
    damage(recorded / "step-000002.npz")
    with pytest.raises(ValueError, match=r"step-000002.npz is (damaged|missing).*copy"):
        Record(recorded)


def test_a_changed_byte_and_a_file_of_something_else_are_named_when_their_step_is_read(recorded):
    path = recorded / "step-000001.npz"
    content = bytearray(path.read_bytes())
    content[content.index(np.float32(-2.5).tobytes())] ^= 1
    path.write_bytes(content)
    np.savez(recorded / "step-000003.npz", weights=np.zeros(3))
    record = Record(recorded)
    record.batch(2)
    for step in (1, 3):
        with pytest.raises(ValueError, match=f"step-00000{step}.npz is damaged"):
            record.batch(step)


@pytest.mark.parametrize(
    ("content", "problem"),
    [(None, "holds no recorded"), ("{", "damaged"), ('{"format": 1}', "damaged"), ("[]", "damaged"),
     (json.dumps({"format": 9, **ABOUT}), "of format 9, this release reads 1")],
)  # fmt: skip
def test_a_folder_that_is_no_record_is_refused(recorded, content, problem):
    about = recorded / "record.json"
    if content is None:
        about.unlink()
    else:
        about.write_text(content)
    with pytest.raises(ValueError, match=re.escape(str(recorded)) + f".*{problem}"):
        Record(recorded)


WRITER = """
import sys
from pathlib import Path
import numpy as np
from test_recorded import ABOUT, rollout
from openrlhf_dbb.core.filling import Group
from openrlhf_dbb.core.recorded import RecordedBatch, Recorder
long = rollout([1] * 200_000, [True] * 199_999, [-1.0] * 199_999)
group = Group(("a", "1"), 0, rollouts=(long,) * 4, scores=np.ones(4))
recorder = Recorder(Path(sys.argv[1]), ABOUT)
for step in range(1, 10_000):
    recorder.write(step, RecordedBatch(trained=(group,)))
"""


def test_a_kill_while_a_step_is_written_leaves_whole_steps(tmp_path):
    folder = tmp_path / "rollouts"
    command = [sys.executable, "-c", WRITER, str(folder)]
    process = subprocess.Popen(command, cwd=Path(__file__).parent)
    deadline = time.monotonic() + 600
    while not list(folder.glob("step-000003.npz")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.001)
    while not list(folder.glob("*.unfinished")):
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    record = Record(folder)
    assert record.steps >= 3
    for step in range(1, record.steps + 1):
        assert len(record.batch(step).trained[0].rollouts[3].log_probs) == 199_999
    Recorder(folder, ABOUT).write(record.steps + 1, BATCH)
    assert Record(folder).batch(record.steps + 1).skipped == 2


# 8 prompts a step, 8 rollouts a prompt, 2 optimizer steps a step, 3 steps
SMALL = [
    "--preset", "tiny", "--data.max_samples", "32", "--rollout.batch_size", "8", "--train.batch_size", "32",
    "--rollout.micro_batch_size", "32", "--train.micro_batch_size", "32", "--train.max_rollouts", "192",
    "--ckpt.save_steps", "-1",
]  # fmt: skip
EACH = """SELECT step, prompt_id, sample, score, advantage, log_prob, length, read
FROM rollouts JOIN runs USING (run_id) WHERE name = '{}' ORDER BY step, prompt_id, sample"""


@pytest.mark.e2e
def test_a_run_without_vllm_trains_on_recorded_rollouts_to_the_same_weights(train, tmp_path):
    """The second run is in a folder of its own, as on another machine, and its vLLM cannot be imported."""
    result = train(
        tmp_path, *SMALL, "--estimator", "point", "--run_name", "first", "--rollouts.record",
        "--eval.steps", "-1", timeout=1800,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-4000:]
    record = tmp_path / "copied"
    (tmp_path / "runs/first/checkpoints/rollouts").rename(record)
    broken = tmp_path / "vllm"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise ImportError('there is no vLLM here')")
    for name, *flags in (("again", "--estimator", "point"), ("other", "--estimator", "dbb")):
        result = train(
            tmp_path, *SMALL, *flags, "--run_name", name, "--rollouts.of_run", str(record),
            "--reward.remote_url", "http://127.0.0.1:9", timeout=1800,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr[-4000:]
        assert "3 recorded steps of first: no engine is started" in result.stdout
        assert "training ends with step 3, the last recorded one" in result.stdout
    first = rows(tmp_path, EACH.format("first"))
    assert len(first) == 192
    assert rows(tmp_path, EACH.format("again")) == first
    weights = load_file(tmp_path / "runs/first/model/model.safetensors")
    same = load_file(tmp_path / "runs/again/model/model.safetensors")
    for weight_name, weight in weights.items():
        assert torch.equal(weight, same[weight_name])
    other = rows(tmp_path, EACH.format("other"))
    assert [row[:4] for row in other] == [row[:4] for row in first]
    assert [row[4] for row in other] != [row[4] for row in first]

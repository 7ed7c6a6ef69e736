"""Runs that share engines: nothing carries over from one to the next."""

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[1]

SMALL = [
    "--preset", "tiny", "--estimator", "dbb", "--reward.remote_url", "exact_match", "--data.max_samples", "32",
    "--rollout.batch_size", "16", "--rollout.n_samples_per_prompt", "4", "--train.batch_size", "32",
    "--rollout.micro_batch_size", "32", "--train.micro_batch_size", "32", "--train.num_episodes", "2",
    "--ckpt.save_steps", "-1", "--eval.steps", "100", "--store.url", "sqlite:///a.db", "--train.seed", "3",
]  # fmt: skip


@pytest.fixture(scope="module")
def lane(tmp_path_factory):
    """The answers of a lane to four command lines, and its folder."""
    folder = tmp_path_factory.mktemp("lane")
    lines = [
        [*SMALL, "--run_name", "destroyed", "--actor.adam.lr", "0.3"],
        [*SMALL, "--run_name", "refused", "--train.batch_size", "33"],
        [*SMALL, "--run_name", "after", "--method", "dr_grpo"],
        [*SMALL, "--run_name", "longer", "--data.max_len", "48"],
    ]
    log = folder / "log"
    with log.open("w") as errors:
        ended = subprocess.run(
            [sys.executable, "-m", "study", "lane"],
            input="".join(json.dumps(line) + "\n" for line in lines),
            stdout=subprocess.PIPE, stderr=errors, text=True, cwd=folder, timeout=300,
            env=os.environ | {"PYTHONPATH": str(ROOT)},  # study/ is not installed
        )  # fmt: skip
    assert ended.returncode == 0, log.read_text()[-4000:]
    return [json.loads(line)["error"] for line in ended.stdout.splitlines()], folder


def rows(folder, sql):
    with sqlite3.connect(f"file:{folder}/a.db?mode=ro", uri=True) as connection:
        return connection.execute(sql).fetchall()


def test_a_lane_answers_every_line_and_continues_after_a_refused_one(lane):
    errors, folder = lane
    assert errors[0] is None and errors[2] is None
    assert "is not a multiple of --train.batch_size 33" in errors[1]
    assert "max_model_len = 48, but the session's has 32; train it on its own" in errors[3]
    finished = rows(folder, "SELECT name, last_step FROM runs WHERE status = 'finished' ORDER BY name")
    assert finished == [("after", 4), ("destroyed", 4)]


def test_a_run_starts_from_its_own_model_whatever_the_previous_run_made_of_it(lane):
    _, folder = lane
    accuracy = {
        (name, step): value
        for name, step, value in rows(
            folder,
            "SELECT r.name, v.step, sum(v.successes) / sum(v.verified) FROM evaluation_results v "
            "JOIN runs r ON r.run_id = v.run_id GROUP BY r.name, v.step",
        )
    }
    # A learning rate of 0.3 destroys the policy; the model itself has 40 % right, +-3 on 32 prompts x 8 samples.
    assert accuracy["destroyed", 0] > 0.2
    assert accuracy["destroyed", 4] < 0.05
    assert accuracy["after", 0] == pytest.approx(accuracy["destroyed", 0], abs=0.12)
    assert accuracy["after", 4] > 0.2


def test_runs_of_one_seed_train_on_the_prompts_in_the_same_order(lane):
    _, folder = lane
    orders = [
        rows(
            folder,
            "SELECT h.step, h.prompt_id FROM posterior_history h JOIN runs r ON r.run_id = h.run_id "
            f"WHERE r.name = '{name}' ORDER BY h.step, h.prompt_id",
        )
        for name in ("destroyed", "after")
    ]
    assert len(orders[0]) == 4 * 16
    assert orders[0] == orders[1]


def test_a_run_has_its_own_loss_and_history(lane):
    _, folder = lane
    assert rows(folder, "SELECT name, method FROM runs WHERE status = 'finished' ORDER BY name") == [
        ("after", "dr_grpo"),
        ("destroyed", "grpo"),
    ]
    # The prior (1, 1), discounted once, and this group's four rollouts: nothing of the previous run.
    first = rows(
        folder,
        "SELECT DISTINCT h.alpha + h.beta FROM posterior_history h JOIN runs r ON r.run_id = h.run_id "
        "WHERE r.name = 'after' AND h.step <= 2",
    )
    assert first == [(5.0,)]

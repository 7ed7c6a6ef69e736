"""Runs that share engines: nothing carries over from one to the next."""

import sqlite3

import pytest
from conftest import Lane

from openrlhf_dbb import tiny

pytestmark = pytest.mark.e2e

SMALL = [
    "--preset", "tiny", "--estimator", "dbb", "--reward.remote_url", "exact_match", "--data.max_samples", "32",
    "--rollout.batch_size", "16", "--rollout.n_samples_per_prompt", "4", "--train.batch_size", "32",
    "--rollout.micro_batch_size", "32", "--train.micro_batch_size", "32", "--train.num_episodes", "2",
    "--ckpt.save_steps", "-1", "--eval.steps", "100", "--train.seed", "3",
]  # fmt: skip


ALWAYS_RIGHT = """
def reward_func(queries, prompts, labels):
    return {"rewards": [1.0]}
"""


@pytest.fixture(scope="module")
def trained(lane, tmp_path_factory):
    """What a lane answered to five command lines, and their folder."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "right.py").write_text(ALWAYS_RIGHT)
    lines = [
        ["--run_name", "destroyed", "--actor.adam.lr", "0.3"],
        ["--run_name", "refused", "--train.batch_size", "33"],
        ["--run_name", "hopeless", "--method", "dapo", "--reward.remote_url", str(folder / "right.py")],
        ["--run_name", "after", "--method", "dr_grpo"],
        ["--run_name", "longer", "--data.max_len", "48"],
    ]
    return [lane.train(folder, *SMALL, *line) for line in lines], folder


def rows(folder, sql):
    with sqlite3.connect(f"file:{folder}/openrlhf_dbb.db?mode=ro", uri=True) as connection:
        return connection.execute(sql).fetchall()


def test_a_lane_answers_every_line_and_continues_after_an_error(trained):
    answers, folder = trained
    destroyed, refused, given_up, after, longer = (answer.error for answer in answers)
    assert destroyed is None and after is None, answers
    assert "is not a multiple of --train.batch_size = 33" in refused
    assert given_up.startswith("256 rollouts did not fill one batch")  # 32 prompts x 4 samples, twice
    assert "max_model_len = 48, but the session's has 32; train it on its own" in longer
    assert "Traceback" not in "".join(answer.output for answer in answers)
    finished = rows(folder, "SELECT name, last_step FROM runs WHERE status = 'finished' ORDER BY name")
    assert finished == [("after", 4), ("destroyed", 4)]


@pytest.mark.long
def test_a_model_of_another_shape_gets_new_actors(tmp_path):
    small = tiny.prepare(tmp_path / "small", 0, tiny.Recipe(32, 8, warmup_steps=1, hidden=32))
    (tmp_path / "log").touch()
    one = Lane(tmp_path / "log")
    for name, more in (
        ("large", []),
        ("small", ["--actor.model_name_or_path", str(small.model), "--data.prompt_dataset", str(small.train)]),
    ):
        assert one.train(tmp_path, *SMALL, "--run_name", name, *more).error is None
    one.close()
    assert rows(tmp_path, "SELECT name FROM runs WHERE status = 'finished' ORDER BY name") == [("large",), ("small",)]


def test_a_run_starts_from_its_own_model_whatever_the_previous_run_made_of_it(trained):
    _, folder = trained
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


def test_runs_of_one_seed_train_on_the_prompts_in_the_same_order(trained):
    _, folder = trained
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


def test_a_run_has_its_own_loss_and_history(trained):
    _, folder = trained
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

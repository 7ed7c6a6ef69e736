"""What only the real pipeline can tell of the methods: their loss, their optimizer steps, and how they give up."""

import sqlite3

import pytest
from draws import check_draws

pytestmark = pytest.mark.e2e

# 32 prompts, 8 a step, 4 rollouts a prompt: 4 steps an epoch.
SMALL = [
    "--preset", "tiny", "--data.max_samples", "32", "--rollout.batch_size", "8", "--rollout.n_samples_per_prompt", "4",
    "--rollout.micro_batch_size", "32", "--eval.steps", "-1", "--ckpt.save_steps", "-1", "--run_name", "run",
]  # fmt: skip


def rows(folder, sql):
    with sqlite3.connect(f"file:{folder}/openrlhf_dbb.db?mode=ro", uri=True) as connection:
        return connection.execute(sql).fetchall()


def reward(folder, code):
    """A file with a reward function."""
    (folder / "reward.py").write_text(code)
    return ["--reward.remote_url", str(folder / "reward.py")]


BY_PROMPT = """
def reward_func(queries, prompts, labels):
    return {"rewards": [float(prompts[0].startswith("s"))]}
"""


# All tokens of a batch of 32 rollouts, at most 32 each, in one dynamic batch.
PACKED = ["--ds.packing_samples", "--train.dynamic_batch_enable", "--train.max_tokens_per_gpu", "1024"]


@pytest.mark.parametrize("batches", [[], PACKED], ids=["padded", "packed"])
def test_the_loss_of_dr_grpo_divides_token_sums_by_a_constant_length(lane, tmp_path, batches):
    """Sorting succeeds always, all else fails: at its first visit a prompt's mean is then 4.5 / 5 or 0.5 / 5, and all
    its rollouts have the advantage 0.1 or -0.1. One optimizer step a batch is on-policy, so that every ratio is 1 and
    the loss -sum(advantage * tokens) / (32 rollouts * 10)."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = lane.train(
        tmp_path, "--method", "dr_grpo", "--estimator", "dbb", *SMALL, "--train.num_episodes", "1",
        "--rollouts.keep", "all",
        "--train.batch_size", "32", "--train.micro_batch_size", "32", *batches,
        *reward(tmp_path, BY_PROMPT),
    )  # fmt: skip
    assert result.error is None, result.output[-4000:]
    tokens = rows(
        tmp_path,
        "SELECT step, sum(CASE WHEN prompt LIKE 's%' THEN length ELSE 0 END), "
        "sum(CASE WHEN prompt LIKE 's%' THEN 0 ELSE length END) FROM rollouts JOIN prompts USING (prompt_id) "
        "GROUP BY step",
    )
    events = EventAccumulator(str(tmp_path / "runs/run/tensorboard/run"))
    events.Reload()
    losses = {event.step: event.value for event in events.Scalars("train/policy_loss")}
    expected = {step: -(0.1 * right - 0.1 * wrong) / (32 * 10) for step, right, wrong in tokens}
    assert list(losses) == [1, 2, 3, 4]
    assert losses == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_prompts_are_drawn_by_their_posteriors_and_advantages_weighted(lane, tmp_path):
    """Three passes of 4 steps. With dbb and rloo a kept rollout's advantage is M / (M - 1) (X - p), times the weight
    8 / (32 inclusion)."""
    result = lane.train(
        tmp_path, "--estimator", "dbb", "--rollout.strategy", "posterior",
        "--algo.advantage.estimator", "rloo", *SMALL, "--train.num_episodes", "3", "--rollouts.keep", "all",
        "--train.batch_size", "32", "--train.micro_batch_size", "32", *reward(tmp_path, BY_PROMPT),
    )  # fmt: skip
    assert result.error is None, result.output[-4000:]
    assert "prompts drawn by E[p (1 - p)]^0.5, floor 0.25, with importance weights" in result.output
    check_draws(tmp_path / "openrlhf_dbb.db", 32, batch=8, rollouts=4, discount=0.5)
    assert rows(tmp_path, "SELECT max(step), sum(generated), sum(trained) FROM steps") == [(12, 384, 384)]
    kept = rows(
        tmp_path,
        "SELECT k.advantage, k.reward, h.mean, h.alpha + h.beta, h.inclusion FROM rollouts k "
        "JOIN posterior_history h USING (run_id, step, prompt_id)",
    )
    assert len(kept) == 384
    for advantage, x, p, m, inclusion in kept:
        assert advantage == pytest.approx(m / (m - 1) * (x - p) * 8 / (32 * inclusion), rel=1e-9)


ALWAYS_RIGHT = """
def reward_func(queries, prompts, labels):
    return {"rewards": [1.0]}
"""


def test_dynamic_sampling_without_any_variance_ends_with_an_error(lane, tmp_path):
    result = lane.train(
        tmp_path, "--method", "dapo", *SMALL, "--train.num_episodes", "2",
        "--train.batch_size", "16", "--train.micro_batch_size", "16", *reward(tmp_path, ALWAYS_RIGHT),
    )  # fmt: skip
    assert result.error.startswith("256 rollouts did not fill one batch of groups with different rewards")
    assert "Traceback" not in result.output
    assert rows(tmp_path, "SELECT status, last_step FROM runs") == [("running", 0)]
    assert rows(tmp_path, "SELECT count(*) FROM steps") == [(0,)]

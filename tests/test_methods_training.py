"""The loss of Dr.GRPO in the real pipeline."""

import pytest
from trainings import rows

BY_PROMPT = """
def reward_func(queries, prompts, labels):
    return {"rewards": [float(prompts[0].startswith("s"))]}
"""


@pytest.mark.e2e
@pytest.mark.long
def test_the_loss_of_dr_grpo_divides_token_sums_by_a_constant_length(lane, tmp_path):
    """Sorting succeeds always, all else fails: at its first visit a prompt's mean is then 4.5 / 5 or 0.5 / 5, and all
    its rollouts have the advantage 0.1 or -0.1. One optimizer step a batch is on-policy, so that every ratio is 1 and
    the loss -sum(advantage * tokens) / (32 rollouts * 10)."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tmp_path / "reward.py").write_text(BY_PROMPT)
    result = lane.train(
        tmp_path, "--preset", "tiny", "--method", "dr_grpo", "--estimator", "dbb", "--run_name", "run",
        # 32 prompts, 8 a step, 4 rollouts a prompt: 4 steps an epoch.
        "--data.max_samples", "32", "--rollout.batch_size", "8", "--rollout.n_samples_per_prompt", "4",
        "--rollout.micro_batch_size", "32", "--train.batch_size", "32", "--train.micro_batch_size", "32",
        "--train.num_episodes", "1", "--eval.steps", "-1", "--ckpt.save_steps", "-1", "--rollouts.keep", "all",
        "--reward.remote_url", str(tmp_path / "reward.py"),
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

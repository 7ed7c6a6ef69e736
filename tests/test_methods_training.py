"""The tracker of SPO in the real pipeline."""

import json
import shutil

import numpy as np
import pytest
from trainings import SMALL, rows, unfinish

TRACKER = [
    *SMALL, "--method", "spo", "--rollout.batch_size", "16", "--train.batch_size", "16", "--train.micro_batch_size",
    "16", "--rollout.micro_batch_size", "16", "--train.num_episodes", "3", "--ckpt.save_steps", "2", "--eval.steps",
    "-1", "--spo.rho_min", "0.01", "--spo.rho_max", "1", "--spo.d_half", "1", "--actor.adam.lr", "1e-4",
]  # fmt: skip


def drifts(folder):
    """-log2(rho) of the visits of each step, by prompt, from the stored posteriors."""
    past, found = {}, [{} for _ in range(6)]
    for step, prompt, successes, alpha, beta, mean in rows(
        folder, "SELECT step, prompt_id, successes, alpha, beta, mean FROM posterior_history ORDER BY step"
    ):
        before, past[prompt] = past.get(prompt, (0.5, 0.5)), (alpha, beta)
        rho = (alpha - successes) / before[0]
        assert (mean, beta) == pytest.approx((before[0] / sum(before), rho * before[1] + 1 - successes), rel=1e-9)
        found[step - 1][prompt] = -np.log2(rho)
    return found


@pytest.mark.e2e
def test_spo_forgets_by_the_drift_and_a_resume_measures_the_same(lane, tmp_path):
    """32 prompts, 16 a step, one rollout each: a prompt comes back after 2 steps. Checkpoints of steps 2, 4 and 6."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    result = lane.train(whole, *TRACKER, "--run_name", "mine")
    assert result.error is None, result.output[-4000:]
    shutil.copytree(whole, parts)
    unfinish(parts)
    saved = parts / "runs/mine/checkpoints"
    shutil.rmtree(saved / "_actor/global_step6")
    result = lane.train(parts, *TRACKER, "--resume", "mine", "--ckpt.path", str(saved))
    assert result.error is None, result.output[-4000:]
    steps = [list(of_step.values()) for of_step in drifts(parts)]
    assert np.ravel(steps[:2]) == pytest.approx(np.zeros(32), abs=1e-12)
    # Above 0, and at most 0.1 nats in most: log-probs of other tokens would differ by more.
    assert np.min(steps[2:]) > 0 and np.median(steps[2:]) < 0.1
    stored = [json.loads(text)["estimator/drift"] for (text,) in rows(parts, "SELECT metrics FROM steps")]
    assert stored == pytest.approx(np.mean(steps, axis=1), rel=1e-6, abs=1e-12)
    # Step 5 compares the policy of step 4 with rollouts of steps 3 and 4: both come from the checkpoint.
    assert drifts(whole)[4] == pytest.approx(drifts(parts)[4], rel=1e-6)

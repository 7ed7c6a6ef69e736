"""After a start vLLM and the policy must give the same rollouts the same log-probs."""

import math
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
import torch

from openrlhf_dbb.actors.agreement import Agreement, mean_difference
from openrlhf_dbb.errors import RunError


def rollouts(actor, vllm, mask):
    columns = {"action_log_probs": actor, "rollout_log_probs": vllm, "action_mask": mask}
    return SimpleNamespace(**{name: None if value is None else torch.tensor(value) for name, value in columns.items()})


def apart(difference):
    """Two micro-batches, three generated tokens that are ``difference`` apart, and padding that is further."""
    return [
        rollouts([[-1.0, -2.0]], [[-1.0 - difference, -9.0]], [[1, 0]]),
        rollouts([[-0.5, -3.0]], [[-0.5 + difference, -3.0 - difference]], [[1, 1]]),
    ]


def test_the_difference_is_the_mean_over_the_generated_tokens_of_all_micro_batches():
    given = [
        rollouts([[-1.0, -2.0]], [[-1.5, -9.0]], [[1, 0]]),  # 0.5; the second token is padding
        rollouts([[-0.5, -3.0]], [[-0.25, -3.0]], [[1, 1]]),  # 0.25 and 0
    ]
    assert mean_difference(given) == pytest.approx(0.75 / 3)


def test_the_first_step_of_a_run_only_measures():
    agreement = Agreement()
    assert agreement.check(apart(0.5)) == {"vllm/log_prob_difference": pytest.approx(0.5)}
    assert agreement.usual == pytest.approx(0.5)
    assert agreement.check(apart(50.0)) == {}  # once a start


@pytest.mark.parametrize(
    ("usual", "found", "ends"),
    [
        (0.001, 0.019, False),  # below 0.02
        (0.001, 0.021, True),
        (0.01, 0.09, False),  # within ten times as much as usual
        (0.01, 0.11, True),
        (0.01, math.nan, True),
    ],
)
def test_after_a_resume_more_than_ten_times_the_usual_ends_the_run(usual, found, ends):
    agreement = Agreement()
    agreement.usual = usual
    if not ends:
        agreement.check(apart(found))
        assert agreement.usual == usual
        return
    with pytest.raises(RunError, match=f"differ by {found:.3g} nats a token, in the run's first step by {usual:.3g}"):
        agreement.check(apart(found))


def test_without_log_probs_from_vllm_nothing_is_compared():
    agreement = Agreement()
    agreement.usual = 0.001
    assert agreement.check([rollouts([[-1.0]], None, [[1]])]) == {}
    assert not agreement.done

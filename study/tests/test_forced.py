"""The probability of right answers, against forward passes without a cache, and the outcomes of a curve."""

import pandas as pd
import pytest
import torch

from study import forced, rival


@pytest.fixture(scope="module")
def policy():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=20,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return LlamaForCausalLM(config).eval()


def test_the_probability_is_the_product_over_the_answer_and_one_of_its_ends(policy):
    problems = forced.Problems(
        prefix=[3, 4, 5],
        rests=[[6], [7, 8, 9]],
        answers=[[10, 11], [12]],
        ends=[1, 2],
    )
    measured_P = forced.probabilities(policy, problems)
    for rest, answer, measured in zip(problems.rests, problems.answers, measured_P, strict=True):
        tokens = problems.prefix + rest
        expected = 1.0
        for token in answer:
            expected *= _next(policy, tokens)[token]
            tokens = [*tokens, token]
        after = _next(policy, tokens)
        assert measured == pytest.approx(float(expected * (after[1] + after[2])), rel=1e-4)


def _next(policy, tokens):
    with torch.no_grad():
        return policy(input_ids=torch.tensor([tokens])).logits[0, -1].softmax(-1)


def test_the_mean_over_a_run_is_its_area_up_to_the_budget():
    half = rival.BUDGET / 2
    run = pd.DataFrame(
        {"rollouts": [0, half, 2 * half + 512], "heldout": [0.0, 0.2, 0.2], "pool": 0.0}
    )
    # Half of the run rises from 0 to 0.2, the other half stays there.
    assert rival.mean_over_run(run) == pytest.approx((0.1 + 0.2) / 2)
    assert rival.at_end(run) == pytest.approx(0.2)


def test_exchanging_runs_gives_the_share_of_orders_that_differ_as_much():
    # Of the 20 ways to choose three of six, the observed one and its mirror image differ as much.
    p = rival.permutation_p(pd.Series([1.0, 2.0, 3.0]), pd.Series([11.0, 12.0, 13.0]))
    assert p == pytest.approx(0.1, abs=0.01)

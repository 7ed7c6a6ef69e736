"""Packed samples and dynamic batches train the same: on DeepSpeed itself, two ranks, every ZeRO stage and loss."""

import pytest
from trainings import RANK, rank_arguments

from openrlhf_dbb.platform import cpu

CASES = [f"{stage} seq-mean-token-mean" for stage in (1, 3)]
CASES += [f"2 {loss}" for loss in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm")]
PROGRAM = (
    """
LENGTHS = torch.tensor([4, 9, 12, 5, 7, 12, 3, 10])  # of rank 0's rows; rank 1 has them one place further
MODES = {
    "padded": {},
    "packed": {"ds.packing_samples": True},
    "dynamic": {"ds.packing_samples": True, "train.dynamic_batch_enable": True, "train.max_tokens_per_gpu": 24},
}

def rollouts(policy):
    seeded = torch.Generator().manual_seed(rank)
    lengths = LENGTHS.roll(rank)
    there = torch.arange(12)[None] < lengths[:, None]
    tokens = torch.randint(0, 14, (8, 12), generator=seeded) * there
    actions = (torch.arange(1, 12)[None] > 1) & there[:, 1:]
    advantages = torch.randn(8, 1, generator=seeded).expand(8, 11).clone()
    made = Experience(sequences=tokens, attention_mask=there.long(), action_mask=actions.long(), advantages=advantages,
                      returns=advantages.clone(), rewards=torch.zeros(8), scores=torch.zeros(8),
                      response_length=actions.sum(-1), truncated=torch.zeros(8, dtype=torch.bool),
                      total_length=lengths.float(), info={"reward": torch.ones(8)})
    made.action_log_probs = policy.forward(tokens, made.action_mask, made.attention_mask)
    return made

CASES = [case.split() for case in """
    + repr(CASES)
    + """]
found = {}
for stage, loss, mode in [(*case, mode) for case in CASES for mode in MODES]:
    policy = actor({"ds.zero_stage": int(stage), "actor.loss_agg_mode": loss, **MODES[mode]})
    sizes = []
    rows = rollouts(policy)
    policy.trainer.actor.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    policy.append(rows)
    status = policy.fit()
    trained = list(sizes)
    after = policy.forward(rows.sequences, rows.action_mask, rows.attention_mask)
    found[f"{stage} {loss} {mode}"] = {
        "before": rows.action_log_probs.double().abs().sum().item(), "after": after.double().abs().sum().item(),
        "grad_norm": status["actor_grad_norm"],
        "steps": policy.actor.model.global_steps, "micro-batches": len(trained), "rows": sum(trained),
    }
print(json.dumps(found))
"""
)


@pytest.fixture(scope="module")
def found(two_ranks, tmp_path_factory):
    """What rank 0 saw, by ZeRO stage, loss and mode."""
    # 16 rows on two ranks, all of them one optimizer step, 2 rows a padded micro-batch. A step of Adam is about as long
    # as the gradient, a hundredth of it.
    arguments = rank_arguments(
        tmp_path_factory.mktemp("model"), 2, "--rollout.batch_size", "2", "--rollout.n_samples_per_prompt", "8",
        "--train.batch_size", "16", "--rollout.micro_batch_size", "8", "--rollout.max_new_tokens", "11",
        "--actor.adam.lr", "1", "--actor.adam.eps", "100", "--actor.max_norm", "0",
    )  # fmt: skip
    return two_ranks(RANK + PROGRAM, *arguments)[0]


@pytest.mark.slow
@pytest.mark.skipif(not cpu.active(), reason="its two ranks would share a GPU, which NCCL refuses")
@pytest.mark.parametrize("case", CASES)
def test_packed_and_dynamic_batches_take_the_same_step(found, case):
    padded, packed, dynamic = (found[f"{case} {mode}"] for mode in ("padded", "packed", "dynamic"))
    moved = padded["after"] - padded["before"]
    assert abs(moved) > 1e-2
    if "seq-mean-token-mean" in case:
        # As OpenRLHF configures ZeRO 1 and 2, they keep the last micro-batch alone: 1.589.
        assert padded["grad_norm"] == pytest.approx(3.998, abs=1e-3)
    for other in (packed, dynamic):
        assert other["before"] == pytest.approx(padded["before"], rel=1e-5)
        assert other["after"] - other["before"] == pytest.approx(moved, rel=1e-2)
        assert other["grad_norm"] == pytest.approx(padded["grad_norm"], rel=1e-4)
    assert [each["steps"] for each in (padded, packed)] == [1, 1]
    # 8 rows of 62 tokens: 4 padded micro-batches of 2 rows; 3 dynamic ones of at most 24 tokens.
    assert [each["rows"] for each in (padded, packed, dynamic)] == [8, 8, 8]
    assert [each["micro-batches"] for each in (padded, packed, dynamic)] == [4, 4, 3]

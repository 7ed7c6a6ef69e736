"""The training pass gives the log-probs, losses, gradients and metrics of OpenRLHF's own pass."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from trainings import RANK, rank_arguments

from openrlhf_dbb import tiny
from openrlhf_dbb.platform import cpu

cpu.prepare_driver()

from openrlhf.models import Actor  # noqa: E402

from openrlhf_dbb.actors import training_pass  # noqa: E402
from openrlhf_dbb.actors.training_pass import LogProbs, ResponseActor, contributing  # noqa: E402

# Two actions apart, as agents make them; a row that is shorter; a row without a response.
ACTIONS = torch.tensor([[0, 0, 1, 1, 0, 0, 1], [0, 1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1, 0]])
LENGTHS = torch.tensor([8, 4, 5, 7])


@pytest.mark.parametrize("rows", [None, [True, False, False, True], [False, True, False, False]])
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-4), (torch.bfloat16, 1e-2)])
def test_log_probs_entropy_and_gradients_of_the_response_tokens_alone(tmp_path, monkeypatch, rows, dtype, rounding):
    monkeypatch.setitem(training_pass.CHUNK, "cpu", 5 * 14)  # five tokens of 14 words
    tiny.build_model(3).save_pretrained(tmp_path)
    tokens = torch.randint(0, 14, (4, 8), generator=torch.Generator().manual_seed(1))
    attention = (torch.arange(8)[None] < LENGTHS[:, None]).long()
    options = {"attn_implementation": "eager", "param_dtype": "bf16", "temperature": 0.7}
    kept = torch.tensor(rows or [True] * 4)[:, None] * ACTIONS
    found = []
    for wrapper in (Actor, ResponseActor):
        actor = wrapper(str(tmp_path), **options)
        actor.model.to(dtype)
        if wrapper is ResponseActor:
            actor.rows = rows and torch.tensor(rows)
        with torch.compiler.set_stance("force_eager"):
            log_probs, output = actor(tokens, ACTIONS, attention, return_output=True, return_entropy=True)
        entropy = output.entropy[:, -7:] * kept
        ((log_probs * kept * torch.arange(7)).sum() + entropy.sum()).backward()
        found.append([log_probs * kept, entropy, *(weight.grad for weight in actor.model.parameters())])
        if rows is not None and wrapper is ResponseActor:
            assert torch.equal(log_probs, log_probs * kept)  # rows that are left out are 0
    assert output["logits"] is None  # their memory has become the gradient's
    torch.testing.assert_close(found[1], found[0], rtol=rounding, atol=rounding / 10)


class Made(TorchDispatchMode):
    """Notes the sizes in bytes of the tensors that operations make, views left out."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not result._is_view() and result is not args[0]:
            self.sizes.append(result.nbytes)
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_beside_the_logits_nothing_is_larger_than_a_chunk(monkeypatch, dtype):
    monkeypatch.setitem(training_pass.CHUNK, "cpu", 3 * 50)
    logits = torch.randn(40, 50, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    copy = logits * 1
    gradients = []
    copy.register_hook(gradients.append)
    with Made() as made:
        log_probs, entropy = LogProbs.apply(copy, torch.arange(40), 1.0)
        assert entropy.requires_grad
        torch.autograd.grad(log_probs, copy, torch.full_like(log_probs, -0.5))
    assert max(made.sizes) == 3 * 50 * 4
    expected = 0.5 * (logits.detach().float().softmax(1) - torch.eye(40, 50))
    torch.testing.assert_close(copy.detach(), expected.to(dtype))


def test_rows_that_change_nothing():
    advantages = torch.tensor([[0.0, 0.0], [0.0, -1.0], [2.0, 0.0]])
    assert contributing(advantages).tolist() == [False, True, True]
    assert contributing(torch.zeros(3, 2)).tolist() == [True, False, False]  # every rank needs a pass


COMPARE = """
from openrlhf.trainer.ray import ppo_actor
from openrlhf_dbb import upstream

theirs = ppo_actor.Actor, ppo_actor.ActorPPOTrainer

def plain(values):
    ppo_actor.Actor, ppo_actor.ActorPPOTrainer = theirs
    made = PolicyActor(ranks, rank, "127.0.0.1", port)
    args = settings.with_values(values, "the test").openrlhf_args()
    super(PolicyActor, made).init_model_from_pretrained(strategy(args, on_cpu=True), model, max_steps=10)
    return made

def train(policy, ours):
    tokens = torch.randint(0, 14, (8, 8), generator=torch.Generator().manual_seed(rank))
    lengths = torch.tensor([8, 5, 6, 8, 7, 4, 8, 8])
    attention = (torch.arange(8)[None] < lengths[:, None]).long()
    actions = (torch.arange(7)[None] > 2) & attention[:, 1:].bool()
    # On the second rank all rows but one are left out.
    rewarded = [0, 0, 1.0, -0.5, 0, 0, 0, 0] if rank == 0 else [0, 0, 0, 0, 0, 2.0, 0, 0]
    advantages = torch.tensor(rewarded)[:, None] * actions
    made = Experience(sequences=tokens, attention_mask=attention, action_mask=actions, advantages=advantages,
                      returns=advantages.clone(), response_length=actions.sum(1), info={"reward": torch.ones(8)})
    if not ours:
        made.action_log_probs = policy.forward(tokens, actions, attention)
    computed = []
    policy.actor.model.register_forward_pre_hook(
        lambda _, inputs: computed.append(len(inputs[0])) if torch.is_grad_enabled() else None)
    policy.append(made)
    torch.manual_seed(2)  # the order of the rows
    status = policy.fit()
    # ZeRO 3 keeps no whole weights outside a pass; there the norm of the gradient has to do.
    weights = [each.detach().double().sum().item() for each in policy.actor.model.module.parameters()]
    return {key: float(value) for key, value in status.items()}, weights, sum(computed)

results = []
for mode, kind in (("token-mean", "ppo"), ("seq-mean-token-mean", "ppo"), ("seq-mean-token-sum-norm", "ppo"),
                   ("seq-mean-token-mean", "gspo")):
    values = {"actor.loss_agg_mode": mode, "actor.policy_loss_type": kind}
    ours = train(actor(values), True)
    if mode == "seq-mean-token-sum-norm":  # upstream has no such mode: ours, with old log-probs and all rows
        results.append([train(actor(values), False), ours])
    else:
        results.append([train(plain(values), False), ours])
print(json.dumps(results))
"""


@pytest.mark.slow
@pytest.mark.skipif(not cpu.active(), reason="its two ranks would share a GPU, which NCCL refuses")
@pytest.mark.parametrize(("ranks", "stage"), [(1, 0), (2, 1), (1, 2), (2, 3)])
def test_a_step_is_openrlhfs_for_every_loss_and_zero_stage(two_ranks, tmp_path, ranks, stage):
    arguments = rank_arguments(
        tmp_path, ranks, "--rollout.batch_size", str(ranks), "--rollout.n_samples_per_prompt", "8",
        "--train.batch_size", str(8 * ranks), "--rollout.max_new_tokens", "5", "--ds.zero_stage", str(stage),
        "--ds.param_dtype", "fp32", "--actor.adam.lr", "0.01",
    )  # fmt: skip
    for results in two_ranks(RANK + COMPARE, *arguments, count=ranks):
        for (theirs, their_weights, all_rows), (status, weights, rows) in results:
            assert status == pytest.approx(theirs, rel=1e-4, abs=1e-6)
            assert weights == pytest.approx(their_weights, rel=1e-5, abs=1e-4)
            assert all_rows == 8 and rows < 8

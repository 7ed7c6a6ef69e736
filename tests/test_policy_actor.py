"""Dr.GRPO's loss by hand, and replayed rows that ride along in OpenRLHF's own trainer."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from openrlhf_dbb.driver import arguments
from openrlhf_dbb.platform import cpu

cpu.prepare_driver()

from openrlhf.models import PolicyLoss  # noqa: E402
from openrlhf.trainer.ppo_utils.experience import Experience, split_experience_batch  # noqa: E402

from openrlhf_dbb.actors.policy_actor import PolicyActor  # noqa: E402
from openrlhf_dbb.actors.training_pass import PolicyTrainer, StepLoss, together  # noqa: E402
from openrlhf_dbb.platform.backend import stand_in_for_torch_cuda  # noqa: E402

# Three rows of three tokens, the third one empty. A = 1: min(1.5, 1.28) + min(0.5, 0.8) + 1 = 2.78.
# A = -2: min(-3, -2.56) + min(-1, -1.6) = -4.6.
RATIOS = torch.tensor([[1.5, 0.5, 1.0], [1.5, 0.5, 7.0], [2.0, 2.0, 2.0]])
ADVANTAGES = torch.tensor([[1.0] * 3, [-2.0] * 3, [5.0] * 3])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0], [0, 0, 0]])
SUM = -2.78 + 4.6


def constant_length(length, **settings):
    settings = {"clip_eps_low": 0.2, "clip_eps_high": 0.28, "token_level_loss": False} | settings
    return StepLoss(PolicyLoss(**settings), length)


def loss_of(loss_fn, rows=slice(None), **info):
    log_probs = RATIOS[rows].log()
    return loss_fn(log_probs, torch.zeros_like(log_probs), ADVANTAGES[rows], action_mask=MASK[rows], **info)[0].item()


def test_token_sums_over_rows_and_a_constant_length():
    loss_fn = constant_length(4)
    # Two rows that are not empty.
    assert loss_of(loss_fn, global_batch_size=2.0) == pytest.approx(SUM / (2 * 4), rel=1e-6)
    # As upstream calls it: its number of tokens is not used. Two ranks, whose gradients are averaged.
    info = {"dp_size": 2, "batch_num_tokens": torch.tensor(5.0), "global_batch_size": torch.tensor(2.0)}
    assert loss_of(loss_fn, **info) == pytest.approx(2 * SUM / (2 * 4), rel=1e-6)


@pytest.mark.parametrize(
    ("replayed", "expected"),
    [
        # Two updates of two micro-batches of two rows.
        ([], [[[1, 1], [2, 2]], [[1, 3], [3, 4]]]),
        # One replay goes to the first update and two to the second; their prompts' rows are beside them.
        ([2, 3, 9], [[[1, 1], [2, 2, 2]], [[1, 3, 3], [3, 4, 9]]]),
    ],
)
def test_rows_of_a_prompt_come_together_within_their_optimizer_update(replayed, expected):
    prompts = [[2, 1], [1, 2], [3, 4], [1, 3]]
    fresh = [split_experience_batch(batch(pair, [0.0, 0.0])) for pair in prompts]
    made = list(together(fresh, 2, [split_experience_batch(batch([each], [0.0]))[0] for each in replayed]))
    found = [each.sequences[:, 0].tolist() for each in made]
    assert [found[:2], found[2:]] == expected


@pytest.fixture
def on_this_device(monkeypatch):
    """OpenRLHF's trainer outside an actor, on the CPU where there is no CUDA; every change is undone."""
    for name in ("current_device", "set_device", "synchronize", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(torch.cuda, name))
    if cpu.active():
        stand_in_for_torch_cuda()


def batch(tokens, advantages):
    """Rows of three tokens, all ``tokens[i]``; one of them is generated in even rows, two in odd ones."""
    rows = len(tokens)
    sequences = torch.tensor(tokens)[:, None].expand(rows, 3)
    lengths = torch.tensor([i % 2 + 1 for i in range(rows)])
    return Experience(
        sequences=sequences.clone(),
        attention_mask=torch.ones(rows, 3, dtype=torch.long),
        action_mask=(torch.arange(2)[None, :] < lengths[:, None]).long(),
        action_log_probs=torch.zeros(rows, 2),
        advantages=torch.tensor(advantages)[:, None].expand(rows, 2).clone(),
        returns=torch.zeros(rows, 2),
        rewards=torch.zeros(rows),
        scores=torch.zeros(rows),
        response_length=lengths,
        truncated=torch.zeros(rows, dtype=torch.bool),
        total_length=torch.full((rows,), 3.0),
        info={"reward": torch.zeros(rows)},
    )


TOKENS = 200
RATE = 0.5


class Policy(torch.nn.Module):
    """Log-prob of a token: a parameter of its own, 0 at first, so that all ratios are 1."""

    def __init__(self):
        super().__init__()
        self.log_probs = torch.nn.Parameter(torch.zeros(TOKENS))
        self.model = SimpleNamespace(skipped_steps=0)

    def forward(self, sequences, action_mask, **_):
        return self.log_probs[sequences[:, 1:]] * action_mask, SimpleNamespace()


class Engine:
    """What DeepSpeed does: losses divided by the micro-batches of a step, a step after so many."""

    ring_attn_group = None
    is_rank_0 = staticmethod(lambda: True)
    all_reduce = staticmethod(lambda values: values)
    get_grad_norm = staticmethod(lambda model: 0.0)

    def __init__(self, args, model, accumulated_gradient):
        self.args, self.accumulated_gradient = args, accumulated_gradient
        self.optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        self.micro_batches = self.steps = 0

    def backward(self, loss, *_):
        (loss / self.accumulated_gradient).backward()

    def optimizer_step(self, *_, **__):
        self.micro_batches += 1
        if self.micro_batches % self.accumulated_gradient == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.steps += 1


@pytest.fixture
def actor(on_this_device, monkeypatch):
    """A policy actor with upstream's trainer on :class:`Policy`, two micro-batches of two a step."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")  # which the actor overwrites
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    flags = ["--preset", "tiny", "--estimator", "none", "--algo.kl.init_coef", "0"]
    args = arguments.parse(flags).openrlhf_args()
    args.actor.entropy_coef = None  # the preset logs the entropy, which this policy does not give
    policy = Policy().to(torch.cuda.current_device())
    made = PolicyActor(1, 0, "127.0.0.1", 1)
    made.strategy, made.actor = Engine(args, policy, 2), policy
    scheduler = SimpleNamespace(get_last_lr=lambda: [RATE])
    made.trainer = PolicyTrainer(made.strategy, policy, None, None, scheduler, micro_train_batch_size=2)
    made.trainer.actor_loss_fn = StepLoss(made.trainer.actor_loss_fn.loss, 5)
    yield made
    dist.destroy_process_group()


FRESH = ([1, 2, 3, 4], [1.0, -1.0, 2.0, 0.5])
REPLAYED = ([101, 102, 103], [-3.0, 1.0, 4.0])


def expected_log_probs(rows, batches):
    """After one step: rate * advantage * tokens / (rows * L), for each row's own token."""
    log_probs = torch.zeros(TOKENS)
    for tokens, advantages in batches:
        for i, (token, advantage) in enumerate(zip(tokens, advantages, strict=True)):
            log_probs[token] = RATE * advantage * (i % 2 + 1) / (rows * 5)
    return log_probs


def test_replays_are_trained_on_once_in_as_many_steps_and_then_forgotten(actor):
    actor.append(batch(*FRESH))
    actor.append_replays(split_experience_batch(batch(*REPLAYED)))
    actor.fit()
    engine = actor.strategy
    assert (engine.micro_batches, engine.steps) == (2, 1)
    trained = actor.actor.log_probs.detach().cpu()
    torch.testing.assert_close(trained, expected_log_probs(7, [FRESH, REPLAYED]))
    assert (actor.trainer.replay_buffer.items, actor.trainer.replays) == ([], [])
    with torch.no_grad():
        actor.actor.log_probs.zero_()
    actor.append(batch(*FRESH))
    actor.fit()
    assert engine.steps == 2
    torch.testing.assert_close(actor.actor.log_probs.detach().cpu(), expected_log_probs(4, [FRESH]))

"""The training pass gives the log-probs and gradients of OpenRLHF's own pass."""

# ruff: noqa: E402
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from openrlhf_dbb import tiny
from openrlhf_dbb.platform import cpu

cpu.prepare_driver()

from openrlhf.models import Actor, PolicyLoss
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.utils import utils as openrlhf_utils
from transformers import AutoModelForCausalLM, MambaConfig, MixtralConfig, Qwen2Config

from openrlhf_dbb.actors import micro_batches, training_pass
from openrlhf_dbb.actors.micro_batches import laid_out, together
from openrlhf_dbb.actors.training_pass import LogProbs, ResponseActor, StepLoss, longest_row
from openrlhf_dbb.platform.backend import torch_dtype

# Two actions apart, as agents make them; a row that is shorter; a row without a response.
ACTIONS = torch.tensor(
    [[0, 0, 1, 1, 0, 0, 1], [0, 1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1, 0]]
)
LENGTHS = torch.tensor([8, 4, 5, 7])


@pytest.mark.parametrize(
    ("rows", "dtype", "rounding"),
    [
        (None, torch.float32, 1e-4),
        ([True, False, False, True], torch.bfloat16, 1e-2),
        ([False] * 4, torch.float32, 1e-4),
    ],
)
def test_log_probs_entropy_and_gradients_of_the_response_tokens_alone(
    tmp_path, monkeypatch, rows, dtype, rounding
):
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
            log_probs, output = actor(
                tokens, ACTIONS, attention, return_output=True, return_entropy=True
            )
        entropy = output.entropy[:, -7:] * kept
        ((log_probs * kept * torch.arange(7)).sum() + entropy.sum()).backward()
        found.append(
            [log_probs * kept, entropy, *(weight.grad for weight in actor.model.parameters())]
        )
        if rows is not None and wrapper is ResponseActor:
            assert torch.equal(log_probs, log_probs * kept)  # rows that are left out are 0
    assert output["logits"] is None  # their memory has become the gradient's
    # Sums in another order: a gradient of 0.01 differs by up to 2e-5 on one processor.
    torch.testing.assert_close(found[1], found[0], rtol=rounding, atol=rounding / 2)


PROMPTS = torch.tensor([[1, 2, 3, 4], [5, 6, 0, 0]])  # of four tokens and of two


def groups(padded_left):
    """Rows of two prompts and one of its own, with responses of 1 to 4 tokens, one twice, and the masks of OpenRLHF."""
    rows = [
        (PROMPTS[0], 3),
        (PROMPTS[1][:2], 4),
        (PROMPTS[0], 1),
        (PROMPTS[1][:2], 2),
        (PROMPTS[0], 4),
    ]
    rows.append((torch.tensor([7, 8, 9]), 2))
    tokens, attention = torch.zeros(2, 6, 9, dtype=torch.long)
    actions = torch.zeros(6, 8, dtype=torch.long)
    seeded = torch.Generator().manual_seed(1)
    for row, (prompt, answer) in enumerate(rows):
        start = padded_left * (5 - len(prompt))
        end = padded_left * (5 - len(prompt)) + len(prompt) + answer
        tokens[row, start:end] = torch.cat(
            [prompt, torch.randint(0, 14, (answer,), generator=seeded)]
        )
        attention[row, start:end] = 1
        actions[row, end - answer - 1 : end - 1] = 1
    return tuple(torch.cat([part, part[1:2]]) for part in (tokens, actions, attention))


@pytest.mark.parametrize(
    ("in_one", "padded_left", "lora", "attention", "dtype", "rounding"),
    [
        (False, False, 0, "eager", "fp32", 1e-4),
        (True, True, 0, "sdpa", "fp32", 1e-4),
        (True, False, 0, "sdpa", "bf16", 3e-2),
        (False, True, 2, "eager", "bf16", 3e-2),
        (True, True, 2, "eager", "fp32", 1e-4),
    ],
)
def test_a_prompt_and_equal_rows_are_computed_once(
    tmp_path, monkeypatch, in_one, padded_left, lora, attention, dtype, rounding
):
    monkeypatch.setattr(openrlhf_utils, "convert_to_torch_dtype", torch_dtype)
    tiny.build_model(3).save_pretrained(tmp_path)
    # Rows alone cost at least 6 * 7 * (7 + span), prompts with their responses 3 * 11 * (11 + span), and all in one
    # sequence 22 * (22 + span).
    monkeypatch.setitem(micro_batches.SPAN, "cpu", 100 if in_one else 9)
    for module in (micro_batches, training_pass):
        monkeypatch.setattr(module, "ROUND", 4 if in_one else 1)
    tokens, actions, there = groups(padded_left)
    found = []
    computed = []
    for wrapper in (Actor, ResponseActor):
        torch.manual_seed(0)
        actor = wrapper(
            str(tmp_path), attn_implementation=attention, param_dtype=dtype, temperature=0.7, lora_rank=lora,
            target_modules="all-linear",
        )  # fmt: skip
        for name, weight in actor.model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.1)  # an adapter starts with 0
        actor.model.register_forward_pre_hook(
            lambda _, inputs: computed.append(tuple(inputs[0].shape))
        )
        with torch.compiler.set_stance("force_eager"):
            log_probs, output = actor(
                tokens, actions, there, return_output=True, return_entropy=True
            )
        entropy = output.entropy[:, -8:] * actions
        ((log_probs * torch.arange(8)).sum() + entropy.sum()).backward()
        gradients = [weight.grad for weight in actor.model.parameters() if weight.requires_grad]
        found.append([log_probs, entropy, *(gradient / gradient.norm() for gradient in gradients)])
    # Prompts of 4, 2 and 3 tokens without the last, which goes with each of the 8, 6 and 2 tokens of the responses; the
    # last row equals the second.
    assert computed == [(7, 9), (1, 6 + 16 + 2) if in_one else (3, 3 + 8)]
    torch.testing.assert_close(found[1], found[0], rtol=rounding, atol=rounding)

    # Of two equal rows the first is left out; the other must be computed
    actor.rows = torch.arange(7) != 1
    with torch.compiler.set_stance("force_eager"):
        log_probs = actor(tokens, actions, there)
    torch.testing.assert_close(
        log_probs, found[1][0] * actor.rows[:, None], rtol=rounding, atol=rounding
    )


@pytest.mark.parametrize(("prompt", "shape"), [(800, (1, 799 + 8 * 100 + 1)), (100, (8, 899))])
def test_prompts_are_shared_where_this_is_less_work(prompt, shape):
    tokens = torch.ones(8, 900, dtype=torch.long)
    # Beside each other, the responses of 800 tokens would make a sequence of 6,499 tokens.
    wanted = torch.arange(900).expand(8, 900) >= prompt
    places, mask = laid_out(tokens, tokens, wanted, torch.float32)
    assert places.shape == shape and mask.dim() == (4 if shape[0] == 1 else 2)


def test_only_a_model_that_takes_the_mask_shares_prompts():
    small = {
        "num_hidden_layers": 2,
        "hidden_size": 8,
        "intermediate_size": 8,
        "vocab_size": 8,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
    }
    window = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}
    for config, expected in (
        (Qwen2Config(**small), 2**31),
        (Qwen2Config(**small, **window), 64),
        (MixtralConfig(**small), 0),  # the loss that balances experts reads every token
        (MambaConfig(num_hidden_layers=1, hidden_size=8, vocab_size=8), 0),
    ):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        assert longest_row(model) == expected


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
    logits = (
        torch.randn(40, 50, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    )
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


# Three rows of three tokens, the third one empty. A = 1: min(1.5, 1.28) + min(0.5, 0.8) + 1 = 2.78.
# A = -2: min(-3, -2.56) + min(-1, -1.6) = -4.6.
RATIOS = torch.tensor([[1.5, 0.5, 1.0], [1.5, 0.5, 7.0], [2.0, 2.0, 2.0]])
ADVANTAGES = torch.tensor([[1.0] * 3, [-2.0] * 3, [5.0] * 3])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0], [0, 0, 0]])
SUM = -2.78 + 4.6


def test_token_sums_over_rows_and_a_constant_length():
    loss = StepLoss(PolicyLoss(clip_eps_low=0.2, clip_eps_high=0.28, token_level_loss=False), 4)
    given = RATIOS.log(), torch.zeros(3, 3), ADVANTAGES
    # Two rows that are not empty.
    alone = loss(*given, action_mask=MASK, global_batch_size=2.0)[0].item()
    assert alone == pytest.approx(SUM / (2 * 4), rel=1e-6)
    # As upstream calls it: its number of tokens is not used. Two ranks, whose gradients are averaged.
    info = {
        "dp_size": 2,
        "batch_num_tokens": torch.tensor(5.0),
        "global_batch_size": torch.tensor(2.0),
    }
    assert loss(*given, action_mask=MASK, **info)[0].item() == pytest.approx(
        2 * SUM / (2 * 4), rel=1e-6
    )


def test_log_probs_before_the_update_are_compared_with_vllms_where_they_were_computed():
    loss = StepLoss(PolicyLoss())
    ours = torch.tensor([[-1.0, -2.0, -9.0], [0.0] * 3])
    theirs = torch.tensor([[-1.5, -2.25, -1.0], [-3.0] * 3])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])  # of the second row no log-prob was computed
    for old, rollout in ((None, theirs), (2 * ours, theirs), (None, None)):
        loss(
            ours,
            old,
            torch.ones(2, 3),
            action_mask=mask,
            rollout_log_probs=rollout,
            batch_num_tokens=2.0,
        )
    assert torch.cat(loss.differences).tolist() == [0.5, 0.25, 0.5, 1.75]
    loss.differences.clear()
    unknown = torch.tensor([[torch.nan] * 3, [-3.0] * 3])  # the first row is replayed
    loss(
        ours - 1,
        ours,
        torch.ones(2, 3),
        action_mask=mask,
        rollout_log_probs=unknown,
        batch_num_tokens=2.0,
    )
    assert torch.cat(loss.differences).tolist() == []
    loss = StepLoss(PolicyLoss(), old_are_vllms=True)  # else they would be compared with themselves
    loss(
        ours,
        theirs,
        torch.ones(2, 3),
        action_mask=mask,
        rollout_log_probs=theirs,
        batch_num_tokens=2.0,
    )
    assert torch.cat(loss.differences).tolist() == [0.5, 0.25]


def row(token):
    """Three tokens, two of them a prompt."""
    there = torch.ones(3, dtype=torch.long)
    return Experience(
        sequences=token * there, attention_mask=there, action_mask=torch.tensor([0, 1]), info={}
    )


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ([], [[1, 1], [2, 2], [1, 3], [3, 4]]),
        # One goes to the first update and two to the second; their prompts' rows are beside them.
        ([2, 3, 9], [[1, 1], [2, 2, 2], [1, 3, 3], [3, 4, 9]]),
    ],
)
def test_rows_of_a_prompt_come_together_within_their_optimizer_update(extra, expected):
    prompts = [[2, 1], [1, 2], [3, 4], [1, 3]]  # two updates of two micro-batches of two rows
    batches = [list(map(row, pair)) for pair in prompts]
    made = together(batches, 2, "cpu", 2**31, list(map(row, extra)))
    assert [each.sequences[:, 0].tolist() for each in made] == expected


def rollout(prompt, length):
    """A rollout of so many tokens in all, to a prompt of so many equal tokens."""
    tokens = torch.cat([torch.full((prompt,), prompt), torch.arange(length - prompt)])
    actions = (torch.arange(1, length) >= prompt).long()
    return Experience(
        sequences=tokens, attention_mask=torch.ones_like(tokens), action_mask=actions, info={}
    )


@pytest.mark.parametrize(
    ("groups", "longest_shared", "lengths"),
    [
        # Two prompts of two rollouts each. By prompt two rows take 2 * 900 tokens and 2 * 901, by length 2 * 901
        # and 2 * 100.
        ([(10, [900, 100]), (11, [901, 99])], 2**31, [[901, 900], [100, 99]]),
        # A prompt with both its responses is a sequence of 500 + 100 + 50 tokens or about as many.
        ([(500, [600, 550]), (501, [601, 551])], 2**31, [[600, 550], [601, 551]]),
        (
            [(500, [600, 550]), (501, [601, 551])],
            549,
            [[601, 600], [551, 550]],
        ),  # rows too long to share
    ],
)
def test_micro_batches_are_of_rows_of_a_prompt_or_of_a_length(groups, longest_shared, lengths):
    rows = [rollout(prompt, length) for prompt, group in groups for length in group]
    made = together([rows[:2], rows[2:]], 2, "cpu", longest_shared)
    assert [each.attention_mask.sum(dim=1).tolist() for each in made] == lengths


class Seen:
    """Notes the attention masks that a model is given, and the rows of its head."""

    def __init__(self, model):
        self.masks = []
        self.rows_of_head = []
        model.register_forward_pre_hook(self.model, with_kwargs=True)
        model.get_output_embeddings().register_forward_hook(self.head)

    def model(self, _, inputs, options):
        self.masks.append(options["attention_mask"].tolist())

    def head(self, _, inputs, logits):
        self.rows_of_head.append(logits.shape[:-1].numel())


@pytest.mark.parametrize("padded_left", [False, True])
def test_padding_behind_rows_takes_no_mask_and_no_row_of_the_head(
    tmp_path, monkeypatch, padded_left
):
    monkeypatch.setitem(micro_batches.LEAST, "cpu", 10**6)  # each row by itself
    monkeypatch.setattr(training_pass, "ROUND", 4)
    tiny.build_model(3).save_pretrained(tmp_path)
    tokens, actions, there = groups(padded_left)
    found = []
    for wrapper in (Actor, ResponseActor):
        actor = wrapper(str(tmp_path), attn_implementation="sdpa", param_dtype="bf16")
        actor.model.float()
        seen = Seen(actor.model)
        log_probs = actor(tokens, actions, there)
        (log_probs * torch.arange(8)).sum().backward()
        found.append([log_probs, *(weight.grad for weight in actor.model.parameters())])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
    # Six rows differ, with 3, 4, 1, 2, 4 and 2 actions; the longest has 8 tokens, of which the last predicts none.
    assert seen.rows_of_head == [16]
    [mask] = seen.masks
    assert mask == (there[:6, :-1].tolist() if padded_left else [[1] * 7] * 6)


def test_a_row_that_was_left_out_counts_with_the_ratio_1():
    loss = StepLoss(PolicyLoss(clip_eps_low=0.2, clip_eps_high=0.28))
    old = torch.tensor([[-1.0, -1.0], [-2.0, -2.0]])
    present = torch.tensor([[-0.5, -1.0], [0.0, 0.0]])  # of the second row nothing was computed
    advantages = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    mask = torch.ones(2, 2)
    loss.rows = torch.tensor([True, False])
    value, clipped, kl, *_ = loss(present, old, advantages, action_mask=mask, batch_num_tokens=4.0)
    # Ratios e^0.5 (clipped to 1.28), 1, 1, 1; of four tokens one is clipped.
    assert value.item() == pytest.approx(-(1.28 + 1) / 4)
    assert clipped.item() == pytest.approx(1 / 4)
    assert kl.item() == pytest.approx(-0.5 / 4)

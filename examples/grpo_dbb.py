"""GRPO-DBB on one screen: a training loop in plain PyTorch around stored posteriors, on a processor or one CUDA device.

    python examples/grpo_dbb.py                          (about a minute on two cores; nothing is downloaded)
    python examples/grpo_dbb.py --estimator point        (GRPO, for comparison)
    python examples/grpo_dbb.py --strategy two_stage     (2 rollouts first, 6 more where these differ)
    python examples/grpo_dbb.py --preset smollm2         (SmolLM2-135M on sums: ten minutes and 5 GiB)

A small transformer learns to add, subtract and sort. Every posterior is stored in grpo_dbb.db; the last line says how
to look at them. Paper: GRPO with the Discounted Beta-Bernoulli estimator.
Axes in names: R rollouts, T tokens.
"""

import argparse
import json
from dataclasses import dataclass

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from openrlhf_dbb import Posteriors, tiny
from openrlhf_dbb.core.filling import Answer, Request
from openrlhf_dbb.core.loop import Loop
from openrlhf_dbb.core.strategies import STRATEGIES
from openrlhf_dbb.estimators import available
from openrlhf_dbb.platform import cpu
from openrlhf_dbb.presets import smollm2

ROLLOUTS = 8  # of a prompt in a step
CLIP = 0.2
STORE = "sqlite:///grpo_dbb.db"
# Of each preset: prompts of a step, rollouts of a pass through the model, tokens of an answer, learning rate.
SIZES = {"tiny": (64, 512, 10, 1e-3), "smollm2": (8, 32, 12, 1e-5)}

parser = argparse.ArgumentParser(description="Train a tiny model with GRPO-DBB.")
parser.add_argument(
    "--estimator", choices=list(available()), default="dbb", help="point is GRPO (default: dbb)"
)
parser.add_argument(
    "--strategy", choices=list(STRATEGIES.available()), default="plain", help="default: plain"
)
parser.add_argument(
    "--preset", choices=SIZES, default="tiny", help="the model and its task (default: tiny)"
)
parser.add_argument("--steps", type=int, default=64, help="policy updates")
parser.add_argument(
    "--seed", type=int, default=0, help="of the order of the prompts and of all samples"
)
flags = parser.parse_args()
PROMPTS, ROWS, ANSWER_TOKENS, LEARNING_RATE = SIZES[flags.preset]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Of matrix products; weights stay in fp32.
HAS_BF16 = DEVICE == "cuda" or cpu.has_bf16()
BF16 = torch.autocast(DEVICE, torch.bfloat16, enabled=flags.preset != "tiny" and HAS_BF16)

torch.manual_seed(flags.seed)

# The models have had supervised training: reinforcement learning needs some right answers to begin with.
preset = {"tiny": tiny, "smollm2": smollm2}[flags.preset]
preset.prepare(preset.default_folder())
files = preset.default_folder()
tokenizer = AutoTokenizer.from_pretrained(files / "model", padding_side="left")
policy = AutoModelForCausalLM.from_pretrained(files / "model", dtype=torch.float32).to(DEVICE)
optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
train_rows = [json.loads(line) for line in (files / "train.jsonl").read_text().splitlines()]
heldout_rows = [json.loads(line) for line in (files / "heldout.jsonl").read_text().splitlines()]


@dataclass(frozen=True)
class Rollout:
    """A prompt and a sampled answer, as text and as token ids without padding."""

    prompt: str
    text: str
    answer: torch.Tensor


@torch.no_grad()
def sample(prompts: list[str]) -> list[Rollout]:
    """Sample one answer to each prompt."""
    # Prompts are padded on the left, so all answers begin in the same column.
    batch = tokenizer(prompts, return_tensors="pt", padding=True).to(DEVICE)
    with BF16:
        tokens_R_T = policy.generate(
            **{name: batch[name] for name in ("input_ids", "attention_mask")},
            do_sample=True,
            temperature=1.0,
            top_k=0,  # transformers keeps the 50 likeliest tokens by default; the loss needs the policy's own samples
            max_new_tokens=ANSWER_TOKENS,
        )
    answers_R_T = tokens_R_T[:, batch.input_ids.shape[1] :].cpu()
    texts = tokenizer.batch_decode(answers_R_T, skip_special_tokens=True)
    # A token counts if no end token stands before it: the end token itself is the policy's choice, padding is not.
    ended = (answers_R_T == tokenizer.eos_token_id).long()
    lengths = ((ended.cumsum(dim=1) - ended) == 0).sum(dim=1).tolist()
    return [
        Rollout(prompt, text, answer[:length])
        for prompt, text, answer, length in zip(prompts, texts, answers_R_T, lengths, strict=True)
    ]


def is_right(rollout: Rollout, row: dict[str, str]) -> float:
    return float(rollout.text.strip() == row["label"])


def generate(requests: list[Request[int]]) -> list[Answer[Rollout]]:
    """Answer what the loop asks for: some rollouts of a row of the data, and their scores."""
    prompts = [
        train_rows[request.prompt]["input"] for request in requests for _ in range(request.rollouts)
    ]
    rollouts = iter(sample(prompts))
    answers = []
    for request in requests:
        group = [next(rollouts) for _ in range(request.rollouts)]
        scores = np.array([is_right(rollout, train_rows[request.prompt]) for rollout in group])
        answers.append(Answer(group, scores))
    return answers


def held_out_accuracy() -> float:
    rollouts = sample([row["input"] for row in heldout_rows for _ in range(ROLLOUTS)])
    rows = [row for row in heldout_rows for _ in range(ROLLOUTS)]
    return float(
        np.mean([is_right(rollout, row) for rollout, row in zip(rollouts, rows, strict=True)])
    )


def train(rollouts: list[Rollout], advantages_R: torch.Tensor) -> None:
    """Do one policy update by PPO's clipped objective (Eq. 2 and 3), a mean over tokens and then over rollouts."""
    optimizer.zero_grad()
    for rows in torch.arange(len(rollouts)).split(ROWS):
        some = [rollouts[row] for row in rows]
        prompts = tokenizer([rollout.prompt for rollout in some], return_tensors="pt", padding=True)
        answers = torch.nn.utils.rnn.pad_sequence(
            [rollout.answer for rollout in some], batch_first=True
        )
        lengths = torch.tensor([len(rollout.answer) for rollout in some])
        answer_mask = (torch.arange(answers.shape[1]) < lengths[:, None]).to(DEVICE)
        tokens_R_T = torch.cat([prompts.input_ids, answers], dim=1).to(DEVICE)
        attention_mask = torch.cat([prompts.attention_mask.to(DEVICE), answer_mask.long()], dim=1)
        with BF16:
            logits = policy(
                tokens_R_T,
                attention_mask=attention_mask,
                # Without these positions, left padding would shift the answers of short prompts.
                position_ids=(attention_mask.cumsum(dim=1) - 1).clamp(min=0),
                logits_to_keep=answers.shape[1] + 1,
            ).logits
        # The logits of a column predict the token of the next one.
        log_probabilities = logits[:, :-1].float().log_softmax(dim=-1)
        log_probabilities = log_probabilities.gather(2, answers.to(DEVICE)[:, :, None]).squeeze(2)
        # Each batch gets one optimizer step here: the policy that is trained is the one that sampled, so every ratio
        # is 1 and nothing is clipped. With several steps a batch, keep the old log-probabilities.
        ratio = (log_probabilities - log_probabilities.detach()).exp()
        advantages = advantages_R[rows, None].to(DEVICE)
        objective = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
        loss = -((objective * answer_mask).sum(dim=1) / answer_mask.sum(dim=1)).sum() / len(
            rollouts
        )
        loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()


texts = [row["input"] for row in train_rows]
labels = [row["label"] for row in train_rows]
print(f"held-out accuracy before: {held_out_accuracy():.1%}")
with Posteriors.create(
    STORE, "grpo-dbb", texts, labels, estimator=flags.estimator, if_exists="new"
) as posteriors:
    loop = Loop(
        posteriors,
        texts,
        labels,
        generate,
        groups=PROMPTS,
        rollouts=ROLLOUTS,
        strategy=flags.strategy,
        seed=flags.seed,
        text_of=lambda rollout: rollout.text,
        tokens_of=lambda rollout: len(rollout.answer),
    )
    for _ in range(flags.steps):
        # This line is DBB (Algorithm 1). Of each prompt with S successes of G rollouts it updates the counts
        #     alpha <- discount * alpha + S        beta <- discount * beta + G - S
        # and scores each rollout X by (X - mean) / sqrt(mean * (1 - mean)) with mean = alpha / (alpha + beta). With
        # `point` a group of equal rewards teaches nothing. With `dbb` it still says whether it beat its history.
        step = loop.step()
        train(step.rollouts, torch.tensor(step.advantages, dtype=torch.float32))
        rewards = [score for group in step.groups for score in group.scores]
        equal = step.metrics["estimator/zero_variance"]
        print(
            f"step {step.number:3}  reward {np.mean(rewards):.3f}  zero-variance groups {equal:.0%}  "
            f"rollouts {loop.generated}",
            flush=True,
        )
    posteriors.finish()
    print(f"look: openrlhf-dbb serve --store.url {STORE}")
print(f"held-out accuracy after:  {held_out_accuracy():.1%}")

"""GRPO-DBB on one screen: a training loop in plain PyTorch, with the advantages of the package estimators.

    python examples/grpo_dbb.py                      (about a minute on two cores; nothing is downloaded)
    python examples/grpo_dbb.py --estimator point    (GRPO, for comparison)
    python examples/grpo_dbb.py --preset smollm2     (SmolLM2-135M on sums: ten minutes and 5 GiB)

A small transformer learns to add, subtract and sort. Paper: GRPO with the Discounted Beta-Bernoulli estimator.
Axes in names: P prompts of a batch, G rollouts of a prompt, R = P * G rollouts, T tokens.
"""

import argparse
import json

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from openrlhf_dbb import tiny
from openrlhf_dbb.estimators import FORMS, available, build
from openrlhf_dbb.platform import cpu
from openrlhf_dbb.presets import smollm2

ROLLOUTS = 8  # of a prompt in a step
CLIP = 0.2
# Of each preset: prompts of a step, rollouts of a pass through the model, tokens of an answer, learning rate.
SIZES = {"tiny": (64, 512, 10, 1e-3), "smollm2": (8, 32, 12, 1e-5)}

names = list(available())
parser = argparse.ArgumentParser(description="Train a tiny model with GRPO-DBB.")
parser.add_argument("--estimator", choices=names, default="dbb", help="point is GRPO (default: dbb)")
parser.add_argument("--preset", choices=SIZES, default="tiny", help="the model and its task (default: tiny)")
parser.add_argument("--steps", type=int, default=64, help="policy updates")
parser.add_argument("--seed", type=int, default=0, help="of the order of the prompts and of all samples")
flags = parser.parse_args()
PROMPTS, ROWS, ANSWER_TOKENS, LEARNING_RATE = SIZES[flags.preset]
# Of matrix products; weights stay in fp32.
BF16 = torch.autocast("cpu", torch.bfloat16, enabled=flags.preset != "tiny" and cpu.has_bf16())

torch.manual_seed(flags.seed)
random = np.random.default_rng(flags.seed)

# The models have had supervised training: reinforcement learning needs some right answers to begin with.
preset = {"tiny": tiny, "smollm2": smollm2}[flags.preset]
preset.prepare(preset.default_folder())
files = preset.default_folder()
tokenizer = AutoTokenizer.from_pretrained(files / "model", padding_side="left")
policy = AutoModelForCausalLM.from_pretrained(files / "model", dtype=torch.float32)
optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
train_rows = [json.loads(line) for line in (files / "train.jsonl").read_text().splitlines()]
heldout_rows = [json.loads(line) for line in (files / "heldout.jsonl").read_text().splitlines()]


@torch.no_grad()
def answer(rows):
    """Sample ROLLOUTS answers to every row.

    Returns:
        token ids of prompts and answers (R, T), their attention mask (R, T), the mask of the answers' tokens with the
        end token included (R, ANSWER_TOKENS or fewer), and the rewards (P, G): 1 where an answer is the label, else 0.
    """
    # Prompts are padded on the left, so all answers begin in the same column.
    prompts = tokenizer([row["input"] for row in rows], return_tensors="pt", padding=True)
    with BF16:
        tokens_R_T = policy.generate(
            input_ids=prompts.input_ids,
            attention_mask=prompts.attention_mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,  # transformers keeps the 50 likeliest tokens by default; the loss needs the policy's own samples
            num_return_sequences=ROLLOUTS,
            max_new_tokens=ANSWER_TOKENS,
        )
    answers = tokens_R_T[:, prompts.input_ids.shape[1] :]
    ended = answers == tokenizer.eos_token_id
    # A token counts if no end token stands before it: the end token itself is the policy's choice, padding is not.
    answer_mask = (ended.cumsum(dim=1) - ended.long()) == 0
    attention_mask = torch.cat([prompts.attention_mask.repeat_interleave(ROLLOUTS, dim=0), answer_mask.long()], dim=1)
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    labels = [row["label"] for row in rows for _ in range(ROLLOUTS)]
    rewards_R = np.array([text.strip() == label for text, label in zip(texts, labels, strict=True)], dtype=float)
    return tokens_R_T, attention_mask, answer_mask, rewards_R.reshape(len(rows), ROLLOUTS)


# The estimator itself holds no numbers. What it has learnt of each prompt is in `state`: for dbb the counts alpha and
# beta of a Beta distribution, from the prior Beta(1, 1) (Definition 2).
estimator = build(flags.estimator)
state = estimator.initial_state(len(train_rows))
form = FORMS.build("group_norm")

print(f"held-out accuracy before: {answer(heldout_rows)[-1].mean():.1%}")

for step in range(flags.steps):
    if step % (len(train_rows) // PROMPTS) == 0:  # a new pass
        order = random.permutation(len(train_rows))
    start = step * PROMPTS % len(train_rows)
    batch = order[start : start + PROMPTS]
    tokens_R_T, attention_mask, answer_mask, rewards_P_G = answer([train_rows[i] for i in batch])

    # This line is DBB (Algorithm 1). It first updates the counts of the batch's prompts with S successes of G rollouts:
    #     alpha <- discount * alpha + S        beta <- discount * beta + G - S
    # The discount forgets, because the policy of earlier passes answered differently. Then it reads mean and variance:
    #     mean = alpha / (alpha + beta)        variance = mean * (1 - mean)
    estimate = estimator.observe_at(state, batch, rewards_P_G)

    # GRPO's advantage (Eq. 1), (X - mean) / sqrt(variance). With `point` a group of equal rewards has variance 0
    # and teaches nothing. The variance of `dbb` is above 0, so such a group still says whether it beat its history.
    advantages_R = torch.tensor(form.advantages(rewards_P_G, estimate), dtype=torch.float32).flatten()

    # Without these positions, left padding would shift the answers of short prompts.
    position_ids = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
    answer_tokens = answer_mask.shape[1]
    optimizer.zero_grad()
    for rows in torch.arange(len(tokens_R_T)).split(ROWS):
        with BF16:
            logits = policy(
                tokens_R_T[rows],
                attention_mask=attention_mask[rows],
                position_ids=position_ids[rows],
                logits_to_keep=answer_tokens + 1,
            ).logits
        # The logits of a column predict the token of the next one.
        log_probabilities = logits[:, :-1].float().log_softmax(dim=-1)
        log_probabilities = log_probabilities.gather(2, tokens_R_T[rows, -answer_tokens:, None]).squeeze(2)

        # PPO's clipped objective (Eq. 2 and 3), a mean over tokens and then over rollouts. Each batch gets one
        # optimizer step here: the policy that is trained is the one that sampled, so every ratio is 1 and nothing is
        # clipped. The gradient is that of the plain policy gradient. With several steps a batch, keep `old`.
        ratio = (log_probabilities - log_probabilities.detach()).exp()
        advantages = advantages_R[rows, None]
        objective = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
        mask = answer_mask[rows]
        loss = -((objective * mask).sum(dim=1) / mask.sum(dim=1)).sum() / len(tokens_R_T)
        loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()

    zero_variance = (rewards_P_G.min(axis=1) == rewards_P_G.max(axis=1)).mean()
    print(f"step {step + 1:3}  reward {rewards_P_G.mean():.3f}  zero-variance groups {zero_variance:.0%}", flush=True)

print(f"held-out accuracy after:  {answer(heldout_rows)[-1].mean():.1%}")

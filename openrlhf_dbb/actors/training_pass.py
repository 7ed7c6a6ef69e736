"""Leaves out of the policy's passes what nobody reads; losses and gradients stay OpenRLHF's to rounding.

- Logits, log-probs and entropy of tokens that are not part of a response.
- Copies of the logits: they are in float32 a chunk at a time, and their gradient takes their place.
- The pass that takes the old log-probs, where a step has one optimizer update: the training pass takes the same.
- Rows whose advantages are all 0, where no other term reads them. They count in the loss's mean all the same.

Packed rows keep OpenRLHF's own pass.
"""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from openrlhf.models import Actor, PolicyLoss
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer
from peft import PeftModel
from peft.tuners.lora import LoraLayer

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.methods import CONSTANT_LENGTH, constant_length

# Logits that are in float32 at a time: 16 MiB, which a processor's cache holds; more to keep a GPU busy.
CHUNK = {"cpu": 2**22, "cuda": 2**25}


class LogProbs(torch.autograd.Function):
    """Log-probs and entropies from logits. The backward pass writes the gradient over the logits."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> Any:
        """Return log-probs of tokens (T,) and entropies in nats, both (T,) in float32; logits are (T, V)."""
        total, log_probs, entropy = logits.new_empty((3, len(tokens), 1), dtype=torch.float32)
        for rows, scaled in _chunks(logits, temperature):
            total[rows] = scaled.logsumexp(dim=1, keepdim=True)
            log_p = scaled.sub_(total[rows])
            log_probs[rows] = log_p.gather(1, tokens[rows, None])
            entropy[rows] = -log_p.exp().mul_(log_p).sum(dim=1, keepdim=True)
        ctx.save_for_backward(logits, tokens, total, entropy)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)  # an entropy that is only logged takes no part in the backward pass
        return log_probs[:, 0], entropy[:, 0]

    @staticmethod
    def backward(ctx: Any, of_log_probs: torch.Tensor, of_entropy: torch.Tensor | None) -> Any:
        """Return the gradient of the logits, in their memory."""
        logits, tokens, total, entropy = ctx.saved_tensors
        for rows, scaled in _chunks(logits, ctx.temperature):
            log_p = scaled.sub_(total[rows])
            p, slope = log_p.exp(), of_log_probs[rows, None] / ctx.temperature
            gradient = (p * -slope).scatter_add_(1, tokens[rows, None], slope)
            if of_entropy is not None:
                gradient -= of_entropy[rows, None] / ctx.temperature * p * (log_p + entropy[rows])
            logits[rows] = gradient
        return logits, None, None


def _chunks(logits: torch.Tensor, temperature: float) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield slices of rows, and the logits there in float32, divided by the temperature."""
    size = max(CHUNK[logits.device.type] // logits.shape[1], 1)
    for start in range(0, len(logits), size):
        rows = slice(start, start + size)
        yield rows, logits[rows].float() / temperature


class ResponseActor(Actor):
    """OpenRLHF's wrapper of the policy, which takes logits at the response tokens only.

    Attributes:
        rows: (B,) bool, the rows of the next batch to compute; the others get 0. None: all rows.
    """

    def __init__(self, *args: Any, target_modules: str | list[str] | None = None, **kwargs: Any) -> None:
        if target_modules == ["all-linear"]:  # the flag makes a list of it; only the bare word is not a layer's name
            target_modules = "all-linear"
        super().__init__(*args, target_modules=target_modules, **kwargs)
        self.rows: torch.Tensor | None = None
        model = self.model
        if isinstance(model, PeftModel):
            model = model.get_base_model()
            ends = model.get_input_embeddings(), model.get_output_embeddings()
            if model.config.tie_word_embeddings and any(isinstance(each, LoraLayer) for each in ends):
                raise UsageError(
                    f"--ds.lora.target_modules {' '.join(target_modules or [])}: embeddings and head are one weight in "
                    "this model, so neither can have an adapter; leave it out, or use all-linear"
                )
        # Models with code of their own may lack the parameter.
        self._selects = "logits_to_keep" in inspect.signature(model.forward).parameters

    def forward(
        self,
        sequences: torch.Tensor,
        action_mask: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        return_output: bool = False,
        return_entropy: bool = False,
        **options: Any,
    ) -> Any:
        """Return the log-probs (B, A) of the actions, and if asked the model's output with ``entropy`` (B, A)."""
        given = any(value is not None and value is not False for value in options.values())
        if action_mask is None or attention_mask is None or given or self.packing_samples or not self._selects:
            return super().forward(
                sequences, action_mask, attention_mask, return_output, return_entropy=return_entropy, **options
            )
        every = torch.ones(len(sequences), dtype=torch.bool, device=sequences.device)
        rows = (every if self.rows is None else self.rows).nonzero()
        columns = action_mask[rows[:, 0]].any(dim=0).nonzero()[:, 0]
        predicted = columns + sequences.shape[1] - action_mask.shape[1]  # the places of these actions in a sequence
        end = int(predicted[-1]) + 1 if len(predicted) else sequences.shape[1]
        tokens, attention = sequences[rows[:, 0], :end], attention_mask[rows[:, 0], :end]
        positions = (attention.long().cumsum(-1) - 1).masked_fill(attention == 0, 1)
        output = self.model(tokens, attention_mask=attention, position_ids=positions, logits_to_keep=predicted - 1)
        logits, output["logits"] = output["logits"].flatten(0, 1), None
        chosen = tokens[:, predicted]

        def spread(values: torch.Tensor) -> torch.Tensor:
            return values.new_zeros(action_mask.shape).index_put((rows, columns[None]), values.view(chosen.shape))

        log_probs, output.entropy = map(spread, LogProbs.apply(logits, chosen.flatten(), self.temperature))
        log_probs = log_probs * action_mask.float()
        return (log_probs, output) if return_output else log_probs


class FirstUpdateLoss(torch.nn.Module):
    """The policy loss of a batch without old log-probs. They are the present ones, so that every ratio is 1."""

    def __init__(self, loss: torch.nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, log_probs: torch.Tensor, old_log_probs: torch.Tensor | None, *args: Any, **kwargs: Any) -> Any:
        """Return what the loss returns."""
        return self.loss(log_probs, log_probs.detach() if old_log_probs is None else old_log_probs, *args, **kwargs)


class ConstantLengthLoss(torch.nn.Module):
    """Upstream's policy loss, summed over the tokens and divided by a constant length instead of the response's length.

    ``loss = sum over rows and tokens / (B * L)``. B is the number of rows of the optimizer step, over all ranks, that
    have at least one action. L is the length of the longest response that can be generated, as published. A token of a
    long response then weighs as much as a token of a short one. KL loss and entropy stay upstream's token means.

    Source: Dr.GRPO, "Understanding R1-Zero-Like Training: A Critical Perspective", section 3.
    """

    def __init__(self, loss: PolicyLoss, length: int) -> None:
        super().__init__()
        loss.token_level_loss = True
        self.loss, self.length = loss, length

    def forward(
        self, *args: Any, batch_num_tokens: Any = None, global_batch_size: Any, **kwargs: Any
    ) -> tuple[torch.Tensor | None, ...]:
        """Return upstream's loss and metrics of one micro-batch."""
        # Upstream divides the sum over tokens by batch_num_tokens. global_batch_size counts the rows of the optimizer
        # step that have an action, divided by its number of micro-batches, which DeepSpeed divides the loss by.
        return self.loss(*args, batch_num_tokens=global_batch_size * self.length, **kwargs)


class PolicyTrainer(ActorPPOTrainer):
    """OpenRLHF's trainer of the policy with the losses above. It leaves out rows that change nothing."""

    actor_loss_fn: torch.nn.Module

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.args.actor.loss_agg_mode == CONSTANT_LENGTH:
            self.actor_loss_fn = ConstantLengthLoss(self.actor_loss_fn, constant_length(self.args))
        self.actor_loss_fn = FirstUpdateLoss(self.actor_loss_fn)

    def training_step(self, experience: Experience, *args: Any, **kwargs: Any) -> Any:
        """Train on one micro-batch, as upstream does."""
        # Entropy, KL and the balance of experts are terms of every row beside the policy loss. With old log-probs the
        # ratio and its metrics are of all rows.
        actor, kl_loss = self.args.actor, self.args.algo.kl.use_loss
        every_row = actor.entropy_coef is not None or kl_loss or actor.aux_loss_coef > 1e-8
        if experience.action_log_probs is None and not every_row:
            self.actor.rows = contributing(experience.advantages)
        try:
            return super().training_step(experience, *args, **kwargs)
        finally:
            self.actor.rows = None


def contributing(advantages: torch.Tensor) -> torch.Tensor:
    """Return which rows (B,) of the advantages (B, A) are not all 0; at least one, since every rank needs a pass."""
    rows = advantages.ne(0).any(dim=1)
    if not rows.any():
        rows[0] = True
    return rows

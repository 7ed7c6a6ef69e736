"""Leaves out of the policy's passes what nobody reads; losses and gradients stay OpenRLHF's to rounding.

docs/machines.md lists what is left out. Rows whose advantages are all 0 count in the loss's mean all the same. Packed
rows keep OpenRLHF's own pass.
"""

import inspect
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from openrlhf.models import Actor, PolicyLoss
from openrlhf.trainer.ppo_utils.experience import Experience, make_experience_batch
from openrlhf.trainer.ray import ppo_actor
from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer
from openrlhf.utils.loss_utils import iter_grad_accum_global_norm
from peft import PeftModel
from peft.tuners.lora import LoraLayer

from openrlhf_dbb import upstream
from openrlhf_dbb.actors.shared_prompts import ROUND, laid_out, longest_row, prompt_of
from openrlhf_dbb.errors import RunError, UsageError
from openrlhf_dbb.methods import CONSTANT_LENGTH, constant_length

# Logits that are in float32 at a time: 2 MiB, which the cache of one core holds; more to keep a GPU busy.
CHUNK = {"cpu": 2**19, "cuda": 2**25}
NOT_FINITE = "a gradient of the policy is infinite or NaN"


class LogProbs(torch.autograd.Function):
    """Log-probs and entropies from logits. The backward pass writes the gradient over the logits."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> Any:
        """Return log-probs of tokens (T,) and entropies in nats, both (T,) in float32; logits are (T, V)."""
        total, log_probs, entropy = logits.new_empty((3, len(tokens), 1), dtype=torch.float32)
        for rows, scaled in _chunks(logits, temperature):
            largest = scaled.amax(dim=1, keepdim=True)
            p = scaled.sub_(largest).exp()
            sums = p.sum(dim=1, keepdim=True)
            log_sums = sums.log()
            log_probs[rows] = scaled.gather(1, tokens[rows, None]) - log_sums
            entropy[rows] = log_sums - p.mul_(scaled).sum(dim=1, keepdim=True) / sums
            total[rows] = largest + log_sums
        ctx.save_for_backward(logits, tokens, total, entropy)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)  # an entropy that is only logged takes no part in the backward pass
        return log_probs[:, 0], entropy[:, 0]

    @staticmethod
    def backward(ctx: Any, of_log_probs: torch.Tensor, of_entropy: torch.Tensor | None) -> Any:
        """Return the gradient of the logits, in their memory."""
        logits, tokens, total, entropy = ctx.saved_tensors
        for rows, scaled in _chunks(logits, ctx.temperature):
            log_p, slope = scaled.sub_(total[rows]), of_log_probs[rows, None] / ctx.temperature
            factor = -slope
            if of_entropy is not None:
                factor = factor - of_entropy[rows, None] / ctx.temperature * (log_p + entropy[rows])
            logits[rows] = log_p.exp_().mul_(factor).scatter_add_(1, tokens[rows, None], slope)
        return logits, None, None


def _chunks(logits: torch.Tensor, temperature: float) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield slices of rows, and the logits there in float32, divided by the temperature."""
    size = max(CHUNK[logits.device.type] // logits.shape[1], 1)
    for start in range(0, len(logits), size):
        rows = slice(start, start + size)
        scaled = logits[rows].to(torch.float32, copy=True)
        yield rows, scaled if temperature == 1 else scaled.div_(temperature)


class ResponseActor(Actor):
    """OpenRLHF's wrapper of the policy, which takes logits at the response tokens only.

    Attributes:
        rows: (B,) bool, the rows of the next batch to compute; the others get 0. None: all rows.
        longest_shared: tokens of a row up to which rows may share their prompt.
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
        self.longest_shared = longest_row(model)

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
        (rows, length), first = sequences.shape, sequences.shape[1] - action_mask.shape[1]
        wanted = torch.zeros_like(sequences, dtype=torch.bool)
        wanted[:, first:] = action_mask if self.rows is None else action_mask.bool() & self.rows[:, None]
        shares = next(self.model.parameters()).dtype if length <= self.longest_shared else None
        places, mask = laid_out(sequences, attention_mask, wanted, shares)
        positions = (attention_mask.long().cumsum(-1) - 1).masked_fill(attention_mask == 0, 1).flatten()
        tokens, inputs = sequences.flatten(), places.clamp(min=0)
        # Padding comes to predict the first token of the first row, which nobody reads. Nor does anybody read the
        # columns that round up the rows of the head.
        kept = wanted.flatten()[places + 1].any(dim=0)
        kept[(~kept).nonzero()[: -int(kept.sum()) % ROUND, 0]] = True
        kept = kept.nonzero()[:, 0]
        predicted = (places[:, kept] + 1).flatten()
        output = self.model(tokens[inputs], attention_mask=mask, position_ids=positions[inputs], logits_to_keep=kept)
        logits, output["logits"] = output["logits"].flatten(0, 1), None

        def spread(values: torch.Tensor) -> torch.Tensor:
            values = values.new_zeros(rows * length).index_put((predicted,), values).view(rows, length)
            return values[:, first:] * wanted[:, first:]

        log_probs, output.entropy = map(spread, LogProbs.apply(logits, tokens[predicted], self.temperature))
        return (log_probs, output) if return_output else log_probs


class StepLoss(torch.nn.Module):
    """Upstream's policy loss. Where there are no old log-probs, they are the present ones, and every ratio is 1.

    With a length L the loss is the sum over all tokens, divided by B * L: B is the number of rows of the optimizer
    step, over all ranks, that have an action, and L the length of the longest response that can be generated, as
    published. A token of a long response then weighs as much as a token of a short one. KL loss and entropy stay
    upstream's token means.

    Source: Dr.GRPO, "Understanding R1-Zero-Like Training: A Critical Perspective", section 3.
    """

    def __init__(self, loss: PolicyLoss, length: int | None = None) -> None:
        super().__init__()
        loss.token_level_loss |= length is not None
        self.loss, self.length = loss, length

    def forward(self, log_probs: torch.Tensor, old_log_probs: torch.Tensor | None, *args: Any, **info: Any) -> Any:
        # Upstream divides the sum over tokens by batch_num_tokens. global_batch_size counts the rows of the optimizer
        # step that have an action, divided by its number of micro-batches, which DeepSpeed divides the loss by.
        if self.length is not None:
            info["batch_num_tokens"] = info.pop("global_batch_size") * self.length
        return self.loss(log_probs, log_probs.detach() if old_log_probs is None else old_log_probs, *args, **info)


class PolicyTrainer(ActorPPOTrainer):
    """OpenRLHF's trainer of the policy with the losses above. It leaves out rows that change nothing."""

    actor_loss_fn: torch.nn.Module

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        length = constant_length(self.args) if self.args.actor.loss_agg_mode == CONSTANT_LENGTH else None
        self.actor_loss_fn = StepLoss(self.actor_loss_fn, length)
        if not self.args.train.dynamic_batch_enable:
            self.replay_buffer.collate_fn = list  # rows, of which ``together`` makes micro-batches

    def ppo_train(self, kl_ctl: float) -> dict[str, Any]:
        """Train on the replay buffer, as upstream does; raise RunError if a gradient was not finite."""

        def updates(batches: Any, strategy: Any, accumulated: int, *args: Any) -> Iterator[Any]:
            return iter_grad_accum_global_norm(together(batches, accumulated), strategy, accumulated, *args)

        upstream.replace(ppo_actor, "iter_grad_accum_global_norm", updates)
        engine = self.actor.model
        skipped = engine.skipped_steps
        status = super().ppo_train(kl_ctl)
        # In bf16 with ZeRO 1 and 2 DeepSpeed leaves such an update out in silence, else it makes the weights NaN.
        weights = [getattr(weight, "ds_tensor", weight) for weight in self.actor.parameters() if weight.requires_grad]
        if engine.skipped_steps > skipped or not torch.nn.utils.get_total_norm(weights).isfinite():
            raise RunError(
                f"{NOT_FINITE}; go on from the last checkpoint (--resume) with --ds.attn_implementation eager or a "
                "lower --actor.adam.lr"
            )
        return status

    def training_step(self, experience: Experience, *args: Any, **kwargs: Any) -> Any:
        # Entropy, KL and the balance of experts are terms of every row beside the policy loss. With old log-probs the
        # ratio and its metrics are of all rows.
        actor, kl_loss = self.args.actor, self.args.algo.kl.use_loss
        every_row = actor.entropy_coef is not None or kl_loss or actor.aux_loss_coef > 1e-8
        if experience.action_log_probs is None and not every_row:
            self.actor.rows = experience.advantages.ne(0).any(dim=1)
        status = super().training_step(experience, *args, **kwargs)
        self.actor.rows = None
        return status


def together(batches: Iterable[list[Experience]], accumulated: int) -> Iterator[Experience]:
    """Yield micro-batches, with the rows of each optimizer update prompt by prompt; ``accumulated`` make an update."""
    remaining = iter(batches)
    while of_update := list(itertools.islice(remaining, accumulated)):
        rows = sorted(itertools.chain(*of_update), key=prompt_of)
        cuts = [len(rows) * cut // len(of_update) for cut in range(len(of_update) + 1)]
        yield from (make_experience_batch(rows[start:end]) for start, end in itertools.pairwise(cuts))

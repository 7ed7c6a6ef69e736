"""The policy's passes without the positions whose logits are unused.

Losses and gradients equal OpenRLHF's up to rounding. docs/scale.md lists what is left out. Rows
whose advantages are all 0 still count in the loss's mean. Packed rows keep OpenRLHF's own pass.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from openrlhf.models import Actor, PolicyLoss
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ray import ppo_actor
from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer
from openrlhf.utils.loss_utils import iter_grad_accum_global_norm
from peft import PeftModel

from openrlhf_dbb import upstream
from openrlhf_dbb.actors.micro_batches import (
    ROUND,
    first_equal,
    laid_out,
    together,
    without_padding_behind,
)
from openrlhf_dbb.actors.progress import DIFFERENCE
from openrlhf_dbb.errors import RunError
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
        # An entropy that is only logged takes no part in the backward pass
        ctx.set_materialize_grads(False)
        return log_probs[:, 0], entropy[:, 0]

    @staticmethod
    def backward(ctx: Any, of_log_probs: torch.Tensor, of_entropy: torch.Tensor | None) -> Any:
        """Return the gradient of the logits, in their memory."""
        logits, tokens, total, entropy = ctx.saved_tensors
        for rows, scaled in _chunks(logits, ctx.temperature):
            log_p = scaled.sub_(total[rows])
            slope = of_log_probs[rows, None] / ctx.temperature
            factor = -slope
            if of_entropy is not None:
                slope_of_entropy = of_entropy[rows, None] / ctx.temperature
                factor = factor - slope_of_entropy * (log_p + entropy[rows])
            logits[rows] = log_p.exp_().mul_(factor).scatter_add_(1, tokens[rows, None], slope)
        return logits, None, None


def _chunks(logits: torch.Tensor, temperature: float) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield slices of rows, and the logits there in float32, divided by the temperature."""
    size = max(CHUNK[logits.device.type] // logits.shape[1], 1)
    for start in range(0, len(logits), size):
        rows = slice(start, start + size)
        scaled = logits[rows].to(torch.float32, copy=True)
        if temperature != 1:
            scaled.div_(temperature)
        yield rows, scaled


class ResponseActor(Actor):
    """OpenRLHF's wrapper of the policy, which takes logits at the response tokens only.

    Attributes:
        rows: (B,) bool, the rows of the next batch to compute; the others get 0. None: all rows.
        longest_shared: tokens of a row up to which rows may share their prompt.
    """

    def __init__(
        self, *args: Any, target_modules: str | list[str] | None = None, **kwargs: Any
    ) -> None:
        # The flag makes a list of the word; peft takes only the bare word for all layers.
        if target_modules == ["all-linear"]:
            target_modules = "all-linear"
        super().__init__(*args, target_modules=target_modules, **kwargs)
        self.rows: torch.Tensor | None = None
        model = self.model
        if isinstance(model, PeftModel):
            model = model.get_base_model()
        self.longest_shared = longest_row(model)
        self._is_causal = self.longest_shared > 0  # nothing else reads the attention mask

    def forward(
        self,
        sequences: torch.Tensor,
        action_mask: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        return_output: bool = False,
        return_entropy: bool = False,
        **options: Any,
    ) -> Any:
        """Return log-probs of the actions; with ``return_output`` the model's output, with ``entropy``, too.

        ``sequences`` and ``attention_mask`` are (B, T), the others (B, A).
        """
        head = self.model.get_output_embeddings()
        if (
            action_mask is None
            or attention_mask is None
            or head is None
            or self._is_special(options)
        ):
            return super().forward(
                sequences,
                action_mask,
                attention_mask,
                return_output,
                return_entropy=return_entropy,
                **options,
            )
        rows, length = sequences.shape
        first = length - action_mask.shape[1]
        wanted = torch.zeros_like(sequences, dtype=torch.bool)
        wanted[:, first:] = action_mask
        if self.rows is not None:
            wanted &= self.rows[:, None]
        numbers = torch.arange(rows, device=sequences.device)
        equal = numbers
        computed = wanted
        dtype = None
        if length <= self.longest_shared:
            dtype = next(self.model.parameters()).dtype
            equal = first_equal(torch.cat([sequences, attention_mask, wanted], dim=1))
            computed = wanted & (equal == numbers)[:, None]
        places, mask = laid_out(sequences, attention_mask, computed, dtype)
        if self._is_causal and mask.dim() == 2:
            mask = without_padding_behind(mask)
        # Padding, at place -1, then predicts the first token of the first row, which is never used.
        predicted = places.flatten() + 1
        kept = read_by_head(computed.flatten()[predicted])
        predicted = predicted[kept]
        tokens = sequences.flatten()
        positions = (attention_mask.long().cumsum(-1) - 1).masked_fill(attention_mask == 0, 1)
        inputs = places.clamp(min=0)
        with only_rows(head, kept):
            output = self.model(
                tokens[inputs], attention_mask=mask, position_ids=positions.flatten()[inputs]
            )
        logits = output["logits"][0]
        output["logits"] = None  # their memory becomes the gradient's

        def spread(values: torch.Tensor) -> torch.Tensor:
            of_all = values.new_zeros(rows * length).index_put((predicted,), values)
            of_rows = of_all.view(rows, length)[equal]
            return of_rows[:, first:] * wanted[:, first:]

        log_probs, entropy = LogProbs.apply(logits, tokens[predicted], self.temperature)
        log_probs = spread(log_probs)
        output.entropy = spread(entropy)
        return (log_probs, output) if return_output else log_probs

    def _is_special(self, options: dict[str, Any]) -> bool:
        """Return whether rows are packed, or come with images or other things of OpenRLHF's."""
        special = [
            name for name, value in options.items() if value is not None and value is not False
        ]
        return bool(special) or self.packing_samples


def read_by_head(wanted: torch.Tensor) -> torch.Tensor:
    """Return the numbers of the rows that the head computes: the wanted ones, and others to a multiple of ROUND."""
    kept = wanted.clone()
    unread = (~wanted).nonzero()[:, 0]
    missing = -int(wanted.sum()) % ROUND
    kept[unread[:missing]] = True
    return kept.nonzero()[:, 0]


@contextlib.contextmanager
def only_rows(head: torch.nn.Module, numbers: torch.Tensor) -> Iterator[None]:
    """Let a model's head compute these rows of the flattened hidden states (B, T, H) alone, as (1, rows, V)."""

    def chosen(_: Any, hidden: tuple[torch.Tensor]) -> torch.Tensor:
        return hidden[0].flatten(0, 1)[None, numbers]

    hook = head.register_forward_pre_hook(chosen)
    try:
        yield
    finally:
        hook.remove()


class StepLoss(torch.nn.Module):
    """Upstream's policy loss. Where there are no old log-probs, they are the present ones, and every ratio is 1.

    A row that was left out has no present log-probs. Its ratio counts as 1 in the metrics; its loss is 0 in any case.

    With a length L the loss is the sum over all tokens, divided by B * L: B is the number of rows of the optimizer
    step, over all ranks, that have an action, and L the length of the longest response that can be generated, as
    published. A token of a long response then weighs as much as a token of a short one. KL loss and entropy stay
    upstream's token means.

    Source: Dr.GRPO, "Understanding R1-Zero-Like Training: A Critical Perspective", section 3.
    """

    def __init__(
        self, loss: PolicyLoss, length: int | None = None, *, old_are_vllms: bool = False
    ) -> None:
        super().__init__()
        self._old_are_vllms = old_are_vllms
        loss.token_level_loss |= length is not None
        self.loss = loss
        self.length = length
        self.rows: torch.Tensor | None = None  # (B,) bool, the rows that were computed; None: all
        # Of the policy's log-probs and vLLM's, where there are both
        self.differences: list[torch.Tensor] = []

    def forward(
        self, log_probs: torch.Tensor, old_log_probs: torch.Tensor | None, *args: Any, **info: Any
    ) -> Any:
        """Return upstream's loss of log-probs (B, T); note how far they are from vLLM's."""
        # Upstream divides the sum over tokens by batch_num_tokens. global_batch_size counts the rows of the optimizer
        # step that have an action, divided by its number of micro-batches, which DeepSpeed divides the loss by.
        if self.length is not None:
            info["batch_num_tokens"] = info.pop("global_batch_size") * self.length
        old = log_probs.detach() if old_log_probs is None else old_log_probs
        own = log_probs.detach() if self._old_are_vllms else old
        if self.rows is not None:
            log_probs = torch.where(self.rows[:, None], log_probs, old)
        vllms = info.get("rollout_log_probs")
        if vllms is not None:
            # Replayed rows have NaN: the engines' policy has moved since.
            compared = info["action_mask"].bool() & own.ne(0) & ~vllms.isnan()
            self.differences.append((own - vllms)[compared].abs())
        return self.loss(log_probs, old, *args, **info)


class PolicyTrainer(ActorPPOTrainer):
    """OpenRLHF's trainer of the policy with the losses above. Rows that change nothing are left out.

    Attributes:
        extra_rows: to train on beside the buffer. The micro-batches grow; their number stays.
    """

    actor_loss_fn: torch.nn.Module

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.extra_rows: list[Experience] = []
        length = None
        if self.args.actor.loss_agg_mode == CONSTANT_LENGTH:
            length = constant_length(self.args)
        vllms = getattr(self.args.train, "vllm_log_probs", False)  # OpenRLHF alone has no such flag
        self._loss = StepLoss(self.actor_loss_fn, length, old_are_vllms=vllms)
        self.actor_loss_fn = self._loss
        # A loss that balances experts depends on the other rows of the micro-batch.
        self._orders_rows = not self.args.train.dynamic_batch_enable and not self.aux_loss
        if self._orders_rows:
            self.replay_buffer.collate_fn = list  # rows, of which ``together`` makes micro-batches

    def ppo_train(self, kl_ctl: float) -> dict[str, Any]:
        """Train on the buffer as upstream does, and on the extra rows, which are dropped afterwards.

        Raises:
            RunError: a gradient was not finite.
        """
        device = next(self.actor.parameters()).device.type
        longest_shared = self.actor.longest_shared

        def updates(batches: Any, strategy: Any, accumulated: int, *args: Any) -> Iterator[Any]:
            if self._orders_rows:
                batches = together(batches, accumulated, device, longest_shared, self.extra_rows)
            return iter_grad_accum_global_norm(batches, strategy, accumulated, *args)

        upstream.replace(ppo_actor, "iter_grad_accum_global_norm", updates)
        engine = self.actor.model
        skipped = engine.skipped_steps
        status = super().ppo_train(kl_ctl)
        self.extra_rows.clear()
        if self._loss.differences:
            status[DIFFERENCE] = torch.cat(self._loss.differences).mean().item()
            self._loss.differences.clear()
        # In bf16 with ZeRO 1 and 2 DeepSpeed skips an update with such a gradient, without a word.
        # Otherwise the update makes the weights NaN.
        trained = [weight for weight in self.actor.parameters() if weight.requires_grad]
        weights = [getattr(weight, "ds_tensor", weight) for weight in trained]
        if engine.skipped_steps > skipped or not torch.nn.utils.get_total_norm(weights).isfinite():
            raise RunError(
                f"{NOT_FINITE}; go on from the last checkpoint (--resume) with --ds.attn_implementation eager or a "
                "lower --actor.adam.lr"
            )
        return status

    def training_step(self, experience: Experience, *args: Any, **kwargs: Any) -> Any:
        """Train on the rows with an advantage alone, unless another loss term needs every row."""
        # Entropy, KL and the balance of experts are terms of every row beside the policy loss.
        actor = self.args.actor
        kl_loss = self.args.algo.kl.use_loss
        every_row = actor.entropy_coef is not None or kl_loss or actor.aux_loss_coef > 1e-8
        if not every_row:
            rows = experience.advantages.ne(0).any(dim=1)
            # One row is always computed, so that its log-probs are compared with vLLM's: the last,
            # which is the shortest where rows come by length.
            rows[-1] |= ~rows.any()
            self.actor.rows = rows
            self._loss.rows = rows
        status = super().training_step(experience, *args, **kwargs)
        self.actor.rows = None
        self._loss.rows = None
        return status


def longest_row(model: Any) -> int:
    """Return the tokens of a row up to which it may share its prompt; 0 if the model takes no such mask.

    A row must not be longer than the model's sliding window.
    """
    config = model.config
    if hasattr(config, "output_router_logits"):  # experts are balanced by each row's own tokens
        return 0
    takes_any_mask = config._attn_implementation in ("eager", "sdpa")
    if not takes_any_mask or not model._supports_attention_backend or model._is_stateful:
        return 0
    layers = set(getattr(config, "layer_types", None) or ())
    if layers - {"full_attention", "sliding_attention"}:
        return 0
    return getattr(config, "sliding_window", None) or 2**31

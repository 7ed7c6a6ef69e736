"""Replay (RePO) in TRL: earlier rollouts are further rows of a generation batch.

Axes: B rows of this process, R rollouts of all processes, T tokens of a rollout, C of a completion.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from openrlhf_dbb.core.arrays import Floats
from openrlhf_dbb.core.replay import ExtraRow, ReplayMemory, TokenRollout
from openrlhf_dbb.integrations.trl_processes import gathered, on_first
from openrlhf_dbb.integrations.trl_rows import Row, batch_of, cut

Tokens = tuple[Any, Any, Any]
"""Tokens, actions and log-probs of a rollout, as :class:`TokenRollout` has them."""


def with_replay(
    trainer: Any, output: dict[str, Any], lengths_B: Sequence[int], memory: "StepMemory | None"
) -> tuple[dict[str, Any], dict[str, float]]:
    """Return a batch with replayed rows, and what is logged; on all processes.

    Args:
        output: TRL's batch of B rows, with the advantages to train on.
        lengths_B: tokens of each completion.
        memory: of the step, on the first process.

    Raises:
        RuntimeError: the first process gave no memory, or another process has failed.
    """
    add_old_log_probs(trainer, output)
    rows_B = cut(output, lengths_B)
    rollouts_R = gathered(lambda: [tokens_of(row) for row in rows_B])

    def replay() -> tuple[list[ExtraRow], dict[str, float]]:
        if memory is None:
            raise RuntimeError("the first process has no replay memory")
        return memory.replay(rollouts_R)

    extra, metrics = on_first(replay)
    processes = trainer.accelerator.num_processes
    share = extra[trainer.accelerator.process_index :: processes]
    mine = [extra_row(row, rows_B[0]) for row in share]
    # Equally many rows on each process, and in each of the chunks into which TRL splits them.
    most = len(rows_B) + -(-len(extra) // processes)
    chunks = trainer.args.steps_per_generation
    size = -(-most // chunks) * chunks
    rows = rows_B + mine
    rows += [blank_row(rows_B[0]) for _ in range(size - len(rows))]
    return batch_of(trainer, rows), metrics


class StepMemory:
    """What a step of R rollouts to train on replays and remembers, on the first process."""

    def __init__(
        self, replays: ReplayMemory, prompt_ids_R: Sequence[int], rewards_R: Floats, factor: float
    ) -> None:
        """``rewards_R`` are the optimized ones, NaN where missing; ``factor`` of the advantages."""
        self._replays = replays
        self._prompt_ids_R = prompt_ids_R
        self._rewards_R = rewards_R
        self._factor = factor

    def replay(
        self, rollouts_R: Sequence[Tokens | None]
    ) -> tuple[list[ExtraRow], dict[str, float]]:
        """Return the rows to replay and what is logged, and remember the step's own.

        A rollout that is None is not trained on.
        """
        extra = self._replays.extra_rows(self._prompt_ids_R)
        remembered = []
        rows_R = zip(self._prompt_ids_R, self._rewards_R.tolist(), rollouts_R, strict=True)
        for prompt_id, reward, rollout in rows_R:
            if rollout is not None and not np.isnan(reward):
                tokens, actions, log_probs = rollout
                remembered.append(TokenRollout(prompt_id, tokens, actions, log_probs, reward))
        self._replays.remember(remembered)
        scaled = [ExtraRow(row.rollout, row.advantage * self._factor) for row in extra]
        return scaled, self._replays.metrics(len(extra))


def add_old_log_probs(trainer: Any, output: dict[str, Any]) -> None:
    """Add the log-probs of the policy that has generated the batch, if TRL did not need them."""
    if "old_per_token_logps" in output:
        return
    ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
    mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
    width = output["completion_ids"].shape[1]
    size = trainer.args.per_device_train_batch_size
    log_probs_of = trainer._get_per_token_logps_and_entropies
    with torch.no_grad():
        found = log_probs_of(trainer.model, ids, mask, width, batch_size=size)
    output["old_per_token_logps"] = found[0]


def tokens_of(row: Row) -> Tokens | None:
    """Return the tokens of a row of TRL's; None if nothing of it is trained on."""
    generated_C = row["completion_mask"].bool()
    if "tool_mask" in row:
        generated_C = generated_C & row["tool_mask"].bool()
    if not generated_C.any():
        return None
    prompt = row["prompt_ids"]
    actions = torch.cat([torch.zeros(len(prompt) - 1, dtype=torch.bool), generated_C])
    tokens = torch.cat([prompt, row["completion_ids"]]).to(torch.int32)
    log_probs = row["old_per_token_logps"][generated_C].float()
    return tokens.numpy(), actions.numpy(), log_probs.numpy()


def extra_row(extra: ExtraRow, like: Row) -> Row:
    """Return a replayed rollout as a row of TRL's, with the columns of ``like``.

    Raises:
        ValueError: the batch has a column that a replayed rollout has not.
    """
    rollout = extra.rollout
    first = int(np.argmax(rollout.actions)) + 1  # the completion begins with a generated token
    generated_C = torch.tensor(rollout.actions[first - 1 :])
    tokens = torch.tensor(rollout.tokens, dtype=torch.int64)
    log_probs = torch.zeros(len(generated_C))
    log_probs[generated_C] = torch.tensor(rollout.log_probs)
    known = {
        "prompt_ids": tokens[:first],
        "prompt_mask": torch.ones(first, dtype=torch.int64),
        "completion_ids": tokens[first:],
        "completion_mask": torch.ones(len(generated_C), dtype=torch.int64),
        "tool_mask": generated_C.long(),
        "advantages": torch.tensor(extra.advantage, dtype=torch.float32),
        "old_per_token_logps": log_probs,
        "sampling_per_token_logps": log_probs,
        "importance_sampling_ratio": torch.ones(1),  # and at padding
    }
    unknown = sorted(like.keys() - known.keys())
    if unknown:
        names = ", ".join(unknown)
        raise ValueError(f"replay knows no {names} of earlier rollouts; train without replay")
    return {name: known[name].to(values.dtype) for name, values in like.items()}


def blank_row(row: Row) -> Row:
    """Return a row on which nothing is trained."""
    blank = dict(row)
    for name in ("completion_mask", "tool_mask", "advantages"):
        if name in blank:
            blank[name] = torch.zeros_like(blank[name])
    return blank

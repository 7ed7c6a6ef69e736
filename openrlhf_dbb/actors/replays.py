"""Rollouts of earlier visits: trained on again (RePO), or a measure of drift (SPO).

Axes: R rollouts of a step; T tokens of a rollout, prompt and response; A of them generated; M cached and K replayed
rollouts of each of P prompts; B rows of a micro-batch.
"""

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from zipfile import BadZipFile

import numpy as np
import torch
from numpy.typing import NDArray
from openrlhf.trainer.ppo_utils.experience import Experience, remove_padding_in_sequences, split_experience_batch
from torch.nn.utils.rnn import pad_sequence

from openrlhf_dbb import estimators
from openrlhf_dbb.actors.rollout_batch import Prompt, scores
from openrlhf_dbb.core.checks import Floats, Key
from openrlhf_dbb.errors import RunError
from openrlhf_dbb.estimators import FORMS

_ROW = [("prompt", np.int64), ("reward", np.float64), ("tokens", np.int64)]
_TOKEN = [("id", np.int32), ("action", np.bool_), ("log_prob", np.float32)]


class CachedRollout(NamedTuple):
    """A rollout as it is replayed."""

    tokens: NDArray[np.int32]  # (T,), prompt and response
    actions: NDArray[np.bool_]  # (T - 1,), True where the policy generated ``tokens[1:]``
    log_probs: NDArray[np.float32]  # (A,), of the generated tokens, by their own policy
    reward: float  # the optimized one


Chosen = Mapping[Key, Sequence[CachedRollout]]


class RolloutCache:
    """The newest ``size`` rollouts of every prompt, in memory; a generated token takes 9 bytes."""

    def __init__(self, size: int, prompt_ids: Mapping[Key, int]) -> None:
        self._size, self._prompt_ids = size, prompt_ids
        self._kept: dict[int, deque[CachedRollout]] = {}

    @property
    def rollouts(self) -> int:
        """Number of rollouts of all prompts."""
        return sum(len(kept) for kept in self._kept.values())

    def rollouts_of(self, key: Key) -> Sequence[CachedRollout]:
        """Return the rollouts of a prompt, oldest first."""
        return self._kept.get(self._prompt_ids[key], ())

    def remember(self, experiences: Sequence[Experience]) -> None:
        """Add a step's rollouts, except those without a reward."""
        for experience in experiences:
            missing = np.isnan(np.asarray(scores([experience])))
            prompts = map(Prompt, experience.prompts, experience.labels)
            for prompt, rollout, unknown in zip(prompts, cached_rollouts(experience), missing, strict=True):
                if not unknown:
                    self._add(self._prompt_ids[prompt.key], rollout)

    def _add(self, prompt_id: int, rollout: CachedRollout) -> None:
        self._kept.setdefault(prompt_id, deque(maxlen=self._size)).append(rollout)  # may push out the oldest

    def save(self, path: Path) -> None:
        """Write all rollouts to one file. The checkpoint's manifest, written later, has its digest."""
        kept = [(prompt, rollout) for prompt, rollouts in self._kept.items() for rollout in rollouts]
        rows = np.array([(prompt, rollout.reward, len(rollout.tokens)) for prompt, rollout in kept], dtype=_ROW)
        tokens = np.zeros(rows["tokens"].sum(), dtype=_TOKEN)
        for (_, rollout), own in zip(kept, np.split(tokens, rows["tokens"].cumsum()), strict=False):
            own["id"], own["action"][1:] = rollout.tokens, rollout.actions
            own["log_prob"][1:][rollout.actions] = rollout.log_probs
        with path.open("wb") as file:
            np.savez(file, rows=rows, tokens=tokens)

    def load(self, path: Path) -> None:
        """Add the saved rollouts, bit for bit. Raise RunError if :meth:`save` has not written the file."""
        try:
            with np.load(path) as file:  # refuses pickles, which can run code
                rows, tokens = file["rows"], file["tokens"]
            for row, own in zip(rows, np.split(tokens, rows["tokens"].cumsum()), strict=False):
                actions = own["action"][1:].copy()
                rollout = own["id"].copy(), actions, own["log_prob"][1:][actions], float(row["reward"])
                self._add(int(row["prompt"]), CachedRollout(*rollout))
        except (OSError, ValueError, LookupError, BadZipFile) as error:
            raise RunError(
                f"{path} cannot be read: {error}; a pickle of an earlier release is not loaded, since it can run code: "
                "start a new run, with --warm_start RUN for its posteriors"
            ) from error


class Replays(RolloutCache):
    """Earlier rollouts of each prompt; some of them are trained on again when the prompt comes back.

    A step replays from the cache as it was before the step. Replayed rows keep the log-probs of the policy that
    generated them.

    Source: RePO (Li et al. 2025, arXiv 2506.09340), with the settings of its published code.
    """

    def __init__(self, args: SimpleNamespace, prompt_ids: Mapping[Key, int]) -> None:
        super().__init__(args.replay.cache, prompt_ids)
        self._samples, self._form = args.replay.samples, args.algo.advantage.estimator

    def choose(self, prompts: Sequence[Key]) -> dict[Key, list[CachedRollout]]:
        """Return the rollouts to replay, for each prompt whose cache is full."""
        chosen = {}
        for key in dict.fromkeys(prompts):
            cached = self.rollouts_of(key)
            if len(cached) == self._size:
                places = highest(np.array([rollout.reward for rollout in cached]), self._samples)
                chosen[key] = [cached[place] for place in places]
        return chosen

    def rows(self, chosen: Chosen, like: Experience) -> list[Experience]:
        """Return the replayed rollouts as rows for the actor's buffer, with the fields of ``like``."""
        if not chosen:
            return []
        rewards_P_K = np.array([[rollout.reward for rollout in rollouts] for rollouts in chosen.values()])
        advantages_P_K = replay_advantages(rewards_P_K, self._form)
        return [
            replay_row(rollout, like, float(advantage))
            for rollouts, advantages_K in zip(chosen.values(), advantages_P_K, strict=True)
            for rollout, advantage in zip(rollouts, advantages_K, strict=True)
        ]

    def metrics(self, replayed: int, experiences: Sequence[Experience]) -> dict[str, float]:
        logged = {"replay/replayed": float(replayed), "replay/cached": float(self.rollouts)}
        if not replayed:
            return logged
        # The actor's means include replayed rows; these replace them by the means of the step's own rows.
        columns = {name: [e.info[name] for e in experiences] for name in experiences[0].info}
        for name in ("response_length", "total_length", "truncated"):
            columns[name] = [getattr(experience, name) for experience in experiences]
        return logged | {name: float(torch.cat(values).float().mean()) for name, values in columns.items()}


def highest(rewards_M: Floats, count: int) -> NDArray[np.int64]:
    """Return the positions of the ``count`` highest rewards, ascending; of equal rewards the oldest."""
    return np.sort(np.argsort(-rewards_M, kind="stable")[:count])


def replay_advantages(rewards_P_K: Floats, form: str) -> Floats:
    """Return the advantages of replayed rollouts by GRPO's mean and deviation of their own prompt's rewards, (P, K).

    Exactly 0 where all rewards of a prompt are the same. RePO's code adds 1e-4 to the deviation; here nothing is added.
    """
    point, advantage = estimators.build("point"), FORMS.build(form)
    _, estimate = point.observe({}, rewards_P_K, leave_one_out=advantage.leave_one_out)
    differ = estimate.variance[:, None] > 0
    return np.where(differ, advantage.advantages(rewards_P_K, estimate), 0.0)


class PolicyDrift(RolloutCache):
    """Measures how far the policy has moved, by the newest rollout of each prompt.

    The drift is the mean of ``|log-prob now - log-prob then|`` over the rollout's generated tokens, in nats a token:
    "now" is before this step's update, "then" was before the update of the prompt's last visit.

    Source: SPO (Xu and Ding 2025, arXiv 2509.13232) and its public code, which takes both log-probs after the update.
    """

    def __init__(self, prompt_ids: Mapping[Key, int]) -> None:
        super().__init__(1, prompt_ids)

    def measure(
        self,
        prompts: Sequence[Key],
        verified: Sequence[bool],
        log_probs_of: Callable[[Sequence[CachedRollout]], Sequence[NDArray[np.float32]]],
    ) -> Floats:
        """Return the drift (R,) of the prompt of each of a step's R rollouts; 0 on a first visit.

        A prompt without a verified rollout has no visit. ``log_probs_of`` returns the present policy's log-probs.
        """
        visited = dict.fromkeys(key for key, seen in zip(prompts, verified, strict=True) if seen)
        past = {key: kept[0] for key in visited if (kept := self.rollouts_of(key))}
        moved = dict.fromkeys(prompts, 0.0)
        for (key, rollout), now in zip(past.items(), log_probs_of(list(past.values())) if past else (), strict=True):
            moved[key] = float(np.abs(now.astype(np.float64) - rollout.log_probs).sum()) / max(len(now), 1)
            # A filtered group has no log-probs, and is a visit all the same: the next drift counts from here.
            self._add(self._prompt_ids[key], rollout._replace(log_probs=now))
        return np.array([moved[key] for key in prompts])


def padded(rollouts: Sequence[CachedRollout]) -> dict[str, torch.Tensor]:
    """Return rollouts as one batch (B, T) for the policy's forward pass."""
    tokens = [torch.tensor(rollout.tokens, dtype=torch.long) for rollout in rollouts]
    return {
        "sequences": pad_sequence(tokens, batch_first=True),
        "action_mask": pad_sequence([torch.tensor(rollout.actions) for rollout in rollouts], batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in tokens], batch_first=True),
    }


def cached_rollouts(experience: Experience) -> list[CachedRollout]:
    """Return all rollouts of a batch without their padding, in its order."""
    rows = split_experience_batch(dataclasses.replace(experience))  # a shallow copy, since splitting removes the index
    # Copies, since a view would keep the whole padded batch in memory.
    return [
        CachedRollout(
            tokens=row.sequences.numpy().astype(np.int32),
            actions=row.action_mask.numpy().astype(np.bool_),
            log_probs=row.action_log_probs[row.action_mask.bool()].float().numpy(),
            reward=row.rewards.item(),
        )
        for row in remove_padding_in_sequences(rows)
    ]


def replay_row(rollout: CachedRollout, like: Experience, advantage: float) -> Experience:
    """Return one row for OpenRLHF's replay buffer, as OpenRLHF would have made it from a fresh rollout.

    OpenRLHF batches rows by the fields and info keys of the first one, so the row gets those of ``like``. In ``info``
    "reward" and "score" are the reward, all else is 0. There is no KL penalty.
    """
    sequences = torch.tensor(rollout.tokens)
    actions = torch.tensor(rollout.actions)
    log_probs = torch.zeros(len(actions))
    log_probs[actions] = torch.tensor(rollout.log_probs)
    generated = actions.nonzero().flatten()
    # OpenRLHF sums rewards from the end, and the only one is at the last action: prompt tokens get it, too.
    advantages = advantage * (actions.flip(0).cumsum(0).flip(0) > 0)
    tensors = {  # of shapes (T,), (T - 1,) and ()
        "sequences": sequences,
        "attention_mask": torch.ones_like(sequences),
        "action_mask": actions,
        "action_log_probs": log_probs,
        "advantages": advantages,
        "returns": advantages.clone(),
        "rewards": torch.tensor(rollout.reward),
        "scores": torch.tensor(rollout.reward),
        "response_length": generated[-1] - generated[0] + 1 if len(generated) else torch.tensor(0),
        "truncated": torch.tensor(False),
        "total_length": torch.tensor(len(sequences)),
    }
    present = {name: getattr(like, name) for name in tensors if getattr(like, name) is not None}
    rewarded = ("reward", "score")
    return Experience(
        **{name: tensors[name].to(values.dtype) for name, values in present.items()},
        info={key: torch.full_like(values[0], rollout.reward * (key in rewarded)) for key, values in like.info.items()},
    )

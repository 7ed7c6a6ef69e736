"""Rollout batches: prompts are drawn, vLLM generates, the rollout strategy judges, until a batch is full."""

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import ray
import torch
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator

from openrlhf_dbb import chosen
from openrlhf_dbb.core.step import Floats, Key
from openrlhf_dbb.core.strategies import Decision, Drawn, Predictive, Sampler, varies
from openrlhf_dbb.errors import RunError
from openrlhf_dbb.evaluation.engines import Finished, Request

_DEAD_BATCHES = 3  # in a row without any score, before the run is given up
PROMPTS_A_CALL = 8  # a call of Ray takes as long as a short prompt

_ENDED: Iterator[Any] = iter(())  # in place of the data loader's, if the pass was over before the checkpoint


class Prompt(NamedTuple):
    text: str
    label: Any
    image: Any = None

    @property
    def key(self) -> Key:
        """Text and label. The store keeps one posterior for all rows that share both."""
        return self.text, str(self.label)


@dataclass(frozen=True, eq=False)  # tensors do not compare
class Group:
    """A prompt that was drawn, and its rollouts."""

    prompt: Prompt
    prompt_id: int
    drawn: Drawn | None = None  # how the strategy chose the prompt; None if it does not choose
    version: int | None = None  # training steps that the engines' policy had seen; None: the policy of the step
    rollouts: tuple[Experience, ...] = ()  # the engines' answers; none before they have answered
    read: tuple[str | None, ...] = ()  # what the verifier read in each rollout; empty: it does not tell


class Snapshot(NamedTuple):
    """The generation right after a batch, for a checkpoint to continue from."""

    state: dict[str, Any]
    place: dict[str, Any]  # in the data, as a data loader tells it
    ends_pass: bool  # a resume begins with the next pass over the data
    metrics: dict[str, float]  # the strategy's, to be logged after the step
    generated: int  # training rollouts so far, without those that a resume would ask for again


@dataclass(frozen=True, eq=False)
class RolloutBatch:
    """The rollouts of one step. The actor trains on some groups, the estimator observes all."""

    trained: tuple[Group, ...] = ()
    filtered: tuple[Group, ...] = ()  # observed, and not trained on
    skipped: int = 0  # prompts that were drawn, and nothing was generated for them
    snapshot: Snapshot | None = None  # None of an empty batch

    def __len__(self) -> int:
        """Return the number of rollouts to train on. OpenRLHF's loop asks for it."""
        return len(rollouts_of(self.trained))

    def groups_of_each(self, places: Iterable[int]) -> list[tuple[Group, str | None]]:
        """Return the group of each rollout (R,), and what the verifier read in it.

        First of the rollouts to train on, at these places, then of the filtered ones.
        """
        trained, filtered = (
            [(group, read) for group in groups for read in group.read or [None] * len(group.rollouts)]
            for groups in (self.trained, self.filtered)
        )
        return [trained[place] for place in places] + filtered


def rollouts_of(groups: Iterable[Group]) -> list[Experience]:
    return [rollout for group in groups for rollout in group.rollouts]


def scores(rollouts: Sequence[Experience]) -> Floats | None:
    """Return each rollout's score (R,), else its reward; NaN where missing. None if a reward model gives them later."""
    values = [rollout.rewards if rollout.scores is None else rollout.scores for rollout in rollouts]
    if not values:
        return np.array([])
    return None if any(value is None for value in values) else torch.cat([each.double() for each in values]).numpy()


def one_update(args: SimpleNamespace) -> bool:
    """Return whether a step is one optimizer update, and nothing else needs old log-probs."""
    one = args.train.batch_size == chosen.rollouts_of_a_step(args) and args.train.max_epochs == 1
    needed = args.algo.kl.init_coef > 0 or args.critic.model_name_or_path
    return bool(one and not needed and args.algo.advantage.is_correction_level == "off")


class BudgetSpent(Exception):
    """``--train.max_rollouts`` does not allow another batch: the training is over."""


class RolloutGenerator(SamplesGenerator):
    """Fills whole rollout batches, as its strategy decides.

    OpenRLHF trains on the short batch at the end of a pass, which may not fill an optimizer step. Here its groups wait
    until the next pass completes the batch. OpenRLHF's trainer takes the generator for its data loader, too.
    """

    def __init__(
        self,
        *args: Any,
        sampler: Sampler,
        judges: bool,  # the sampler may reject a group
        predictive: Callable[[], Predictive] | None = None,  # given if the sampler draws the prompts
        prompt_ids: Mapping[Key, int],
        max_rollouts: int | None = None,
    ) -> None:
        super().__init__(*args)
        for engine in self.vllm_engines:
            engine.use_tokenizer.remote(self.tokenizer)
        self.sampler, self._prompt_ids = sampler, prompt_ids
        # A strategy that judges hears of every group at once, since it may replace it.
        self._prompts_a_call = 1 if judges else PROMPTS_A_CALL
        self.generated = 0  # training rollouts so far
        self._unscored = 0  # groups in a row without any score
        self._max_rollouts = max_rollouts
        self.version: Any = None  # in async training, the steps that the engines' policy has seen
        size = self.args.rollout.batch_size
        self._at_a_time = max(size, self.args.rollout.vllm_generate_batch_size or 0)
        # One update: then nobody else takes the log-probs that are stored. Groups that wait come with those of others.
        self._takes_log_probs = one_update(self.args) or self._at_a_time > size
        self._takes_log_probs |= self.args.algo.advantage.is_correction_level != "off"
        self._takes_log_probs |= self.args.train.vllm_log_probs
        self._compares = True  # the first batch comes with vLLM's log-probs; the training pass compares them
        self._predictive, self._drawn = predictive, 0  # prompts drawn in this pass
        self._prompts_iter: Iterator[Group] | None = None  # None: the next call starts a new pass over the data
        # Drawn before a checkpoint, to be asked for again after a resume.
        self._again: deque[Group] = deque()
        # Of the batch that is being filled: groups to train on, groups to observe, and prompts left out.
        self._kept: list[Group] = []
        self._filtered: list[Group] = []
        self._skipped = 0

    @torch.no_grad()
    def generate_samples(self, **generate_kwargs: Any) -> tuple[RolloutBatch, float | None, int, bool]:
        """Return one whole rollout batch, or an empty one if the pass over the data ends first.

        With it, as OpenRLHF's loop expects: the share of groups kept, in percent; the number of prompts generated for;
        whether the pass is over. Raise BudgetSpent, or RunError if the strategy gives up.
        """
        size, consumed = self.args.rollout.batch_size, 0
        log_probs = self._takes_log_probs or self._compares
        if len(self._kept) < size:
            if self._prompts_iter is None:
                self._prompts_iter = self._pass()
            with self._engines_awake():
                while len(self._kept) < size:
                    if self._prompts_iter is None:
                        return RolloutBatch(), None, consumed, True
                    if self._groups_left() < size - len(self._kept):
                        raise BudgetSpent
                    wanted = self.sampler.round_size(self._at_a_time - len(self._kept))
                    drawn = self._draw(int(min(wanted, self._groups_left())))
                    consumed += self._round(drawn, log_probs=log_probs, **generate_kwargs)
        taken, left = self._kept[:size], self._kept[size:]
        for group in taken:
            scores_N = scores(group.rollouts)
            if group.drawn is not None and scores_N is not None and not np.isnan(scores_N).all():
                self.sampler.observe(group.drawn, varies(scores_N))
        self.sampler.end_step()
        # Surplus groups wait if more is generated at a time, else they are set aside.
        self._kept, surplus = (left, []) if self._at_a_time > size else ([], left)
        filtered, skipped = (*self._filtered, *surplus), self._skipped
        self._filtered, self._skipped, self._compares = [], 0, False
        batch = RolloutBatch(tuple(taken), filtered, skipped, self.snapshot())
        over = self._prompts_iter is None and len(self._kept) < size
        return batch, 100 * len(taken) / (len(taken) + len(filtered)), consumed, over

    def _pass(self) -> Iterator[Group]:
        """Yield the prompts of a pass over the data. A strategy that draws draws as many as there are rows."""
        if self._predictive is None:
            for _, texts, labels, images in self.prompts_dataloader:  # lists of one
                yield from (self._group(prompt) for prompt in zip(texts, labels, images, strict=True))
            return
        data = self.prompts_dataloader.dataset
        prompts = list(map(Prompt, data.prompts, data.labels, data.images))
        by_id = {self._prompt_ids[prompt.key]: prompt for prompt in reversed(prompts)}
        while self._drawn < len(prompts):
            self._drawn, drawn = self._drawn + 1, self.sampler.next_prompt(self._predictive)
            yield self._group(by_id[drawn.prompt_id], drawn)
        self._drawn = 0

    def _group(self, prompt: Sequence[Any], drawn: Drawn | None = None) -> Group:
        row = Prompt(*prompt)
        return Group(row, self._prompt_ids[row.key], drawn)

    def _draw(self, count: int) -> list[Group]:
        """Return groups of the next prompts that are not skipped; fewer at the end of the pass."""
        groups: list[Group] = []
        while len(groups) < count and self._prompts_iter is not None:
            if self._again:
                groups.append(self._again.popleft())
                continue
            group = next(self._prompts_iter, None)
            if group is None:
                # Now, not at the next draw: a finished data loader must not end up in a checkpoint.
                if self._prompts_iter is not _ENDED:
                    self.sampler.end_pass()
                self._prompts_iter = None
            elif self.sampler.skips(group.prompt_id):
                self._skipped += 1
            else:
                groups.append(group)
        return groups

    def _round(self, drawn: list[Group], **generate_kwargs: Any) -> int:
        """Generate groups and the replacements of rejected ones; return the number of both.

        Kept groups are in the order in which they were sent: the order in which they finish depends on their lengths.
        """
        sent: list[Group] = []
        kept: dict[int, Group] = {}  # by the place in ``sent``
        pending = self._send(drawn, sent, **generate_kwargs)
        while pending:
            [ref], _ = ray.wait(list(pending), num_returns=1)
            for place, answers in zip(pending.pop(ref), ray.get(ref), strict=True):
                rollouts = tuple(self._rollout(each, **generate_kwargs) for each in answers)
                group = replace(sent[place], rollouts=rollouts, read=tuple(each.get("read") for each in answers))
                scores_N, decision = scores(group.rollouts), Decision.TRAIN
                if scores_N is not None:
                    self._check_verifier(scores_N)
                    decision = self.sampler.judge(group.prompt_id, scores_N)
                if decision is Decision.TRAIN:
                    kept[place] = group
                    continue
                self._filtered.append(group)
                replaced = decision is Decision.REPLACE
                if replaced and self._prompts_iter is not None and self._groups_left() >= 1:
                    pending |= self._send(self._draw(1), sent, **generate_kwargs)
        self._kept += [kept[place] for place in sorted(kept)]
        return len(sent)

    def _check_verifier(self, scores_N: Floats) -> None:
        """Raise RunError if no group of several batches in a row has a score: the verifier is down."""
        self._unscored = self._unscored + 1 if np.isnan(scores_N).all() else 0
        if self._unscored >= _DEAD_BATCHES * self.args.rollout.batch_size:
            raise RunError(
                f"no rollout of the last {self._unscored} prompts could be verified, which is "
                f"{_DEAD_BATCHES} batches: look at the verifier, then go on with --resume"
            )

    def _send(self, drawn: list[Group], sent: list[Group], **options: Any) -> dict[Any, list[int]]:
        """Ask the engines for groups, which count as generated now; return the calls, each with its places in sent."""
        first = len(sent)
        sent += [replace(group, version=self.version) for group in drawn]
        self.generated += len(drawn) * self.args.rollout.n_samples_per_prompt
        calls = self._ask([group.prompt for group in drawn], self._prompts_a_call, **options)
        return {ref: [first + place for place in places] for ref, places in calls}

    def _rollout(self, response: dict[str, Any], **generate_kwargs: Any) -> Experience:
        rollout = self._process_response_into_experience(response, **generate_kwargs)
        if rollout.scores is not None:
            rollout.info["score"] = rollout.scores.nan_to_num()  # only logged: one missing score must not hide the mean
        return rollout

    def _groups_left(self) -> float:
        if self._max_rollouts is None:
            return float("inf")
        return (self._max_rollouts - self.generated) // self.args.rollout.n_samples_per_prompt

    def drop_stale(self, oldest: int) -> None:
        """Set aside the waiting groups of policies before version ``oldest``."""
        waiting, self._kept = self._kept, []
        for group in waiting:
            (self._filtered if (group.version or 0) < oldest else self._kept).append(group)

    def unused(self) -> int:  # rollouts of a last batch that was not filled
        return len(rollouts_of(self._filtered + self._kept))

    def snapshot(self) -> Snapshot:
        """Return what a checkpoint between two steps holds. A resume asks once more for the groups that wait."""
        over = self._prompts_iter is None
        generated = self.generated - len(self._kept) * self.args.rollout.n_samples_per_prompt
        state = {
            "generated": generated,
            "sampling": self.sampler.state(),
            "again": [(tuple(group.prompt), group.drawn) for group in self._kept],
            "drained": over and bool(self._kept),
        }
        place = {"place": self._drawn}
        if self._predictive is None:  # a finished data loader would serve its whole pass again after a resume
            place = {} if over else self.prompts_dataloader.state_dict()
        return Snapshot(state, place, over and not self._kept, self.sampler.metrics(), generated)

    def load(self, state: dict[str, Any], place: dict[str, Any]) -> None:
        self.generated = state["generated"]
        self.sampler.load(state["sampling"])
        self._again = deque(self._group(*drawn) for drawn in state["again"])
        if state["drained"]:
            self._prompts_iter = _ENDED
        if self._predictive is not None:
            self._drawn = place.get("place", 0)
        elif place:
            self.prompts_dataloader.load_state_dict(place)

    def __len__(self) -> int:
        return len(self.prompts_dataloader)

    def state_dict(self) -> dict[str, Any]:
        return {}  # the place in the data is in each batch's snapshot

    def score_more(self, prompts: Sequence[Prompt], samples: int, **generate_kwargs: Any) -> Floats:
        """Return scores (Q, M) of M further responses to Q prompts; NaN where missing."""
        scores_R = scores(self._sample_groups(prompts, **generate_kwargs | {"n_samples_per_prompt": samples}))
        if scores_R is None:
            raise ValueError("a response to a probe has no score; let the agent return one, or leave out the probes")
        return scores_R.reshape(len(prompts), samples)

    def generate_eval_samples(self, **generate_kwargs: Any) -> list[Experience]:
        """Return samples of all evaluation prompts, side by side, in the order of the data."""
        # OpenRLHF waits for each rollout batch of prompts, and returns prompts in the order in which they finish.
        data = self.eval_dataloader.dataset
        return self._sample_groups(list(map(Prompt, data.prompts, data.labels, data.images)), **generate_kwargs)

    @torch.no_grad()
    def _sample_groups(self, prompts: Sequence[Prompt], **generate_kwargs: Any) -> list[Experience]:
        with self._engines_awake():
            calls = self._ask(prompts, PROMPTS_A_CALL, **generate_kwargs)
            answers = {place: each for ref, places in calls for place, each in zip(places, ray.get(ref), strict=True)}
        return [
            self._process_response_into_experience(answer, **generate_kwargs)
            for place in range(len(prompts))
            for answer in answers[place]
        ]

    def sample(self, requests: Sequence[Request], sampling: dict[str, Any]) -> Iterator[list[Finished]]:
        """Yield responses to prompts of token ids, without rewards, in any order."""
        with self._engines_awake():
            calls = [
                engine.sample.remote([requests[place] for place in places], sampling)
                for engine, places in self._calls(len(requests), sampling["n"])
            ]
            while calls:
                [ref], calls = ray.wait(calls, num_returns=1)
                yield ray.get(ref)

    @contextlib.contextmanager
    def _engines_awake(self) -> Iterator[None]:
        if self.args.vllm.enable_sleep:
            ray.get([engine.wake_up.remote() for engine in self.vllm_engines])
        try:
            yield
        finally:
            if self.args.vllm.enable_sleep:
                ray.get([engine.sleep.remote() for engine in self.vllm_engines])

    def _ask(self, prompts: Sequence[Prompt], most: int, **generate_kwargs: Any) -> list[tuple[Any, list[int]]]:
        samples = generate_kwargs.get("n_samples_per_prompt", self.args.rollout.n_samples_per_prompt)
        sampling = {
            "temperature": generate_kwargs.get("temperature", 1.0),
            "top_p": generate_kwargs.get("top_p", 1.0),
            "max_tokens": generate_kwargs.get("max_new_tokens"),  # None: all that the prompt leaves
            "min_tokens": generate_kwargs.get("min_new_tokens", 1),
            "skip_special_tokens": generate_kwargs.get("skip_special_tokens", False),
            "logprobs": 1 if generate_kwargs.get("log_probs") else None,
        }
        asked = sampling, samples, generate_kwargs.get("max_len", 2048)
        return [
            (engine.generate_groups.remote([tuple(prompts[place]) for place in places], *asked), places)
            for engine, places in self._calls(len(prompts), samples, most)
        ]

    def _calls(self, prompts: int, samples: int, most: int = PROMPTS_A_CALL) -> Iterator[tuple[Any, list[int]]]:
        """Yield the engine and the places of the prompts of each call."""
        # The next prompt goes where least is left to do.
        loads = ray.get([engine.get_num_unfinished_requests.remote() for engine in self.vllm_engines])
        shares: list[list[int]] = [[] for _ in loads]
        for place in range(prompts):
            least = loads.index(min(loads))
            shares[least].append(place)
            loads[least] += samples
        for engine, share in zip(self.vllm_engines, shares, strict=True):
            for start in range(0, len(share), most):
                yield engine, share[start : start + most]

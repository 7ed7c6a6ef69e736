"""Rollout batches: prompts are drawn, vLLM generates, the rollout strategy judges, until a batch is full.

Axes: N rollouts of a group.
"""

from __future__ import annotations

import contextlib
import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
import torch
from openrlhf.trainer.ppo_utils.experience import Experience

from openrlhf_dbb.actors import responses
from openrlhf_dbb.core.step import Key
from openrlhf_dbb.core.strategies import Decision, Drawn, Sampler
from openrlhf_dbb.evaluation.engines import Finished, Request, SamplingSettings

PROMPTS_A_CALL = 8  # of Ray: it costs as much time as a short prompt

Prompt = tuple[str, Any, Any]
"""Text, label, image."""

_ENDED: Iterator[Any] = iter(())
"""In place of a data loader's iterator whose pass was over before the checkpoint."""


@dataclass
class Group:
    """A group that was asked for.

    Attributes:
        prompt: text, label, image.
        samples: N, rollouts to ask for.
        drawn: how the strategy chose the prompt; None if it does not choose.
        version: policy version when it was asked for; None if training waits for generation.
        rollouts: what came back.
        kept: whether it is to be trained on.
    """

    prompt: Prompt
    samples: int
    drawn: Drawn | None = None
    version: int | None = None
    rollouts: list[Experience] = field(default_factory=list)
    kept: bool = False


@dataclass
class PolicyVersions:
    """The number of training steps that the policy has seen, where generation runs ahead of the training.

    Attributes:
        now: at this moment.
        first: when the engines were made.
    """

    now: int
    first: int


class BudgetSpent(Exception):
    """``--train.max_rollouts`` does not allow another batch: the training is over."""


@dataclass
class RolloutBatch:
    """What was generated for one step.

    Attributes:
        trained: rollouts to train on, group by group.
        filtered: rollouts that are not trained on, with what is needed to observe and to read them.
        skipped: how often each prompt was drawn and nothing was generated for it.
    """

    trained: list[Experience] = field(default_factory=list)
    filtered: list[Experience] = field(default_factory=list)
    skipped: Counter[Key] = field(default_factory=Counter)

    def __len__(self) -> int:
        """Rollouts to train on; OpenRLHF's loop asks."""
        return len(self.trained)

    @property
    def all(self) -> list[Experience]:
        """Everything generated, the rollouts to train on first."""
        return [*self.trained, *self.filtered]

    def train(self, groups: Sequence[Group]) -> None:
        """Take groups to train on."""
        self.trained += [rollout for group in groups for rollout in group.rollouts]

    def set_aside(self, groups: Sequence[Group]) -> None:
        """Take groups that are observed, but not trained on."""
        self.filtered += [responses.to_observe(rollout) for group in groups for rollout in group.rollouts]


class RolloutGenerator:
    """Fills whole rollout batches, as its strategy decides; stands in for OpenRLHF's ``SamplesGenerator``.

    OpenRLHF trains on the short batch at the end of an episode. Its rows may not fill an optimizer step: they are then
    lost, or shift every later step. Here its groups wait until the next episode completes the batch, under the same
    policy. Nothing is left over between steps, unless more is generated at a time than a step needs
    (``--rollout.vllm_generate_batch_size``, in async training).

    Args:
        strategy: OpenRLHF's, for its arguments.
        prompts_dataloader, eval_dataloader: of OpenRLHF's prompt data sets.
        tokenizer: sent to the engines.
        vllm_engines: Ray actors, see :class:`openrlhf_dbb.actors.vllm_actor.StrictRolloutActor`.
        max_rollouts: training rollouts that may be generated; None for any number.
        versions: of the policy, in async training.

    Attributes:
        sampler: the strategy at work.
        prompt_ids: each prompt's id, as the strategy knows it.
        generated: training rollouts generated so far.
        watch: called with the number of groups kept so far.
        with_log_probs: whether training rollouts come with vLLM's log-probs, even if the loss does not use them.
    """

    def __init__(
        self,
        strategy: Any,
        prompts_dataloader: Any,
        eval_dataloader: Any,
        tokenizer: Any,
        vllm_engines: Sequence[Any],
        *,
        sampler: Sampler,
        prompt_ids: Mapping[Key, int],
        max_rollouts: int | None = None,
        watch: Callable[[int], None] = lambda kept: None,
        versions: PolicyVersions | None = None,
    ) -> None:
        self.args = strategy.args
        self.prompts_dataloader, self.eval_dataloader = prompts_dataloader, eval_dataloader
        self.tokenizer = tokenizer
        self.vllm_engines = vllm_engines
        self.sampler = sampler
        self.prompt_ids = prompt_ids
        self.generated = 0
        self.watch = watch
        self.with_log_probs = False
        self._max_rollouts = max_rollouts
        self._versions = versions
        self._at_a_time = max(self.args.rollout.batch_size, self.args.rollout.vllm_generate_batch_size or 0)
        self._dataloader_iter: Any = None
        # Drawn before a checkpoint, to be asked for again after a resume.
        self._again: deque[tuple[Any, ...]] = deque()
        # Of the batch that is being filled: groups kept so far, and all else.
        self._kept: list[Group] = []
        self._batch = RolloutBatch()

    @property
    def at_end_of_episode(self) -> bool:
        """True if the next call starts a new pass over the data."""
        return self._dataloader_iter is None

    @torch.no_grad()
    def generate_samples(self, **generate_kwargs: Any) -> tuple[RolloutBatch, float | None, int, bool]:
        """One whole rollout batch, or an empty one if the pass over the data ends first.

        Returns:
            The batch; the share of groups kept, in percent (as OpenRLHF logs it); prompts generated for; whether the
            pass is over.

        Raises:
            BudgetSpent: the budget does not allow the batch to be filled.
            openrlhf_dbb.core.strategies.SamplingError: the strategy gives up.
        """
        generate_kwargs = {"with_log_probs": self.with_log_probs, **generate_kwargs}
        batch, consumed = self.args.rollout.batch_size, 0
        if len(self._kept) < batch:
            if self._dataloader_iter is None:
                self._dataloader_iter = iter(self.prompts_dataloader)
            with self._engines_awake():
                while len(self._kept) < batch:
                    if self._dataloader_iter is None:
                        return RolloutBatch(), None, consumed, True
                    if self._groups_left() < batch - len(self._kept):
                        raise BudgetSpent
                    asked = self.sampler.round_size(self._at_a_time - len(self._kept))
                    drawn = self._draw(int(min(asked, self._groups_left())))
                    consumed += self._round(drawn, **generate_kwargs) if drawn else 0
                    self.sampler.end_round()
        self.sampler.end_step()
        full, self._batch = self._batch, RolloutBatch()
        taken, left = self._kept[:batch], self._kept[batch:]
        self._kept = left if self._at_a_time > batch else []
        full.train(taken)
        if not (self._corrects or generate_kwargs["with_log_probs"]):
            for rollout in full.trained:  # some waited since a batch that came with them
                rollout.rollout_log_probs = None
        if not self._kept:
            full.set_aside(left)
        over = self.at_end_of_episode and len(self._kept) < batch
        return full, 100 * len(full) / len(full.all), consumed, over

    def drop_stale(self, oldest: int) -> None:
        """Groups that wait, and that a policy older than this version generated, are not to be trained on."""

        def is_stale(group: Group) -> bool:
            return group.version is not None and group.version < oldest

        self._batch.set_aside([group for group in self._kept if is_stale(group)])
        self._kept = [group for group in self._kept if not is_stale(group)]

    def unused(self) -> tuple[int, int]:
        """Rollouts of a last batch that was not filled, and their tokens: no step has used them."""
        left = [*self._batch.filtered, *(rollout for group in self._kept for rollout in group.rollouts)]
        return len(left), sum(int(rollout.response_length.item()) for rollout in left)

    def state(self) -> dict[str, Any]:
        """What a checkpoint has to hold; taken between steps. Groups that wait for a step are asked for again."""
        return {
            "generated": self.generated - sum(group.samples for group in self._kept),
            "sampling": self.sampler.state(),
            "again": [(group.prompt, group.samples, group.drawn) for group in self._kept],
            "drained": self.at_end_of_episode and bool(self._kept),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state`."""
        self.generated = state["generated"]
        self.sampler.load(state["sampling"])
        self._again = deque(state.get("again", ()))
        if state.get("drained"):
            self._dataloader_iter = _ENDED

    def position(self, episode: int) -> dict[str, Any]:
        """Where in the data a checkpoint continues, as entries of OpenRLHF's states; taken between steps.

        Args:
            episode: the pass over the data.
        """
        if self.at_end_of_episode:  # a finished data loader would serve its whole episode again after a resume
            return {"episode": episode + (not self._kept), "data_loader_state_dict": {}}
        return {"episode": episode, "data_loader_state_dict": self.prompts_dataloader.state_dict()}

    def metrics(self) -> dict[str, float]:
        """Numbers to be logged after a step, by name."""
        return self.sampler.metrics()

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """While the policy's weights are sent to the engines."""
        yield

    def begin_at(self, episode: int, step: int) -> None:
        """Where the training starts: pass over the data, and training steps behind it."""

    def close(self) -> None:
        """No further batch is wanted."""

    def score_more(self, rollouts: Sequence[Experience], samples: int, **generate_kwargs: Any) -> list[list[float]]:
        """Scores of further responses to the prompts of some rollouts, under the current weights.

        Args:
            rollouts: one of each prompt.
            samples: responses to each prompt; not counted as training rollouts.
            generate_kwargs: as for :meth:`generate_samples`.

        Returns:
            ``samples`` scores for each of ``rollouts``, NaN where missing.

        Raises:
            RewardError: as in training, and for a response without any score.
        """
        prompts = [(each.prompts[0], each.labels[0], each.images[0] if each.images else None) for each in rollouts]
        with self._engines_awake():
            answers = self._answers(prompts, **generate_kwargs | {"n_samples_per_prompt": samples})
            return [[responses.score(response) for response in group] for group in answers]

    @torch.no_grad()
    def generate_eval_samples(self, **generate_kwargs: Any) -> list[Experience]:
        """Samples of all evaluation prompts, side by side for each prompt, in the order of the data.

        Not counted as training rollouts. OpenRLHF waits for each rollout batch of prompts before it sends the next,
        and returns prompts in the order in which they finish.

        Raises:
            RewardError: as in training.
        """
        data = self.eval_dataloader.dataset
        prompts = list(zip(data.prompts, data.labels, data.images, strict=True))
        with self._engines_awake():
            answers = self._answers(prompts, **generate_kwargs)
        return [rollout for group in answers for rollout in responses.experiences(group, **generate_kwargs)]

    def sample(self, requests: Sequence[Request], sampling: SamplingSettings) -> Iterator[list[Finished]]:
        """Responses to prompts of token ids, without rewards, in any order; not counted as training rollouts."""
        with self._engines_awake():
            calls = []
            shares = self._shares([sampling.n] * len(requests))
            for engine, share in zip(self.vllm_engines, shares, strict=True):
                for start in range(0, len(share), PROMPTS_A_CALL):
                    asked = [requests[place] for place in share[start : start + PROMPTS_A_CALL]]
                    calls.append(engine.sample.remote(asked, sampling))
            while calls:
                ready, calls = ray.wait(calls, num_returns=1, timeout=1.0)
                yield [each for call in ready for each in ray.get(call)]

    @contextlib.contextmanager
    def _engines_awake(self) -> Iterator[None]:
        if self.args.vllm.enable_sleep:
            ray.get([engine.wake_up.remote() for engine in self.vllm_engines])
        try:
            yield
        finally:
            if self.args.vllm.enable_sleep:
                ray.get([engine.sleep.remote() for engine in self.vllm_engines])

    def _groups_left(self) -> float:
        """Groups the budget still allows."""
        if self._max_rollouts is None:
            return float("inf")
        return (self._max_rollouts - self.generated) // self.args.rollout.n_samples_per_prompt

    def _draw(self, count: int) -> list[Group]:
        """Groups to be of the next ``count`` prompts that are not skipped; fewer at the end of the pass."""
        drawn: list[Group] = []
        whole = self.args.rollout.n_samples_per_prompt
        while len(drawn) < count:
            if self._again:
                drawn.append(Group(*self._again.popleft()))
                continue
            try:
                sources, texts, labels, images = next(self._dataloader_iter)
            except StopIteration:
                # Now, not at the next draw: a finished data loader must not end up in a checkpoint.
                ended_before = self._dataloader_iter is _ENDED
                self._dataloader_iter = None
                if not ended_before:
                    self.sampler.end_pass()
                break
            for source, *prompt in zip(sources, texts, labels, images, strict=True):  # one, in OpenRLHF's data loader
                key = (prompt[0], str(prompt[1]))
                if isinstance(source, Drawn):
                    drawn.append(Group(tuple(prompt), source.rollouts, source))
                elif self._rollouts(self.prompt_ids[key]):
                    drawn.append(Group(tuple(prompt), whole))
                else:
                    self._batch.skipped[key] += 1
        return drawn

    def _round(self, drawn: list[Group], **generate_kwargs: Any) -> int:
        """Generate for prompts and for the replacements of rejected ones; the number of both.

        Kept groups are in the order in which they were sent: which ones finish first depends on their lengths.
        """
        pending: dict[Any, list[Group]] = {}
        sent: list[Group] = []
        self._send(drawn, sent, pending, **generate_kwargs)
        while pending:
            ready, _ = ray.wait(list(pending), num_returns=1, timeout=10.0)
            for ref in ready:
                for group, answers in zip(pending.pop(ref), ray.get(ref), strict=True):
                    group.rollouts = responses.experiences(
                        answers, first_version=self._first_version, drawn=group.drawn, **generate_kwargs
                    )
                    decision = self._judge(group.rollouts)
                    group.kept = decision is Decision.TRAIN
                    if group.kept:
                        self.watch(len(self._kept) + sum(each.kept for each in sent))
                        continue
                    self._batch.set_aside([group])
                    replaced = decision is Decision.REPLACE
                    if replaced and self._dataloader_iter is not None and self._groups_left() >= 1:
                        self._send(self._draw(1), sent, pending, **generate_kwargs)
        self._kept += [group for group in sent if group.kept]
        return len(sent)

    def _send(
        self, drawn: list[Group], sent: list[Group], pending: dict[Any, list[Group]], **generate_kwargs: Any
    ) -> None:
        """Ask the engines for groups. From here on they count as generated."""
        if self._versions is not None:
            for group in drawn:
                group.version = self._versions.now
        # A strategy that judges wants to know of each group at once: it may replace it.
        judges = type(self.sampler).judge is not Sampler.judge
        samples = [group.samples for group in drawn]
        calls = self._ask(
            [group.prompt for group in drawn], 1 if judges else PROMPTS_A_CALL, samples, **generate_kwargs
        )
        pending.update({ref: [drawn[place] for place in places] for ref, places in calls})
        sent += drawn
        self.generated += sum(samples)

    @property
    def _corrects(self) -> bool:
        return bool(self.args.algo.advantage.is_correction_level != "off")

    @property
    def _first_version(self) -> int | None:
        return None if self._versions is None else self._versions.first

    def _answers(self, prompts: Sequence[Prompt], **generate_kwargs: Any) -> list[list[dict[str, Any]]]:
        """The responses to each of ``prompts``, in their order."""
        found: dict[int, list[dict[str, Any]]] = {}
        samples = [generate_kwargs.get("n_samples_per_prompt", self.args.rollout.n_samples_per_prompt)] * len(prompts)
        for ref, places in self._ask(prompts, PROMPTS_A_CALL, samples, **generate_kwargs):
            found.update(zip(places, ray.get(ref), strict=True))
        return [found[place] for place in range(len(prompts))]

    def _ask(
        self, prompts: Sequence[Prompt], most: int, samples: Sequence[int], **generate_kwargs: Any
    ) -> list[tuple[Any, list[int]]]:
        """Ask the engines for so many responses to each prompt, at most ``most`` prompts a call.

        Returns:
            Each call's reference, and the places of its prompts.
        """
        request = {
            "sampling": {
                "temperature": generate_kwargs.get("temperature", 1.0),
                "top_p": generate_kwargs.get("top_p", 1.0),
                "top_k": generate_kwargs.get("top_k", -1),
                "max_tokens": generate_kwargs.get("max_new_tokens"),  # None: as the prompt leaves
                "min_tokens": generate_kwargs.get("min_new_tokens", 1),
                "skip_special_tokens": generate_kwargs.get("skip_special_tokens", False),
                "logprobs": 1 if self._corrects or generate_kwargs.get("with_log_probs") else None,
            },
            "max_length": generate_kwargs.get("max_len", 2048),
            "hf_tokenizer": self.tokenizer,
        }
        calls = []
        for engine, share in zip(self.vllm_engines, self._shares(samples), strict=True):
            for start in range(0, len(share), most):
                places = share[start : start + most]
                asked, counts = [prompts[place] for place in places], [samples[place] for place in places]
                calls.append((engine.generate_groups.remote(asked, num_samples=counts, **request), places))
        return calls

    def _shares(self, samples: Sequence[int]) -> list[list[int]]:
        """Places of the prompts that each engine gets: the next one goes where least is left to do."""
        if len(self.vllm_engines) == 1:
            return [list(range(len(samples)))]
        unfinished = ray.get([engine.get_num_unfinished_requests.remote() for engine in self.vllm_engines])
        loads = [(count, number) for number, count in enumerate(unfinished)]
        heapq.heapify(loads)
        shares: list[list[int]] = [[] for _ in loads]
        for place, count in enumerate(samples):
            load, number = loads[0]
            shares[number].append(place)
            heapq.heapreplace(loads, (load + count, number))
        return shares

    def _rollouts(self, prompt_id: int) -> int:
        rollouts, whole = self.sampler.rollouts(prompt_id), self.args.rollout.n_samples_per_prompt
        if rollouts not in (0, whole):
            raise ValueError(f"the rollout strategy asks for {rollouts} rollouts of a prompt; only 0 or {whole} work")
        return rollouts

    def _judge(self, group: list[Experience]) -> Decision:
        scores_N = responses.scores(group)
        prompt_id = self.prompt_ids[group[0].prompts[0], str(group[0].labels[0])]
        return Decision.TRAIN if scores_N is None else self.sampler.judge(prompt_id, scores_N)

"""Rollout batches: prompts are drawn, vLLM generates, the rollout strategy judges, until a batch is full.

Axes: N rollouts of a group.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ray
import torch
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator

from openrlhf_dbb.actors.rollout_batch import (
    INCLUSION,
    VERSION,
    WEIGHT,
    Group,
    Prompt,
    RolloutBatch,
    one_update,
    scores,
)
from openrlhf_dbb.core.step import Floats, Key
from openrlhf_dbb.core.strategies import Decision, Drawn, Predictive, Sampler, varies
from openrlhf_dbb.evaluation.engines import Finished, Request

PROMPTS_A_CALL = 8  # a call of Ray takes as long as a short prompt

_ENDED: Iterator[Any] = iter(())
"""Stands for the data loader's iterator if the pass was over before the checkpoint."""


class BudgetSpent(Exception):
    """``--train.max_rollouts`` does not allow another batch: the training is over."""


class DrawnPrompts:
    """Yields the prompts that a strategy draws: draw, text, label, images; each a list of one.

    It takes the place of OpenRLHF's data loader. A pass ends when as many prompts were drawn as the data has rows.
    """

    def __init__(
        self, data: Any, sampler: Sampler, prompt_ids: Mapping[Key, int], predictive: Callable[[], Predictive]
    ) -> None:
        self.dataset, self._sampler, self._predictive = data, sampler, predictive
        self._rows: dict[int, int] = {}
        for row, (prompt, label) in enumerate(zip(data.prompts, data.labels, strict=True)):
            self._rows.setdefault(prompt_ids[prompt, str(label)], row)  # equal rows share a posterior
        self._place = 0

    def __len__(self) -> int:
        return len(self.dataset.prompts)

    def __iter__(self) -> Iterator[tuple[list[Drawn], list[str], list[Any], list[Any]]]:
        while self._place < len(self):
            drawn = self._sampler.next_prompt(self._predictive)
            self._place += 1
            data, row = self.dataset, self._rows[drawn.prompt_id]
            yield [drawn], [data.prompts[row]], [data.labels[row]], [data.images[row]]
        self._place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self._place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._place = state["place"]


class RolloutGenerator(SamplesGenerator):
    """Fills whole rollout batches, as its strategy decides.

    OpenRLHF trains on the short batch at the end of a pass, which may not fill an optimizer step. Here its groups wait
    until the next pass completes the batch. Nothing else is left over between steps, unless more is generated at a time
    than a step needs (``--rollout.vllm_generate_batch_size``).
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
        version: int | None = None,
    ) -> None:
        super().__init__(strategy, prompts_dataloader, eval_dataloader, tokenizer, vllm_engines)
        for engine in vllm_engines:
            engine.use_tokenizer.remote(tokenizer)
        self.sampler, self.prompt_ids = sampler, prompt_ids
        self.generated = 0  # training rollouts so far
        self._max_rollouts = max_rollouts
        self.version = version  # training steps that the engines' policy has seen; in async training the caller's
        # One update: then nobody else takes the log-probs that are stored.
        self._takes_log_probs = self.args.algo.advantage.is_correction_level != "off" or one_update(self.args)
        self._compares = True  # the first batch comes with vLLM's log-probs, which are compared with the policy's
        self._at_a_time = max(self.args.rollout.batch_size, self.args.rollout.vllm_generate_batch_size or 0)
        self._prompts_iter: Any = None  # None: the next call starts a new pass over the data
        # Drawn before a checkpoint, to be asked for again after a resume.
        self._again: deque[tuple[Any, ...]] = deque()
        # Of the batch that is being filled: groups to train on, and all else.
        self._kept: list[Group] = []
        self._batch = RolloutBatch()

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
                self._prompts_iter = iter(self.prompts_dataloader)
            with self._engines_awake():
                while len(self._kept) < size:
                    if self._prompts_iter is None:
                        return RolloutBatch(), None, consumed, True
                    if self._groups_left() < size - len(self._kept):
                        raise BudgetSpent
                    wanted = self.sampler.round_size(self._at_a_time - len(self._kept))
                    drawn = self._draw(int(min(wanted, self._groups_left())))
                    consumed += self._round(drawn, log_probs=log_probs, **generate_kwargs) if drawn else 0
        taken, left = self._kept[:size], self._kept[size:]
        for group in taken:
            scores_N = scores(group.rollouts)
            if group.drawn is not None and scores_N is not None:
                self.sampler.observe(group.drawn, varies(scores_N))
        self.sampler.end_step()
        batch, self._batch = self._batch, RolloutBatch()
        batch.compared, self._compares = self._compares, False
        batch.trained = [rollout for group in taken for rollout in group.rollouts]
        # Surplus groups wait if more is generated at a time, else they are set aside.
        self._kept = left if self._at_a_time > size else []
        if not self._kept:
            batch.set_aside(left)
        if not log_probs:
            for rollout in batch.trained:  # some may have waited since the first batch
                rollout.rollout_log_probs = None
        over = self._prompts_iter is None and len(self._kept) < size
        return batch, 100 * len(batch) / len(batch.all), consumed, over

    def _draw(self, count: int) -> list[Group]:
        """Return groups of the next prompts that are not skipped; fewer at the end of the pass."""
        groups: list[Group] = []
        while len(groups) < count:
            if self._again:
                groups.append(Group(*self._again.popleft()))
                continue
            try:
                sources, texts, labels, images = next(self._prompts_iter)
            except StopIteration:
                # Now, not at the next draw: a finished data loader must not end up in a checkpoint.
                if self._prompts_iter is not _ENDED:
                    self.sampler.end_pass()
                self._prompts_iter = None
                break
            for source, *prompt in zip(sources, texts, labels, images, strict=True):  # OpenRLHF's loader gives one
                if isinstance(source, Drawn):
                    groups.append(Group(tuple(prompt), source))
                elif self.sampler.skips(self.prompt_ids[prompt[0], str(prompt[1])]):
                    self._batch.skipped += 1
                else:
                    groups.append(Group(tuple(prompt)))
        return groups

    def _round(self, drawn: list[Group], **generate_kwargs: Any) -> int:
        """Generate groups and the replacements of rejected ones; return the number of both.

        Kept groups are in the order in which they were sent: the order in which they finish depends on their lengths.
        """
        pending: dict[Any, list[Group]] = {}
        sent: list[Group] = []
        self._send(drawn, sent, pending, **generate_kwargs)
        while pending:
            [ref], _ = ray.wait(list(pending), num_returns=1)
            for group, answers in zip(pending.pop(ref), ray.get(ref), strict=True):
                group.rollouts = [self._experience(answer, group, **generate_kwargs) for answer in answers]
                text, label, _ = group.prompt
                scores_N, decision = scores(group.rollouts), Decision.TRAIN
                if scores_N is not None:
                    decision = self.sampler.judge(self.prompt_ids[text, str(label)], scores_N)
                group.kept = decision is Decision.TRAIN
                if group.kept:
                    continue
                self._batch.set_aside([group])
                replaced = decision is Decision.REPLACE
                if replaced and self._prompts_iter is not None and self._groups_left() >= 1:
                    self._send(self._draw(1), sent, pending, **generate_kwargs)
        self._kept += [group for group in sent if group.kept]
        return len(sent)

    def _send(self, drawn: list[Group], sent: list[Group], pending: dict[Any, list[Group]], **options: Any) -> None:
        """Ask the engines for groups, and note the calls. From here on the groups count as generated."""
        for group in drawn:
            group.version = self.version or 0
        # A strategy that judges hears of every group at once, since it may replace it.
        judges = type(self.sampler).judge is not Sampler.judge
        prompts, most = [group.prompt for group in drawn], 1 if judges else PROMPTS_A_CALL
        calls = self._ask(prompts, most, **options)
        pending.update({ref: [drawn[place] for place in places] for ref, places in calls})
        sent += drawn
        self.generated += len(drawn) * self.args.rollout.n_samples_per_prompt

    def _experience(self, response: dict[str, Any], group: Group, **generate_kwargs: Any) -> Experience:
        """Return a response as OpenRLHF trains on it, with the policy version and the draw in ``info``."""
        rollout = self._process_response_into_experience(response, **generate_kwargs)
        if rollout.scores is not None:
            rollout.info["score"] = rollout.scores.nan_to_num()  # only logged: one missing score must not hide the mean
        if self.version is not None:
            rollout.info[VERSION] = torch.tensor([group.version], dtype=torch.float64)
        if group.drawn is not None:
            rollout.info[INCLUSION] = torch.tensor([group.drawn.inclusion], dtype=torch.float64)
            rollout.info[WEIGHT] = torch.tensor([group.drawn.weight], dtype=torch.float64)
        return rollout

    def _groups_left(self) -> float:
        """Return the number of groups that the budget still allows."""
        if self._max_rollouts is None:
            return float("inf")
        return (self._max_rollouts - self.generated) // self.args.rollout.n_samples_per_prompt

    def drop_stale(self, oldest: int) -> None:
        """Set aside the waiting groups of policies before version ``oldest``."""
        self._batch.set_aside([group for group in self._kept if group.version < oldest])
        self._kept = [group for group in self._kept if group.version >= oldest]

    def unused(self) -> int:
        """Return the number of rollouts of a last batch that was not filled."""
        return len(self._batch.filtered) + sum(len(group.rollouts) for group in self._kept)

    # What a checkpoint holds, taken between steps.

    def state(self) -> dict[str, Any]:
        """Return the generator's state. A resume asks once more for the groups that wait."""
        return {
            "generated": self.generated - len(self._kept) * self.args.rollout.n_samples_per_prompt,
            "sampling": self.sampler.state(),
            "again": [(group.prompt, group.drawn) for group in self._kept],
            "drained": self._prompts_iter is None and bool(self._kept),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state`."""
        self.generated = state["generated"]
        self.sampler.load(state["sampling"])
        self._again = deque(state["again"])
        if state["drained"]:
            self._prompts_iter = _ENDED

    def position(self, episode: int) -> dict[str, Any]:
        """Return where in the data a checkpoint continues, as entries of OpenRLHF's states."""
        if self._prompts_iter is None:  # a finished data loader would serve its whole pass again after a resume
            return {"episode": episode + (not self._kept), "data_loader_state_dict": {}}
        return {"episode": episode, "data_loader_state_dict": self.prompts_dataloader.state_dict()}

    def metrics(self) -> dict[str, float]:
        """Return the strategy's metrics, to be logged after a step."""
        return self.sampler.metrics()

    # Samples that are not training rollouts.

    def score_more(self, rollouts: Sequence[Experience], samples: int, **generate_kwargs: Any) -> Floats:
        """Return scores (Q, M) of M further responses to the prompts of Q rollouts; NaN where missing."""
        prompts = [(r.prompts[0], r.labels[0], r.images[0] if r.images else None) for r in rollouts]
        scores_R = scores(self._sample_groups(prompts, **generate_kwargs | {"n_samples_per_prompt": samples}))
        if scores_R is None:
            raise ValueError("a response to a probe has no score; let the agent return one, or leave out the probes")
        return scores_R.reshape(len(prompts), samples)

    def generate_eval_samples(self, **generate_kwargs: Any) -> list[Experience]:
        """Return samples of all evaluation prompts, side by side, in the order of the data."""
        # OpenRLHF waits for each rollout batch of prompts, and returns prompts in the order in which they finish.
        data = self.eval_dataloader.dataset
        return self._sample_groups(list(zip(data.prompts, data.labels, data.images, strict=True)), **generate_kwargs)

    @torch.no_grad()
    def _sample_groups(self, prompts: Sequence[Prompt], **generate_kwargs: Any) -> list[Experience]:
        answers: dict[int, list[dict[str, Any]]] = {}
        with self._engines_awake():
            for ref, places in self._ask(prompts, PROMPTS_A_CALL, **generate_kwargs):
                answers.update(zip(places, ray.get(ref), strict=True))
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

    # The engines.

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
        """Ask the engines, at most ``most`` prompts a call; return references and places."""
        samples = generate_kwargs.get("n_samples_per_prompt", self.args.rollout.n_samples_per_prompt)
        sampling = {
            "temperature": generate_kwargs.get("temperature", 1.0),
            "top_p": generate_kwargs.get("top_p", 1.0),
            "max_tokens": generate_kwargs.get("max_new_tokens"),  # None: all that the prompt leaves
            "min_tokens": generate_kwargs.get("min_new_tokens", 1),
            "skip_special_tokens": generate_kwargs.get("skip_special_tokens", False),
            "logprobs": 1 if generate_kwargs.get("log_probs") else None,
        }
        max_length = generate_kwargs.get("max_len", 2048)
        return [
            (engine.generate_groups.remote([prompts[place] for place in places], sampling, samples, max_length), places)
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

"""Rollout batches for OpenRLHF's loop: the filler draws and judges, vLLM generates."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import ray
import torch
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator

from openrlhf_dbb import chosen
from openrlhf_dbb.core import filling
from openrlhf_dbb.core.arrays import Floats, Key
from openrlhf_dbb.core.filling import Answer, Filler, Request
from openrlhf_dbb.core.strategies import Predictive, Sampler
from openrlhf_dbb.platform import cuda, vllm_requests

PROMPTS_A_CALL = 8  # a call of Ray takes as long as a short prompt

BudgetSpent = filling.BudgetSpent


class Prompt(NamedTuple):
    """A row of the data, as OpenRLHF's data loader gives it."""

    text: str
    label: Any
    image: Any = None

    @property
    def key(self) -> Key:
        """Text and label. The store keeps one posterior for all rows that share both."""
        return self.text, str(self.label)


def prompts_of(data: Any) -> list[Prompt]:
    """Return the rows of OpenRLHF's data set."""
    return list(map(Prompt, data.prompts, data.labels, data.images))


Group = filling.Group[Prompt, Experience]
Batch = filling.Batch[Prompt, Experience]


class Snapshot(NamedTuple):
    """The generation right after a batch, for a checkpoint to continue from."""

    state: dict[str, Any]
    place: dict[str, Any]  # in the data, as a data loader tells it
    ends_pass: bool  # a resume begins with the next pass over the data
    metrics: dict[str, float]  # the strategy's, to be logged after the step
    generated: int  # training rollouts so far, without those that a resume would ask for again


@dataclass(frozen=True, eq=False)
class RolloutBatch(Batch):
    """The rollouts of one step."""

    snapshot: Snapshot | None = None  # None of an empty batch

    def __len__(self) -> int:
        """Return the number of rollouts to train on. OpenRLHF's loop asks for it."""
        return len(rollouts_of(self.trained))


Generated = tuple[RolloutBatch, float | None, int, bool]
"""See :meth:`RolloutGenerator.generate_samples`."""


def rollouts_of(groups: Iterable[Group]) -> list[Experience]:
    """Return the rollouts of groups, side by side."""
    return [rollout for group in groups for rollout in group.rollouts]


def scores(rollouts: Sequence[Experience]) -> Floats | None:
    """Return each rollout's score (R,), else its reward; NaN where missing. None if a reward model gives them later."""
    values = [rollout.rewards if rollout.scores is None else rollout.scores for rollout in rollouts]
    if not values:
        return np.array([])
    if any(value is None for value in values):
        return None
    return torch.cat([value.double() for value in values]).numpy()


def one_update(args: SimpleNamespace) -> bool:
    """Return whether a step is one optimizer update, and nothing else needs old log-probs."""
    one = args.train.batch_size == chosen.rollouts_of_a_step(args) and args.train.max_epochs == 1
    needed = args.algo.kl.init_coef > 0 or args.critic.model_name_or_path or args.replay.samples
    return bool(one and not needed and args.algo.advantage.is_correction_level == "off")


class LoaderPrompts:
    """The prompts of OpenRLHF's data loader, in its order."""

    def __init__(self, dataloader: Any, prompt_ids: Mapping[Key, int]) -> None:
        rows = prompts_of(dataloader.dataset)
        self._dataloader = dataloader
        self._prompt_ids = prompt_ids
        self._rows = len(rows)
        self.by_id = {prompt_ids[prompt.key]: prompt for prompt in reversed(rows)}

    def __len__(self) -> int:
        return self._rows

    def rest_of_pass(self) -> Iterator[tuple[int, Prompt]]:
        """Yield id and prompt of the rows that the data loader still gives in this pass."""
        for _, texts, labels, images in self._dataloader:  # lists of one
            for prompt in map(Prompt, texts, labels, images):
                yield self._prompt_ids[prompt.key], prompt

    def place(self) -> dict[str, Any]:
        """Return the data loader's state."""
        return dict(self._dataloader.state_dict())

    def after_pass(self) -> dict[str, Any]:
        """Return no place: the data loader begins the next pass by itself."""
        return {}

    def go_to(self, place: dict[str, Any]) -> None:
        """Load a state of the data loader."""
        self._dataloader.load_state_dict(place)


class RolloutGenerator(SamplesGenerator):
    """Fills whole rollout batches, as its strategy decides (:class:`openrlhf_dbb.core.filling.Filler`).

    OpenRLHF trains on the short batch at the end of a pass, which may not fill an optimizer step. Here its groups wait
    until the next pass completes the batch. OpenRLHF's trainer takes the generator for its data loader, too.

    Attributes:
        filler: fills the batches; it counts the rollouts and knows the policy that the engines have.
        engines_have_weights: False while engines have given theirs up; whoever sends weights sets it.
    """

    def __init__(
        self,
        *args: Any,
        sampler: Sampler,
        judges: bool,  # the sampler may reject a group
        predictive: Callable[[], Predictive]
        | None = None,  # given if the sampler draws the prompts
        prompt_ids: Mapping[Key, int],
        max_rollouts: int | None = None,
        send_weights: Callable[[], None] | None = None,  # given where engines give theirs up
    ) -> None:
        super().__init__(*args)
        self._send_weights = send_weights
        self.engines_have_weights = not cuda.gives_up_weights(self.args)
        for engine in self.vllm_engines:
            engine.use_tokenizer.remote(self.tokenizer)
        self._prompt_ids = prompt_ids
        # A strategy that judges hears of every group at once, since it may replace it.
        self._prompts_a_call = 1 if judges else PROMPTS_A_CALL
        at_a_time = self.args.rollout.vllm_generate_batch_size
        self._prompts = LoaderPrompts(self.prompts_dataloader, prompt_ids)
        self.filler: Filler[Prompt, Experience] = Filler(
            self._prompts,
            self,
            sampler,
            predictive=predictive,
            at_a_time=at_a_time,
            max_rollouts=max_rollouts,
        )
        # One update: then nobody else takes the log-probs that are stored. Groups that wait come with those of others.
        waits = (at_a_time or 0) > self.args.rollout.batch_size
        needed = chosen.needs_log_probs(self.args) or self.args.rollouts.record
        self._takes_log_probs = one_update(self.args) or waits or needed
        # The first batch comes with vLLM's log-probs; the training pass compares them
        self._compares = True
        self._options: dict[str, Any] = {}  # OpenRLHF's, of the batch that is being filled
        self._calls_pending: dict[Any, list[int]] = {}  # of each call of Ray its tickets

    @torch.no_grad()
    def generate_samples(self, **generate_kwargs: Any) -> Generated:
        """Return one whole rollout batch, or an empty one if the pass over the data ends first.

        With it, as OpenRLHF's loop expects: the share of groups kept, in percent; the number of prompts generated for;
        whether the pass is over. Raise BudgetSpent, or RunError if the strategy gives up.
        """
        log_probs = self._takes_log_probs or self._compares
        self._options = generate_kwargs | {"log_probs": log_probs}
        self._calls_pending = {}
        with contextlib.nullcontext() if self.filler.is_full else self._engines_awake():
            batch = self.filler.fill()
        if batch is None:
            return RolloutBatch(), None, self.filler.sent, True
        self._compares = False
        kept = 100 * len(batch.trained) / (len(batch.trained) + len(batch.filtered))
        rollouts = RolloutBatch(batch.trained, batch.filtered, batch.skipped, self.snapshot())
        return rollouts, kept, self.filler.sent, self.filler.pass_is_over

    def begin(self, requests: Sequence[Request[Prompt]]) -> None:
        """Ask the engines for groups."""
        for rollouts in sorted({request.rollouts for request in requests}):
            of_size = [request for request in requests if request.rollouts == rollouts]
            options = self._options | {"n_samples_per_prompt": rollouts}
            prompts = [request.prompt for request in of_size]
            for ref, places in self._ask(prompts, self._prompts_a_call, **options):
                self._calls_pending[ref] = [of_size[place].ticket for place in places]

    def finished(self) -> list[tuple[int, Answer[Experience]]]:
        """Wait for a call; return the answers of its prompts, by ticket."""
        [ref], _ = ray.wait(list(self._calls_pending), num_returns=1)
        tickets = self._calls_pending.pop(ref)
        answers = map(self._answer, ray.get(ref))
        return list(zip(tickets, answers, strict=True))

    def _answer(self, responses: Sequence[dict[str, Any]]) -> Answer[Experience]:
        rollouts = [self._rollout(response) for response in responses]
        read = [response.get("read") for response in responses]
        return Answer(rollouts, scores(rollouts), read)

    def _rollout(self, response: dict[str, Any]) -> Experience:
        rollout = self._process_response_into_experience(response, **self._options)
        if rollout.scores is not None:
            # Only logged: one missing score must not hide the mean.
            rollout.info["score"] = rollout.scores.nan_to_num()
        return rollout

    def snapshot(self) -> Snapshot:
        """Return what a checkpoint between two steps holds. A resume asks once more for the groups that wait."""
        state = self.filler.state()
        place = state.pop("place")
        return Snapshot(
            state, place, self.filler.ends_pass, self.filler.sampler.metrics(), state["generated"]
        )

    def load(self, state: dict[str, Any], place: dict[str, Any]) -> None:
        """Continue from a :meth:`snapshot`, also from one of an earlier release, which names prompts by their texts."""
        again = []
        for prompt, drawn in state["again"]:
            prompt_id = prompt if isinstance(prompt, int) else self._prompt_ids[Prompt(*prompt).key]
            again.append((prompt_id, drawn))
        self.filler.load({**state, "again": again, "place": place})

    def __len__(self) -> int:
        return len(self.prompts_dataloader)

    def state_dict(self) -> dict[str, Any]:
        """Return no state: OpenRLHF's checkpoint asks its data loader for one."""
        return {}  # the place in the data is in each batch's snapshot

    def score_more(self, prompts: Sequence[Prompt], samples: int, **generate_kwargs: Any) -> Floats:
        """Return scores (Q, M) of M further responses to Q prompts; NaN where missing.

        Raises:
            ValueError: a response has no score that is known at generation.
        """
        options = generate_kwargs | {"n_samples_per_prompt": samples}
        scores_R = scores(self._sample_groups(prompts, **options))
        if scores_R is None:
            raise ValueError(
                "a response to a probe has no score; "
                "let the agent return one, or leave out the probes"
            )
        return scores_R.reshape(len(prompts), samples)

    def generate_eval_samples(self, **generate_kwargs: Any) -> list[Experience]:
        """Return samples of all evaluation prompts, side by side, in the order of the data."""
        # OpenRLHF waits for each rollout batch of prompts, and returns prompts in the order in which they finish.
        prompts = prompts_of(self.eval_dataloader.dataset)
        return self._sample_groups(prompts, **generate_kwargs)

    @torch.no_grad()
    def _sample_groups(self, prompts: Sequence[Prompt], **generate_kwargs: Any) -> list[Experience]:
        answers: dict[int, Any] = {}
        with self._engines_awake():
            for ref, places in self._ask(prompts, PROMPTS_A_CALL, **generate_kwargs):
                answers.update(zip(places, ray.get(ref), strict=True))
        return [
            self._process_response_into_experience(answer, **generate_kwargs)
            for place in range(len(prompts))
            for answer in answers[place]
        ]

    def sample(
        self, requests: Sequence[vllm_requests.Request], sampling: dict[str, Any]
    ) -> Iterator[list[vllm_requests.Finished]]:
        """Yield responses to prompts of token ids, without rewards, in any order."""
        with self._engines_awake():
            calls = []
            for engine, places in self._calls(len(requests), sampling["n"]):
                part = [requests[place] for place in places]
                calls.append(engine.sample.remote(part, sampling))
            while calls:
                [ref], calls = ray.wait(calls, num_returns=1)
                yield ray.get(ref)

    @contextlib.contextmanager
    def _engines_awake(self) -> Iterator[None]:
        if not self.args.vllm.enable_sleep:
            yield
            return
        if not self.engines_have_weights:
            assert self._send_weights is not None
            self._send_weights()
        ray.get([engine.wake_up.remote() for engine in self.vllm_engines])
        try:
            yield
        finally:
            ray.get([engine.sleep.remote() for engine in self.vllm_engines])
            self.engines_have_weights = not cuda.gives_up_weights(self.args)

    def _ask(
        self, prompts: Sequence[Prompt], most: int, **generate_kwargs: Any
    ) -> list[tuple[Any, list[int]]]:
        samples = generate_kwargs.get(
            "n_samples_per_prompt", self.args.rollout.n_samples_per_prompt
        )
        sampling = {
            "temperature": generate_kwargs.get("temperature", 1.0),
            "top_p": generate_kwargs.get("top_p", 1.0),
            "max_tokens": generate_kwargs.get("max_new_tokens"),  # None: all that the prompt leaves
            "min_tokens": generate_kwargs.get("min_new_tokens", 1),
            "skip_special_tokens": generate_kwargs.get("skip_special_tokens", False),
            "logprobs": 1 if generate_kwargs.get("log_probs") else None,
        }
        max_length = generate_kwargs.get("max_len", 2048)
        calls = []
        for engine, places in self._calls(len(prompts), samples, most):
            part = [tuple(prompts[place]) for place in places]
            calls.append(
                (engine.generate_groups.remote(part, sampling, samples, max_length), places)
            )
        return calls

    def _calls(
        self, prompts: int, samples: int, most: int = PROMPTS_A_CALL
    ) -> Iterator[tuple[Any, list[int]]]:
        """Yield the engine and the places of the prompts of each call."""
        # The next prompt goes where least is left to do.
        loads = ray.get(
            [engine.get_num_unfinished_requests.remote() for engine in self.vllm_engines]
        )
        shares: list[list[int]] = [[] for _ in loads]
        for place in range(prompts):
            least = loads.index(min(loads))
            shares[least].append(place)
            loads[least] += samples
        for engine, share in zip(self.vllm_engines, shares, strict=True):
            for start in range(0, len(share), most):
                yield engine, share[start : start + most]

"""Fills a step with groups of rollouts, as a strategy decides, for any host that generates more within a step.

Prompts are drawn, the host generates rollouts of them, and the strategy judges each group, until enough groups are to
be trained on. The host gives two objects: :class:`Prompts`, its data, and :class:`Engine`, its generation.

Axes: N rollouts of a group, R rollouts of a batch.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from openrlhf_dbb.core.arrays import Floats
from openrlhf_dbb.core.step import StepExtras
from openrlhf_dbb.core.strategies import Decision, Drawn, Predictive, Sampler, varies
from openrlhf_dbb.errors import RunError

PromptT = TypeVar("PromptT")
"""A prompt as the host has it."""
RolloutT = TypeVar("RolloutT")
"""A rollout as the host has it."""
PromptOut = TypeVar("PromptOut", covariant=True)

MOST_IDLE_PASSES = 20  # that generated and kept no group, before a batch is given up
_DEAD_BATCHES = 3  # in a row without any score, before the run is given up
_ENDED: Iterator[Any] = iter(())  # in place of a pass that was over before the checkpoint


@dataclass(frozen=True, eq=False)  # tensors do not compare
class Group(Generic[PromptT, RolloutT]):
    """A prompt that was drawn, and its rollouts.

    Attributes:
        drawn: how the strategy chose the prompt; None if it does not choose.
        version: training steps that the generating policy had seen; None: the policy of the step.
        rollouts: N, as the host has them; none before the host has generated them.
        scores: (N,) the verifier's, NaN where missing; None if a reward model gives them later.
        read: what the verifier read in each rollout; empty: it does not tell.
    """

    prompt: PromptT
    prompt_id: int
    drawn: Drawn | None = None
    version: int | None = None
    rollouts: tuple[RolloutT, ...] = ()
    scores: Floats | None = None
    read: tuple[str | None, ...] = ()

    @property
    def own_rollouts(self) -> int | None:
        """How many rollouts the strategy gives this prompt; None: as many as others."""
        return None if self.drawn is None else self.drawn.rollouts

    def with_answer(self, answer: "Answer[RolloutT]") -> "Group[PromptT, RolloutT]":
        """Return this group with further rollouts."""
        scores = answer.scores
        if scores is not None and self.scores is not None:
            scores = np.concatenate([self.scores, scores])
        return replace(
            self,
            rollouts=(*self.rollouts, *answer.rollouts),
            scores=scores,
            read=(*self.read, *answer.read),
        )


@dataclass(frozen=True, eq=False)
class Batch(Generic[PromptT, RolloutT]):
    """The groups of one step: the host trains on some, the estimator observes all.

    Attributes:
        trained: groups to train on.
        filtered: groups to observe only.
        skipped: how often a prompt was drawn without generating for it.
    """

    trained: tuple[Group[PromptT, RolloutT], ...] = ()
    filtered: tuple[Group[PromptT, RolloutT], ...] = ()
    skipped: int = 0

    def groups_of_each(
        self, places: Sequence[int] | None = None
    ) -> list[tuple[Group[PromptT, RolloutT], str | None]]:
        """Return the group of each rollout (R,), and what the verifier read in it.

        The order is: the rollouts to train on, then the filtered ones. ``places`` orders the
        rollouts to train on by their places among them; None leaves their order.
        """
        trained = _each_rollout(self.trained)
        if places is not None:
            trained = [trained[place] for place in places]
        return trained + _each_rollout(self.filtered)

    def extras(self, groups_R: Sequence[tuple[Group[PromptT, RolloutT], str | None]]) -> StepExtras:
        """Return what a step stores of these rollouts, from :meth:`groups_of_each`; the host adds lengths and texts."""
        count = sum(len(group.rollouts) for group in self.trained)
        drawn_R = [group.drawn for group, _ in groups_R if group.drawn is not None]
        versions_R = [group.version for group, _ in groups_R if group.version is not None]
        return StepExtras(
            trained=np.arange(len(groups_R)) < count,
            skipped=self.skipped,
            policy_versions=versions_R or None,
            inclusion=[drawn.inclusion for drawn in drawn_R] or None,
            weights=[drawn.weight for drawn in drawn_R] or None,
            read=[read for _, read in groups_R],
        )


def _each_rollout(
    groups: Sequence[Group[PromptT, RolloutT]],
) -> list[tuple[Group[PromptT, RolloutT], str | None]]:
    rows = []
    for group in groups:
        for read in group.read or [None] * len(group.rollouts):
            rows.append((group, read))
    return rows


@dataclass(frozen=True)
class Request(Generic[PromptT]):
    """Asks a host for rollouts of a prompt.

    Attributes:
        ticket: names the group in the host's answer.
        rollouts: how many, >= 1.
        begun: rollouts that the group has already, of its first stage.
    """

    ticket: int
    prompt: PromptT
    rollouts: int
    begun: int = 0


@dataclass(frozen=True, eq=False)
class Answer(Generic[RolloutT]):
    """The rollouts that a request has asked for; attributes as of :class:`Group`."""

    rollouts: Sequence[RolloutT]
    scores: Floats | None
    read: Sequence[str | None] = ()


class Engine(Protocol[PromptT, RolloutT]):
    """The host's generation."""

    def begin(self, requests: Sequence[Request[PromptT]]) -> None:
        """Begin to generate."""

    def finished(self) -> Sequence[tuple[int, Answer[RolloutT]]]:
        """Wait for some of the requests that were begun; return each ticket with its answer, once."""


class AtOnce(Generic[PromptT, RolloutT]):
    """The :class:`Engine` of a host that generates by a plain function.

    Args:
        generate: returns an answer to each request, in their order.
    """

    def __init__(
        self, generate: Callable[[Sequence[Request[PromptT]]], Sequence[Answer[RolloutT]]]
    ) -> None:
        self._generate = generate
        self._begun: list[Request[PromptT]] = []

    def begin(self, requests: Sequence[Request[PromptT]]) -> None:
        """Keep the requests for :meth:`finished`."""
        self._begun.extend(requests)

    def finished(self) -> list[tuple[int, Answer[RolloutT]]]:
        """Generate for all requests that were begun; return each ticket with its answer."""
        requests = self._begun
        self._begun = []
        answers = self._generate(requests)
        return [(request.ticket, answer) for request, answer in zip(requests, answers, strict=True)]


class Prompts(Protocol[PromptOut]):
    """The host's data."""

    @property
    def by_id(self) -> Mapping[int, PromptOut]:
        """A prompt by the store's id; the first one where several rows share an id."""

    def __len__(self) -> int:
        """Return the number of rows, which a pass draws."""

    def rest_of_pass(self) -> Iterator[tuple[int, PromptOut]]:
        """Yield id and prompt of the rows of a pass from the present place, in the host's order."""

    def place(self) -> dict[str, Any]:
        """Return the place in the pass, for a checkpoint."""

    def after_pass(self) -> dict[str, Any]:
        """Return the place where the next pass begins; empty: where the host begins by itself."""

    def go_to(self, place: dict[str, Any]) -> None:
        """Continue from a place."""


class ShuffledPrompts:
    """The :class:`Prompts` of a host without a data loader: rows of a data set, shuffled in each pass."""

    def __init__(self, prompt_ids: Sequence[int], seed: int) -> None:
        """``prompt_ids`` (P,) are of the rows; a prompt is its row, from 0."""
        self.by_id = {prompt_id: row for row, prompt_id in reversed(list(enumerate(prompt_ids)))}
        self._prompt_ids = list(prompt_ids)
        self._seed = seed
        self._pass = 0
        self._drawn = 0

    def __len__(self) -> int:
        return len(self._prompt_ids)

    def rest_of_pass(self) -> Iterator[tuple[int, int]]:
        """Yield id and row of the rest of a pass, in the order that seed and pass determine."""
        order = np.random.default_rng([self._seed, self._pass]).permutation(len(self)).tolist()
        while self._drawn < len(order):
            row = order[self._drawn]
            self._drawn += 1
            yield self._prompt_ids[row], row
        self._pass += 1
        self._drawn = 0

    def place(self) -> dict[str, Any]:
        """Return the pass, from 0, and the number of its rows that were drawn."""
        return {"pass": self._pass, "place": self._drawn}

    def after_pass(self) -> dict[str, Any]:
        """Return the present place: at the end of a pass it is the start of the next one."""
        return self.place()

    def go_to(self, place: dict[str, Any]) -> None:
        """Continue from a place that :meth:`place` returned."""
        self._pass = int(place["pass"])
        self._drawn = int(place["place"])


class BudgetSpent(Exception):
    """The limit of rollouts does not allow another batch: the training is over."""


class Filler(Generic[PromptT, RolloutT]):
    """Fills whole batches, as its strategy decides.

    Groups that do not fill a batch at the end of a pass wait until the next pass completes it.

    Attributes:
        generated: rollouts so far.
        version: in async training, the steps that the generating policy has seen.
        sent: groups that the last :meth:`fill` has generated for.
    """

    def __init__(
        self,
        prompts: Prompts[PromptT],
        engine: Engine[PromptT, RolloutT],
        sampler: Sampler,
        *,
        predictive: Callable[[], Predictive] | None = None,
        at_a_time: int | None = None,
        max_rollouts: int | None = None,
        scores_later: bool = False,
    ) -> None:
        """Fill from the first pass.

        Args:
            sampler: the mutable part of the strategy.
            predictive: the forecast of each prompt, given if the strategy draws the prompts.
            at_a_time: groups to generate before a batch is taken, if more than it needs; the surplus waits.
            max_rollouts: most rollouts to generate; None: no limit.
            scores_later: the host tells the scores of each batch by :meth:`tell`.
        """
        self.sampler = sampler
        self._prompts = prompts
        self._engine = engine
        self._predictive = predictive
        self._size = sampler.facts.groups
        self._at_a_time = max(self._size, at_a_time or 0)
        self._max_rollouts = max_rollouts
        self._scores_later = scores_later
        self.generated = 0
        self.version: Any = None
        self.sent = 0
        self._reserved = 0  # rollouts that groups in their first stage may still need
        self._unscored = 0  # groups in a row without any score
        self._drawn = 0  # prompts that a strategy has drawn in this pass
        # None: the next batch begins a pass
        self._pass: Iterator[Group[PromptT, RolloutT]] | None = None
        # Drawn before a checkpoint, to be asked for again after a resume.
        self._again: deque[Group[PromptT, RolloutT]] = deque()
        # Of the batch that is being filled.
        self._kept: list[Group[PromptT, RolloutT]] = []
        self._filtered: list[Group[PromptT, RolloutT]] = []
        self._skipped = 0

    @property
    def is_full(self) -> bool:
        """Whether the next batch needs no generation: enough groups wait."""
        return len(self._kept) >= self._size

    @property
    def pass_is_over(self) -> bool:
        """Whether the next batch begins with the next pass over the data."""
        return self._pass is None and not self.is_full

    def fill(self) -> Batch[PromptT, RolloutT] | None:
        """Return the next whole batch; None if the pass over the data ends first.

        Raises:
            BudgetSpent: the limit of rollouts does not allow to fill it.
            RunError: no group of three batches has a score, or the strategy gives up.
        """
        self.sent = 0
        if not self.is_full and self._pass is None:
            self._pass = self._groups_of_pass()
        while not self.is_full:
            if self._pass is None:
                return None
            if self._groups_left() < self._size - len(self._kept):
                raise BudgetSpent
            wanted = self.sampler.round_size(self._at_a_time - len(self._kept))
            self._round(self._draw(int(min(wanted, self._groups_left()))))
        return self._take()

    def fill_over_passes(self, strategy: str) -> Batch[PromptT, RolloutT]:
        """Return the next whole batch, however many passes over the data it takes.

        ``strategy`` is the name for messages.

        Raises:
            BudgetSpent: the limit of rollouts does not allow to fill it.
            RunError: more than 20 passes have generated groups and kept none, or as :meth:`fill`.
        """
        idle_passes = 0
        while True:
            waiting = len(self._kept)
            batch = self.fill()
            if batch is not None:
                return batch
            if len(self._kept) > waiting:
                idle_passes = 0
            elif self.sent:  # a strategy that skips every prompt has a limit of its own
                idle_passes += 1
            if idle_passes > MOST_IDLE_PASSES:
                problem = f"strategy {strategy!r} has kept no group in {idle_passes} passes"
                way_out = "use data of which the model solves a part, or strategy='plain'"
                raise RunError(f"{problem} over the data; {way_out}")

    def _take(self) -> Batch[PromptT, RolloutT]:
        taken = self._kept[: self._size]
        left = self._kept[self._size :]
        if not self._scores_later:
            self.tell(taken)
        # Surplus groups wait if more is generated at a time, else they are set aside.
        surplus = []
        if self._at_a_time == self._size:
            surplus = left
            left = []
        batch = Batch(tuple(taken), (*self._filtered, *surplus), self._skipped)
        self._kept = left
        self._filtered = []
        self._skipped = 0
        return batch

    def tell(self, trained: Sequence[Group[PromptT, RolloutT]]) -> None:
        """Tell the strategy the outcomes of a batch; with ``scores_later`` the host calls it."""
        for group in trained:
            self._tell(group)
        self.sampler.end_step()

    def _tell(self, group: Group[PromptT, RolloutT]) -> None:
        """Tell a strategy that draws the outcome of a group with a score."""
        if (
            group.drawn is not None
            and group.scores is not None
            and not np.isnan(group.scores).all()
        ):
            self.sampler.observe(group.drawn, varies(group.scores))

    def _groups_of_pass(self) -> Iterator[Group[PromptT, RolloutT]]:
        """Yield the prompts of a pass over the data. A strategy that draws draws as many as there are rows."""
        if self._predictive is None:
            for prompt_id, prompt in self._prompts.rest_of_pass():
                yield Group(prompt, prompt_id)
            return
        while self._drawn < len(self._prompts):
            self._drawn += 1
            yield self._drawn_group(self.sampler.next_prompt(self._predictive))
        self._drawn = 0

    def _drawn_group(self, drawn: Drawn) -> Group[PromptT, RolloutT]:
        return Group(self._prompts.by_id[drawn.prompt_id], drawn.prompt_id, drawn)

    def _draw(self, count: int) -> list[Group[PromptT, RolloutT]]:
        """Return groups of the next prompts that are not skipped; fewer at the end of the pass."""
        groups: list[Group[PromptT, RolloutT]] = []
        while len(groups) < count and self._pass is not None:
            if self._again:
                groups.append(self._again.popleft())
                continue
            group = next(self._pass, None)
            if group is None:
                # Now, not at the next draw: a finished pass must not end up in a checkpoint.
                if self._pass is not _ENDED:
                    self.sampler.end_pass()
                self._pass = None
            elif self.sampler.skips(group.prompt_id):
                self._skipped += 1
            else:
                groups.append(group)
        return groups

    def _round(self, drawn: list[Group[PromptT, RolloutT]]) -> None:
        """Generate groups and the replacements of rejected ones.

        Kept groups are in the order in which they were sent: the order in which they finish depends on their lengths.
        """
        groups: list[Group[PromptT, RolloutT]] = []  # by ticket
        kept: list[int] = []
        waiting = self._send(drawn, groups)
        while waiting:
            for ticket, answer in self._engine.finished():
                group = groups[ticket].with_answer(answer)
                groups[ticket] = group
                decision = self._judge(group, len(answer.rollouts))
                if decision is Decision.MORE:
                    self._send_rest(ticket, group)
                    continue
                waiting -= 1
                if decision is Decision.TRAIN:
                    kept.append(ticket)
                    continue
                self._filtered.append(group)
                self._tell(group)
                if (
                    decision is Decision.REPLACE
                    and self._pass is not None
                    and self._groups_left() >= 1
                ):
                    waiting += self._send(self._draw(1), groups)
        self._kept += [groups[ticket] for ticket in sorted(kept)]
        self.sent += len(groups)

    def _judge(self, group: Group[PromptT, RolloutT], answered: int) -> Decision:
        """Return what the strategy decides on a group, of which ``answered`` rollouts are new."""
        rest = self.sampler.facts.rollouts - len(group.rollouts)
        is_first_stage = answered == len(group.rollouts)
        if is_first_stage and not group.own_rollouts:
            self._reserved -= max(rest, 0)
        decision = Decision.TRAIN
        if group.scores is not None:
            if is_first_stage:
                self._check_verifier(group.scores)
            decision = self.sampler.judge(group.prompt_id, group.scores)
        if decision is Decision.MORE and rest <= 0:
            raise RunError(
                f"the strategy asks for more than the {len(group.rollouts)} rollouts of a group"
            )
        return decision

    def _check_verifier(self, scores_N: NDArray[np.float64]) -> None:
        """Raise RunError if no group of several batches in a row has a score: the verifier is down."""
        self._unscored = self._unscored + 1 if np.isnan(scores_N).all() else 0
        if self._unscored >= _DEAD_BATCHES * self._size:
            raise RunError(
                f"no rollout of the last {self._unscored} prompts could be verified, which is "
                f"{_DEAD_BATCHES} batches: look at the verifier, then resume the run"
            )

    def _send(
        self, drawn: list[Group[PromptT, RolloutT]], groups: list[Group[PromptT, RolloutT]]
    ) -> int:
        """Ask the host for the first rollouts of groups, which are added to ``groups``; return their number."""
        requests = []
        for group in drawn:
            rollouts = group.own_rollouts or self.sampler.first_rollouts(group.prompt_id)
            requests.append(Request(len(groups), group.prompt, rollouts))
            groups.append(replace(group, version=self.version))
            self.generated += rollouts
            rest = self.sampler.facts.rollouts - rollouts
            # Numbers of their own sum to B N: what this group leaves, others of its batch take
            self._reserved += rest if group.own_rollouts else max(rest, 0)
        self._engine.begin(requests)
        return len(requests)

    def _send_rest(self, ticket: int, group: Group[PromptT, RolloutT]) -> None:
        """Ask the host for the rollouts of a group that its first stage has left out."""
        rest = self.sampler.facts.rollouts - len(group.rollouts)
        self.generated += rest
        self._engine.begin([Request(ticket, group.prompt, rest, len(group.rollouts))])

    def _groups_left(self) -> float:
        if self._max_rollouts is None:
            return float("inf")
        return (self._max_rollouts - self.generated - self._reserved) // self.sampler.facts.rollouts

    def drop_stale(self, oldest: int) -> None:
        """Set aside the waiting groups of policies before version ``oldest``."""
        waiting = self._kept
        self._kept = []
        for group in waiting:
            if (group.version or 0) < oldest:
                self._filtered.append(group)
            else:
                self._kept.append(group)

    def unused(self) -> int:
        """Return the number of rollouts of a last batch that was not filled."""
        return sum(len(group.rollouts) for group in self._filtered + self._kept)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint between two steps holds. A resume asks once more for the groups that wait."""
        over = self._pass is None
        waiting = sum(len(group.rollouts) for group in self._kept)
        place = {"place": self._drawn}
        # A finished pass would be served again as a whole after a resume
        if self._predictive is None:
            place = self._prompts.after_pass() if over else self._prompts.place()
        return {
            "generated": self.generated - waiting,
            "sampling": self.sampler.state(),
            "again": [(group.prompt_id, group.drawn) for group in self._kept],
            "drained": over and bool(self._kept),
            "place": place,
        }

    @property
    def ends_pass(self) -> bool:
        """Whether a resume from here begins with the next pass over the data."""
        return self._pass is None and not self._kept

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state`.

        Raises:
            ValueError: it is no such state.
        """
        try:
            self._go_on_from(state)
        except (AttributeError, LookupError, OverflowError, TypeError) as error:
            problem = f"the state of the draws cannot be read ({type(error).__name__}: {error})"
            raise ValueError(f"{problem}; use another checkpoint") from None

    def _go_on_from(self, state: Mapping[str, Any]) -> None:
        self.generated = int(state["generated"])
        self.sampler.load(state["sampling"])
        self._again = deque()
        for prompt_id, drawn in state["again"]:
            self._again.append(Group(self._prompts.by_id[prompt_id], prompt_id, drawn))
        if state["drained"]:
            self._pass = _ENDED
        place = state["place"]
        if self._predictive is not None:
            self._drawn = int(place.get("place", 0))
        elif place:
            self._prompts.go_to(place)

"""Two-stage sampling: a few rollouts of many prompts first, the rest of a group only where these differ.

Source: SPEED-RL (Zhang et al. 2025, arXiv 2506.09016), its screening and continuation phases. docs/methods.md lists the
differences.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from openrlhf_dbb.core.strategies import (
    Decision,
    Drawn,
    Predictive,
    RolloutStrategy,
    RunFacts,
    Sampler,
    parameter,
    register,
    varies,
)
from openrlhf_dbb.core.strategies.posterior import PosteriorSampling
from openrlhf_dbb.errors import RunError

EVEN = "even"
POSTERIOR = "posterior"
MOST_IDLE_PASSES = 20  # in which no prompt's first rollouts differed, before the run is given up


@register
@dataclass(frozen=True)
class TwoStage(RolloutStrategy):
    """``first`` rollouts of each prompt, and the other N - ``first`` only if the scores of the first ones differ.

    A prompt whose first rollouts agree is observed, and another prompt takes its place. A step trains on whole groups
    of N. Their baseline uses all N rollouts, and the posterior counts every rollout, also those of
    the prompts that were passed over.

    A prompt of success probability p is trained on with probability 1 - p^k - (1 - p)^k, k being
    ``first``: the objective weights its gradient by that.
    """

    first: int = parameter(
        2, "rollouts of a prompt before the rest of its group", within="[2, 1024]"
    )
    draw: str = parameter(
        EVEN,
        "prompts: even, each once a pass; posterior, as that strategy draws",
        choices=(EVEN, POSTERIOR),
    )

    name: ClassVar[str] = "two_stage"
    needs_scores: ClassVar[bool] = True
    needs_budget: ClassVar[bool] = True

    @property
    def draws(self) -> bool:
        """Whether the posterior draws the prompts."""
        return self.draw == POSTERIOR

    @property
    def min_rollouts(self) -> int:
        """One rollout more than the first stage takes."""
        return self.first + 1  # else nothing is left for the second stage

    def describe(self) -> str:
        """Return the size of the first stage, and how prompts are drawn unless evenly."""
        drawn = f", {PosteriorSampling().describe()}" if self.draws else ""
        return f"{self.first} rollouts first, the rest of a group where these differ{drawn}"

    def sampler(self, facts: RunFacts) -> "TwoStageSampler":
        """Return a sampler that judges each group in two stages."""
        return TwoStageSampler(self, facts)


class TwoStageSampler(Sampler):
    """Judges a group twice; with draws by the posterior, that strategy's sampler chooses the prompts."""

    def __init__(self, strategy: TwoStage, facts: RunFacts) -> None:
        super().__init__(facts)
        self._first = strategy.first
        self._prompts = PosteriorSampling().sampler(facts) if strategy.draws else Sampler(facts)
        self._screened = 0  # prompts of the step
        self._passed = 0  # of these, prompts whose first rollouts differ
        self._share = 0.0  # of the last step
        self._idle_passes = 0  # in a row in which none passed

    def first_rollouts(self, prompt_id: int) -> int:
        """Return the size of the first stage, for every prompt."""
        return self._first

    def judge(self, prompt_id: int, scores_N: NDArray[np.float64]) -> Decision:
        """Return MORE for first rollouts whose scores differ, else REPLACE; TRAIN a whole group."""
        if len(scores_N) > self._first:
            return Decision.TRAIN
        self._screened += 1
        if not varies(scores_N):
            return Decision.REPLACE
        self._passed += 1
        self._idle_passes = 0
        return Decision.MORE

    def next_prompt(self, predictive: Callable[[], Predictive]) -> Drawn:
        """Return the prompt that the posterior's sampler draws."""
        return self._prompts.next_prompt(predictive)

    def observe(self, drawn: Drawn, mixed: bool) -> None:
        """Tell the sampler that draws the prompts."""
        self._prompts.observe(drawn, mixed)

    def end_step(self) -> None:
        """Compute the step's share of prompts that passed; tell the sampler of the prompts."""
        self._share = self._passed / max(self._screened, 1)
        self._screened = 0
        self._passed = 0
        self._prompts.end_step()

    def end_pass(self) -> None:
        """Count the pass; tell the sampler of the prompts.

        Raises:
            RunError: in too many passes in a row no prompt's first rollouts differed.
        """
        self._prompts.end_pass()
        self.note = self._prompts.note
        self._idle_passes += 1
        if self._idle_passes > MOST_IDLE_PASSES:
            raise RunError(
                f"the first {self._first} rollouts of every prompt agreed in {MOST_IDLE_PASSES} passes over the data; "
                "use other data, or raise two_stage.first"
            )

    def metrics(self) -> dict[str, float]:
        """Return the share of prompts that passed, beside the numbers of the prompts' sampler."""
        return self._prompts.metrics() | {"two_stage/passed": self._share}

    def state(self) -> dict[str, Any]:
        """Return the state of the prompts' sampler, the idle passes and the last share."""
        return {
            "prompts": self._prompts.state(),
            "idle_passes": self._idle_passes,
            "share": self._share,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state`, with the sampler of the prompts."""
        self._prompts.load(state["prompts"])
        self._idle_passes = state["idle_passes"]
        self._share = state["share"]

"""The contract of an advantage form, and the forms by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np

from estimators.base import Estimate, Floats
from estimators.registry import Registry


class Form(ABC):
    """How the rewards of a group and the estimate they are scored with become advantages.

    A form has no state and no parameters. A rollout that could not be verified (NaN) gets advantage 0.

    Class attributes:
        name: the registered name, a value of ``--algo.advantage.estimator``.
        formula: the advantage in a few words; X is the reward, p and v are the estimated mean and variance of one.
        whitened: True if the trainer has the last step: once the advantages are spread over the response tokens (with
            a KL penalty in the reward, summed over the tokens that follow), it subtracts their mean over all response
            tokens of the batch and divides by their standard deviation.
        leave_one_out: True if :meth:`advantages` needs the estimate's ``without_each``, whatever the estimator.
    """

    name: ClassVar[str]
    formula: ClassVar[str]
    whitened: ClassVar[bool] = False
    leave_one_out: ClassVar[bool] = False

    @abstractmethod
    def advantages(self, rewards_P_G: Floats, estimate: Estimate) -> Floats:
        """The advantages, shape (P, G); 0 for a missing rollout (NaN).

        Args:
            rewards_P_G: what is optimized.
            estimate: mean and variance of one reward, for each of the P prompts, and the baseline to subtract.

        Raises:
            ValueError: the estimate's ``without_each`` is needed and missing.
        """


FORMS: Registry[Form] = Registry(
    "advantage form",
    Form,  # type: ignore[type-abstract]
    "estimators.forms",
    "openrlhf_dbb.forms",
)
"""The forms by name; other distributions declare theirs in the entry-point group ``openrlhf_dbb.forms``."""

register = FORMS.register


def centered(rewards_P_G: Floats, estimate: Estimate) -> Floats:
    """``X - baseline``, shape (P, G); 0 for a missing rollout (NaN), or one with nothing to compare it with.

    The baseline is the mean, or the mean without the rollout (:attr:`Estimate.baseline`). Source: paper, section 5
    (Dr.GRPO).
    """
    return np.nan_to_num(np.asarray(rewards_P_G, dtype=np.float64) - estimate.baseline)

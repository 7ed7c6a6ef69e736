"""Advantage forms: how rewards and an estimate become advantages; one file each.

    base                the contract: Form; its registry; X - p, which they begin with
    group_norm          (X - p) / sqrt(v): GRPO
    dr_grpo             X - p: Dr. GRPO
    reinforce_baseline  X - p, whitened over the response tokens of the batch: REINFORCE++-baseline
    rloo                X less the mean without it: RLOO

X is a reward, p and v are the estimated mean and variance of one reward.

Example:
    >>> import numpy as np
    >>> from estimators import FORMS, build
    >>> dbb, rewards_P_G = build("dbb", discount=0.5), np.array([[1.0, 0.0, 0.0, 0.0]])
    >>> state, estimate = dbb.observe(dbb.initial_state(1), rewards_P_G)  # alpha 1.5, beta 3.5
    >>> FORMS.build("dr_grpo").advantages(rewards_P_G, estimate)
    array([[ 0.7, -0.3, -0.3, -0.3]])
    >>> state, estimate = dbb.observe(dbb.initial_state(1), rewards_P_G, leave_one_out=True)
    >>> estimate.without_each  # 0.5 / 4, 1.5 / 4
    array([[0.125, 0.375, 0.375, 0.375]])
    >>> FORMS.build("rloo").advantages(rewards_P_G, estimate)
    array([[ 0.875, -0.375, -0.375, -0.375]])
"""

from estimators.forms.base import FORMS, Form, centered, register

__all__ = ["FORMS", "Form", "centered", "register"]

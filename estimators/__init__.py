"""Online estimators of a prompt's reward distribution, for any trainer; needs numpy alone.

    base             the contract: RewardEstimator, Estimate, State
    registry         names, third-party entry points; parameters, fields that say what they allow
    forms            Estimate + rewards -> advantages: GRPO, Dr. GRPO, RLOO, MaxRL and others
    dbb              Discounted Beta-Bernoulli (the paper's estimator)
    auto             DBB with a prior shared by all prompts, which is fitted online like the
                     discount; its forecasts read texts
    spo              SPO's tracker, read before the update; forgets by a constant
    gaussian         as DBB, for any real reward: a discounted Normal-inverse-gamma
    empirical_bayes  the current group, shrunk towards one prior of all prompts, fitted online
    simple           point (GRPO's mean and variance), laplace, ema
    text_prior       features of prompts from their texts, and prior means that a regression
                     predicts from them
    probe_error      squared error of an estimate, measured by extra rollouts

Axes in names: ``rewards_P_G`` is an array of P prompts by G rollouts per prompt.
"""

from openrlhf_dbb.estimators.base import (
    ESTIMATORS,
    Estimate,
    RewardEstimator,
    RewardSupportError,
    State,
    register,
)
from openrlhf_dbb.estimators.forms import FORMS, Form, standardized

available = ESTIMATORS.available
get = ESTIMATORS.get
build = ESTIMATORS.build
check_stored = ESTIMATORS.check_stored

__all__ = [
    "FORMS",
    "Estimate",
    "Form",
    "RewardEstimator",
    "RewardSupportError",
    "State",
    "available",
    "build",
    "check_stored",
    "get",
    "register",
    "standardized",
]

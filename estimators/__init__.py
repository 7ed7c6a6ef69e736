"""Online estimators of a prompt's reward distribution, for any trainer; needs numpy alone.

    base             the contract: RewardEstimator, Estimate, State
    parameters       fields that say what they allow, for estimators and rollout strategies
    registry         names: register, available, get, build; third-party entry points
    forms            Estimate + rewards -> advantages: GRPO, Dr. GRPO, RLOO, REINFORCE++-baseline, MaxRL, BNPO
    dbb              Discounted Beta-Bernoulli (the paper's estimator)
    auto             DBB with a prior shared by all prompts; prior and discount are fitted online; forecasts read texts
    spo              SPO's tracker, read before the update; forgets by a constant
    gaussian         as DBB, for any real reward: a discounted Normal-inverse-gamma
    empirical_bayes  the current group, shrunk towards one prior of all prompts, fitted online
    simple           point (GRPO's mean and variance), laplace, ema
    text_features    features of prompts from their texts alone
    text_prior       prior means that a regression predicts from these features
    probe_error      squared error of an estimate, measured by extra rollouts
    closed_form      exact bias, variance and MSE of an estimator's mean for given success probabilities

Axes in names: ``rewards_P_G`` is an array of P prompts by G rollouts per prompt.
"""

from openrlhf_dbb.estimators import closed_form
from openrlhf_dbb.estimators.base import Estimate, RewardEstimator, RewardSupportError, State
from openrlhf_dbb.estimators.forms import FORMS, Form, standardized
from openrlhf_dbb.estimators.registry import available, build, check_stored, get, register

__all__ = [
    "FORMS", "Estimate", "Form", "RewardEstimator", "RewardSupportError", "State", "available", "build",
    "check_stored", "closed_form", "get", "register", "standardized",
]  # fmt: skip

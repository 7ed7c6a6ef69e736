"""Rollout strategies: which prompts are generated for, and which groups are trained on; one file each.

    base        the contract: RolloutStrategy, Sampler, Decision; the registry
    parameters  fields that say what they allow
    plain       every prompt, every group
    dynamic     groups of zero variance are replaced (DAPO)
    greso       prompts whose groups had zero variance are skipped (GRESO)
    posterior   prompts are drawn by the variance that their posterior expects

They know neither torch nor OpenRLHF: prompts are ids, groups are arrays of scores. ``actors/generation.py`` does what
they decide.
"""

from __future__ import annotations

from types import SimpleNamespace

from estimators.registry import parameter_fields
from openrlhf_dbb.core.strategies.base import (
    STRATEGIES,
    Decision,
    Drawn,
    Predictive,
    RolloutStrategy,
    RunFacts,
    Sampler,
    SamplingError,
    register,
)
from openrlhf_dbb.core.strategies.parameters import parameter

__all__ = [
    "Decision",
    "Drawn",
    "Predictive",
    "RolloutStrategy",
    "RunFacts",
    "Sampler",
    "SamplingError",
    "available",
    "build",
    "facts",
    "get",
    "of",
    "parameter",
    "register",
]

available, get = STRATEGIES.available, STRATEGIES.get


def of(args: SimpleNamespace) -> RolloutStrategy:
    """The strategy that the arguments ask for: ``--rollout.strategy`` with its parameters.

    Raises:
        ValueError: unknown, or a parameter is outside its range.
    """
    name = args.rollout.strategy
    cls = get(name)
    return STRATEGIES.build(
        name, **{field.name: getattr(getattr(args, cls.name), field.name) for field in parameter_fields(cls)}
    )


def facts(args: SimpleNamespace) -> RunFacts:
    """What a strategy is told about the run."""
    filtering = args.algo.dynamic_filtering_enable
    return RunFacts(
        groups=args.rollout.batch_size,
        rollouts=args.rollout.n_samples_per_prompt,
        seed=args.train.seed,
        score_range=tuple(args.algo.dynamic_filtering_range) if filtering else None,
        form=args.algo.advantage.estimator,
        loss=args.actor.loss_agg_mode,
        asynchronous=args.train.async_enable,
    )


def build(args: SimpleNamespace) -> Sampler:
    """The sampler of a training; the arguments are those of a complete strategy."""
    return of(args).sampler(facts(args))

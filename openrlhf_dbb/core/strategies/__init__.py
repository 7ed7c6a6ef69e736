"""Rollout strategies: which prompts are generated for, and which groups are trained on.

    contract   RolloutStrategy, Sampler, Decision; the registry; plain: every prompt, every group
    dynamic    groups of zero variance are replaced (DAPO)
    greso      prompts whose groups had zero variance are skipped (GRESO)
    posterior  prompts are drawn by the variance that their posterior expects

Prompts are ids, groups are arrays of scores; only :func:`of` and :func:`facts` read OpenRLHF's arguments.
``actors/generation.py`` carries out the decisions.
"""

from types import SimpleNamespace

from openrlhf_dbb.core.strategies.contract import STRATEGIES
from openrlhf_dbb.core.strategies.contract import Decision as Decision
from openrlhf_dbb.core.strategies.contract import Drawn as Drawn
from openrlhf_dbb.core.strategies.contract import Predictive as Predictive
from openrlhf_dbb.core.strategies.contract import RolloutStrategy as RolloutStrategy
from openrlhf_dbb.core.strategies.contract import RunFacts as RunFacts
from openrlhf_dbb.core.strategies.contract import Sampler as Sampler
from openrlhf_dbb.core.strategies.contract import register as register
from openrlhf_dbb.core.strategies.contract import varies as varies
from openrlhf_dbb.estimators.parameters import parameter as parameter
from openrlhf_dbb.estimators.parameters import parameter_fields

available, get = STRATEGIES.available, STRATEGIES.get


def of(args: SimpleNamespace) -> RolloutStrategy:
    """Return the strategy that the arguments name; ValueError if a parameter is outside its range."""
    cls = get(args.rollout.strategy)
    given = {field.name: getattr(getattr(args, cls.name), field.name) for field in parameter_fields(cls)}
    return STRATEGIES.build(args.rollout.strategy, **given)


def facts(args: SimpleNamespace) -> RunFacts:
    """Return the facts about a run that a strategy may need."""
    filtering = args.algo.dynamic_filtering_enable
    return RunFacts(
        groups=args.rollout.batch_size,
        rollouts=args.rollout.n_samples_per_prompt,
        seed=args.train.seed,
        score_range=tuple(args.algo.dynamic_filtering_range) if filtering else None,
    )

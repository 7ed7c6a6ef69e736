"""Rollout strategies: which prompts are generated for, and which groups are trained on.

They know neither torch nor OpenRLHF: prompts are numbers, groups are arrays of scores. ``generation.py`` does what
they decide.
"""

from __future__ import annotations

from types import SimpleNamespace

from openrlhf_dbb.core.strategies.base import Sampling, SamplingError
from openrlhf_dbb.core.strategies.dynamic import DynamicSampling
from openrlhf_dbb.core.strategies.greso import GresoSampling

__all__ = ["DynamicSampling", "GresoSampling", "Sampling", "SamplingError", "build"]


def build(args: SimpleNamespace) -> Sampling:
    """The strategy that the arguments ask for (``--rollout.strategy`` and its parameters)."""
    batch = args.rollout.batch_size
    if args.rollout.strategy == "dynamic":
        dynamic = args.dynamic
        within = tuple(args.algo.dynamic_filtering_range) if args.algo.dynamic_filtering_enable else None
        return DynamicSampling(batch, dynamic.refill, dynamic.multiple, dynamic.max_rounds, within)
    if args.rollout.strategy == "greso":
        names = {name: value for name, value in vars(args.greso).items() if name != "batch"}
        return GresoSampling(batch, first_batch=args.greso.batch, seed=args.train.seed, **names)
    return Sampling(batch)

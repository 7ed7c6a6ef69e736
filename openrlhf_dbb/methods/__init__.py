"""Training methods: named recipes of flag values, one TOML file each, every value with its source."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from openrlhf_dbb import chosen, estimators
from openrlhf_dbb.errors import UsageError, did_you_mean
from openrlhf_dbb.estimators import FORMS
from openrlhf_dbb.toml_file import read_toml

FOLDER = Path(__file__).parent
NONE = "none"
_COMMON = "common"
_GROUP = "rollout.n_samples_per_prompt"

CONSTANT_LENGTH = "seq-mean-token-sum-norm"
"""The loss aggregation that we add to OpenRLHF's two: token sums over a constant length (Dr.GRPO)."""


def names() -> list[str]:
    """Return the names of all methods, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.toml") if path.stem != _COMMON)


def default_estimator(name: str) -> str | None:
    """Return the published estimator of a method; None for no method. Refuse an unknown one."""
    allowed = [*names(), NONE]
    if name not in allowed:
        hint = did_you_mean(name, allowed)
        raise UsageError(
            f"unknown --method {name!r}{hint}; known: {', '.join(allowed)} (the flags alone decide)"
        )
    return None if name == NONE else str(_read(name)["estimator"])


def recipe(name: str, estimator: str) -> dict[str, Any]:
    """Return the flag values of method ``name``; ``estimator`` decides the clip range."""
    if name == NONE:
        return {}
    common = _read(_COMMON)
    own = _read(name)
    is_wide = estimator != NONE and estimators.get(estimator).wide_clip
    entries = dict(common["flags"])
    entries.update(common["clip"]["wide" if is_wide else "narrow"])
    entries.update(own["flags"])
    entries.update(own.get("with", {}).get(estimator, {}))
    return {flag: entry["value"] for flag, entry in entries.items()}


def same_rollouts(flags: Mapping[str, Any], preset: Mapping[str, Any]) -> dict[str, int]:
    """Return the prompts of a step and passes over the data with which a method keeps a preset's rollouts."""
    scaled: dict[str, int] = {}
    if _GROUP not in flags or _GROUP not in preset:
        return scaled
    for flag in ("rollout.batch_size", "train.num_episodes"):
        if flag in preset:
            scaled[flag] = preset[flag] * preset[_GROUP] // flags[_GROUP]
    return scaled


def constant_length(args: SimpleNamespace) -> int:
    """Return the constant length in tokens: the longest response, else the longest sequence."""
    return int(args.rollout.max_new_tokens or args.data.max_len)


def describe(name: str, args: SimpleNamespace, estimator: str) -> str:
    """Return one paragraph that describes every piece of the training, from the arguments."""
    prompts = chosen.strategy(args).describe()
    if args.rollout.n_samples_per_prompt == 1:
        prompts += ", one rollout a prompt"
    loss = args.actor.loss_agg_mode
    if loss == CONSTANT_LENGTH:
        loss += f" (L = {constant_length(args)})"
    low, high = args.actor.eps_clip_low_high
    kl = args.algo.kl.init_coef
    parts = [
        prompts,
        f"estimator {estimator}",
        f"advantage {_advantage(args)}",
        f"loss {loss}",
        f"clip {low:g} {high:g}",
        f"KL {kl:g}" if kl else "no KL",
    ]
    if args.replay.samples:
        parts.append(
            f"replay of {args.replay.samples} of {args.replay.cache} cached rollouts a prompt"
        )
    if args.reward.overlong_buffer_len is not None:
        parts.append(f"overlong penalty over the last {args.reward.overlong_buffer_len:g} tokens")
    return f"{name}: " + "; ".join(parts)


def _advantage(args: SimpleNamespace) -> str:
    advantage = args.algo.advantage
    formula: str = advantage.estimator  # OpenRLHF alone computes it if it is none of our forms
    form = FORMS.available().get(formula)
    if form is not None:
        formula = form.formula
        if form.whitened and advantage.no_std_norm:
            formula += " without dividing by the deviation"
    if args.train.thin > 0:
        formula += f", thinned below {args.train.thin:g}"
    return formula


def _read(name: str) -> dict[str, Any]:
    return read_toml(FOLDER / f"{name}.toml")

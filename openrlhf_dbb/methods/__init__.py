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
    return sorted(path.stem for path in FOLDER.glob("*.toml") if path.stem != _COMMON)


def default_estimator(name: str) -> str | None:
    """Return the published estimator of a method; None for no method. Refuse an unknown one."""
    known = [*names(), NONE]
    if name not in known:
        raise UsageError(
            f"unknown --method {name!r}{did_you_mean(name, known)}; known: {', '.join(known)} (the flags alone decide)"
        )
    return None if name == NONE else str(_read(name)["estimator"])


def recipe(name: str, estimator: str) -> dict[str, Any]:
    """Return the flag values of method ``name``; ``estimator`` decides the clip range."""
    if name == NONE:
        return {}
    common, own = _read(_COMMON), _read(name)
    wide = estimator != NONE and estimators.get(estimator).wide_clip
    clip = common["clip"]["wide" if wide else "narrow"]
    values = common["flags"] | clip | own["flags"] | own.get("with", {}).get(estimator, {})
    return {flag: entry["value"] for flag, entry in values.items()}


def same_rollouts(flags: Mapping[str, Any], preset: Mapping[str, Any]) -> dict[str, int]:
    """Return the prompts of a step and passes over the data with which a method keeps a preset's rollouts."""
    if _GROUP not in flags or _GROUP not in preset:
        return {}
    scaled = ("rollout.batch_size", "train.num_episodes")
    return {flag: preset[flag] * preset[_GROUP] // flags[_GROUP] for flag in scaled if flag in preset}


def constant_length(args: SimpleNamespace) -> int:
    """Return the constant length in tokens: the longest response, else the longest sequence."""
    return int(args.rollout.max_new_tokens or args.data.max_len)


def describe(name: str, args: SimpleNamespace, estimator: str) -> str:
    """Return one paragraph that describes every piece of the training, from the arguments."""
    low, high = args.actor.eps_clip_low_high
    length = f" (L = {constant_length(args)})" if args.actor.loss_agg_mode == CONSTANT_LENGTH else ""
    advantage = args.algo.advantage
    formula = advantage.estimator  # OpenRLHF alone computes it if it is none of our forms
    if form := FORMS.available().get(formula):
        formula = form.formula + " without dividing by the deviation" * (form.whitened and advantage.no_std_norm)
    parts = [
        chosen.strategy(args).describe() + ", one rollout a prompt" * (args.rollout.n_samples_per_prompt == 1),
        f"estimator {estimator}",
        f"advantage {formula}" + f", thinned below {args.train.thin:g}" * (args.train.thin > 0),
        f"loss {args.actor.loss_agg_mode}{length}",
        f"clip {low:g} {high:g}",
        f"KL {args.algo.kl.init_coef:g}" if args.algo.kl.init_coef else "no KL",
    ]
    if args.replay.samples:
        parts.append(f"replay of {args.replay.samples} of {args.replay.cache} cached rollouts a prompt")
    if args.reward.overlong_buffer_len is not None:
        parts.append(f"overlong penalty over the last {args.reward.overlong_buffer_len:g} tokens")
    return f"{name}: " + "; ".join(parts)


def _read(name: str) -> dict[str, Any]:
    return read_toml(FOLDER / f"{name}.toml")

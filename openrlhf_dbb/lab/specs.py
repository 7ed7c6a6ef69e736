"""Read estimators from text such as ``dbb:discount=0.4``, and write them as text and flags."""

import contextlib
import dataclasses
from collections.abc import Iterable, Sequence

import msgspec

from openrlhf_dbb import estimators
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.estimators import RewardEstimator
from openrlhf_dbb.estimators.registry import parameter_fields

DISCOUNTS = (0.02, *(round(0.05 * step, 2) for step in range(1, 21)))  # tried by default

_KNOBS = ("discount", "smoothing")


def parse(text: str) -> RewardEstimator:
    """Return the estimator that ``NAME`` or ``NAME:PARAMETER=VALUE,...`` names; NAME may be ``module:Class``.

    Example:
        >>> parse("dbb:discount=0.4").discount
        0.4
    """
    # A class as module:Class has a colon too; parameters have an equals sign.
    name, _, last = text.rpartition(":")
    if not name or "=" not in last:
        name, last = text, ""
    try:
        kinds = {field.name: type(field.default) for field in parameter_fields(estimators.get(name))}
        given = (item.partition("=")[::2] for item in last.split(",") if last)
        # An unknown parameter stays text: build() refuses it and names the known ones.
        values = {key: msgspec.convert(value, kinds.get(key, str), strict=False) for key, value in given}
        return estimators.build(name, **values)
    except ValueError as error:
        raise UsageError(str(error) if repr(text) in str(error) else f"estimator {text!r}: {error}") from error


def label(estimator: RewardEstimator) -> str:
    """Return a short name as "dbb 0.25 prior_alpha=2": discount or smoothing, then what is not the default."""
    value = knob_value(estimator)
    others = family(estimator).removeprefix(estimator.name)
    return f"{estimator.name}{'' if value is None else f' {value:g}'}{others}"


def family(estimator: RewardEstimator) -> str:
    """Return the label without the discount or smoothing; it names a curve over them."""
    text = estimator.name
    for field in parameter_fields(type(estimator)):
        value = getattr(estimator, field.name)
        if field.name not in _KNOBS and value != field.default:
            text += f" {field.name}={value:g}" if isinstance(value, float) else f" {field.name}={value}"
    return text


def knob(estimator: RewardEstimator) -> str | None:
    """Return ``discount`` or ``smoothing``, whichever is a parameter; None if neither is."""
    return next((field.name for field in parameter_fields(type(estimator)) if field.name in _KNOBS), None)


def knob_value(estimator: RewardEstimator) -> float | None:
    """Return the estimator's discount or smoothing; None if it has neither."""
    name = knob(estimator)
    return None if name is None else float(getattr(estimator, name))


def swept(estimator: RewardEstimator, values: Iterable[float]) -> list[RewardEstimator]:
    """Return the estimator with each of the discounts (or smoothings) that it allows, else itself."""
    name = knob(estimator)
    if name is None:
        return [estimator]
    variants = []
    for value in values:
        with contextlib.suppress(ValueError):  # outside its range, such as 1 for ema
            variants.append(dataclasses.replace(estimator, **{name: value}))  # type: ignore[type-var]
    return variants


def sweep(texts: Sequence[str], discounts: Sequence[float] = DISCOUNTS) -> list[RewardEstimator]:
    """Return the candidates that texts name; one without a discount stands for all."""
    candidates: dict[str, RewardEstimator] = {}
    for text in texts:
        estimator = parse(text)
        variants = [estimator] if f"{knob(estimator)}=" in text else swept(estimator, discounts)
        candidates |= {label(variant): variant for variant in variants}
    return list(candidates.values())


def flags(estimator: RewardEstimator) -> str:
    """Return the training command's flags for an estimator, as "--estimator dbb --dbb.discount 0.4"."""
    cls = type(estimator)
    known = estimators.available().get(estimator.name) is cls
    parts = [f"--estimator {estimator.name if known else f'{cls.__module__}:{cls.__qualname__}'}"]
    for field in parameter_fields(cls):
        value = getattr(estimator, field.name)
        flag = f"{estimator.name}.{field.name}"
        if isinstance(value, bool) and value != field.default:
            parts.append(f"--{'' if value else 'no-'}{flag}")
        elif value != field.default or field.name in _KNOBS:
            parts.append(f"--{flag} {value}")
    return " ".join(parts)

"""Estimators as text: parses candidates, sweeps their discounts, gives their labels and flags."""

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
    """Return the estimator that ``NAME`` or ``NAME:PARAMETER=VALUE,...`` names.

    NAME may be ``module:Class``.

    Raises:
        UsageError: the name or a parameter is unknown, or a value is not allowed.
    """
    name = text
    assignments = []
    if "=" in text:  # a class as module:Class has a colon, too
        name, _, last = text.rpartition(":")
        assignments = last.split(",")
    values = {}
    try:
        fields = parameter_fields(estimators.get(name))
        kinds = {field.name: type(field.default) for field in fields}
        for assignment in assignments:
            key, _, value = assignment.partition("=")
            # An unknown parameter stays text: build() refuses it and names the known ones.
            values[key] = msgspec.convert(value, kinds.get(key, str), strict=False)
        return estimators.build(name, **values)
    except ValueError as error:
        problem = str(error)
        if repr(text) not in problem:
            problem = f"estimator {text!r}: {problem}"
        raise UsageError(problem) from error


def sweep(texts: Sequence[str], discounts: Sequence[float] = DISCOUNTS) -> list[RewardEstimator]:
    """Return the candidates that texts name; one without a discount stands for all.

    Raises:
        UsageError: a text names no estimator.
    """
    candidates: dict[str, RewardEstimator] = {}
    for text in texts:
        estimator = parse(text)
        variants = [estimator]
        if f"{knob(estimator)}=" not in text:
            variants = swept(estimator, discounts)
        for variant in variants:
            candidates[label(variant)] = variant
    return list(candidates.values())


def swept(estimator: RewardEstimator, values: Iterable[float]) -> list[RewardEstimator]:
    """Return the estimator with each of the discounts (or smoothings) that it allows.

    An estimator without a discount is returned as it is.
    """
    name = knob(estimator)
    if name is None:
        return [estimator]
    variants = []
    for value in values:
        with contextlib.suppress(ValueError):  # outside its range, such as 1 for ema
            variant = dataclasses.replace(estimator, **{name: value})  # type: ignore[type-var]
            variants.append(variant)
    return variants


def knob(estimator: RewardEstimator) -> str | None:
    """Return ``discount`` or ``smoothing``, whichever is a parameter; None if neither is."""
    for field in parameter_fields(type(estimator)):
        if field.name in _KNOBS:
            return field.name
    return None


def knob_value(estimator: RewardEstimator) -> float | None:
    """Return the estimator's discount or smoothing; None if it has neither."""
    name = knob(estimator)
    return None if name is None else float(getattr(estimator, name))


def label(estimator: RewardEstimator) -> str:
    """Return a short name as "dbb 0.25 prior_alpha=2".

    It has the discount or smoothing, then what is not the default.
    """
    value = knob_value(estimator)
    others = family(estimator).removeprefix(estimator.name)
    if value is None:
        return estimator.name + others
    return f"{estimator.name} {value:g}{others}"


def family(estimator: RewardEstimator) -> str:
    """Return the label without the discount or smoothing; it names a curve over them."""
    text = estimator.name
    for field in parameter_fields(type(estimator)):
        value = getattr(estimator, field.name)
        if field.name in _KNOBS or value == field.default:
            continue
        shown = f"{value:g}" if isinstance(value, float) else value
        text += f" {field.name}={shown}"
    return text


def flags(estimator: RewardEstimator) -> str:
    """Return the training command's flags, as "--estimator dbb --dbb.discount 0.4"."""
    cls = type(estimator)
    name = estimator.name
    if estimators.available().get(name) is not cls:
        name = f"{cls.__module__}:{cls.__qualname__}"
    parts = [f"--estimator {name}"]
    for field in parameter_fields(cls):
        value = getattr(estimator, field.name)
        is_default = value == field.default
        flag = f"{estimator.name}.{field.name}"
        if isinstance(value, bool) and not is_default:
            parts.append(f"--{flag}" if value else f"--no-{flag}")
        elif not is_default or field.name in _KNOBS:
            parts.append(f"--{flag} {value}")
    return " ".join(parts)

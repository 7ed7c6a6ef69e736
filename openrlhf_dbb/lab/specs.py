"""Estimators as they are written on the laboratory's command line: ``dbb:discount=0.4,prior_alpha=2``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import estimators
from estimators import RewardEstimator
from openrlhf_dbb.errors import UsageError

_KNOBS = ("discount", "smoothing")
_SWITCH = {"true": True, "false": False}


def parse(text: str) -> RewardEstimator:
    """The estimator that ``NAME`` or ``NAME:PARAMETER=VALUE,...`` stands for; NAME may be ``module:Class``.

    Raises:
        UsageError: no such estimator or parameter, or a value outside its range.

    Example:
        >>> parse("dbb:discount=0.4").discount
        0.4
    """
    name, _, last = text.rpartition(":")
    if not name or "=" not in last:
        name, last = text, ""
    try:
        fields = {field.name: field for field in _fields(estimators.get(name))}
        parameters = {}
        for item in last.split(",") if last else ():
            parameter, equals, value = item.partition("=")
            if not equals:
                raise ValueError(f"{item!r} is not PARAMETER=VALUE")
            known = parameter in fields
            parameters[parameter] = _value(parameter, value, fields[parameter].default) if known else value
        return estimators.build(name, **parameters)
    except ValueError as error:
        raise UsageError(f"estimator {text!r}: {error}") from error


def label(estimator: RewardEstimator) -> str:
    """Short name for tables: always with the discount or smoothing, with other parameters if not the default.

    Example:
        >>> label(parse("dbb")), label(parse("dbb:discount=0.25,prior_alpha=2")), label(parse("point"))
        ('dbb 0.5', 'dbb 0.25 prior_alpha=2', 'point')
    """
    on_axis = knob(estimator)
    name = f"{estimator.name} {getattr(estimator, on_axis):g}" if on_axis else estimator.name
    return name + _others(estimator)


def family(estimator: RewardEstimator) -> str:
    """The label without the discount or smoothing: the name of a curve over it.

    Example:
        >>> family(parse("dbb:discount=0.25,prior_alpha=2"))
        'dbb prior_alpha=2'
    """
    return estimator.name + _others(estimator)


def families(estimators: Iterable[RewardEstimator]) -> dict[str, RewardEstimator]:
    """One estimator for each curve over the discount or smoothing, by the curve's name."""
    return {family(estimator): estimator for estimator in estimators if knob(estimator)}


def knob(estimator: RewardEstimator) -> str | None:
    """The parameter that curves are drawn over, ``discount`` or ``smoothing``; None if it has neither."""
    names = estimator.parameter_names()
    return next((name for name in _KNOBS if name in names), None)


def turned(estimator: RewardEstimator, value: float) -> RewardEstimator | None:
    """The estimator with its knob at ``value``; None if that is outside its range.

    Example:
        >>> label(turned(parse("dbb"), 1.0)), turned(parse("ema"), 1.0)
        ('dbb 1', None)
    """
    on_axis = knob(estimator)
    assert on_axis is not None
    try:
        return _replaced(estimator, **{on_axis: value})
    except ValueError:
        return None


def swept(estimator: RewardEstimator, values: Iterable[float]) -> dict[float, RewardEstimator]:
    """The estimator with its knob at each of the values that are in its range."""
    candidates = {value: turned(estimator, value) for value in values}
    return {value: candidate for value, candidate in candidates.items() if candidate is not None}


def with_updates_per_epoch(estimator: RewardEstimator, updates: int) -> RewardEstimator:
    """The estimator with ``updates_per_epoch`` filled in, if it has this parameter and leaves it open (0)."""
    if getattr(estimator, "updates_per_epoch", None) != 0:
        return estimator
    return _replaced(estimator, updates_per_epoch=float(updates))


def with_prior(estimator: RewardEstimator, alpha: float, beta: float) -> RewardEstimator:
    """The estimator with the prior Beta(alpha, beta), if it has such a prior.

    Raises:
        ValueError: alpha or beta is outside its range.
    """
    if "prior_alpha" not in estimator.parameter_names():
        return estimator
    return _replaced(estimator, prior_alpha=alpha, prior_beta=beta)


def _replaced(estimator: RewardEstimator, **parameters: Any) -> RewardEstimator:
    changed: RewardEstimator = dataclasses.replace(estimator, **parameters)  # type: ignore[type-var]
    return changed


def _others(estimator: RewardEstimator) -> str:
    """All parameters but the knob that differ from their default, each after a space."""
    text = ""
    for field in _fields(type(estimator)):
        value = getattr(estimator, field.name)
        if field.name != knob(estimator) and value != field.default:
            text += f" {field.name}={value:g}" if isinstance(value, float) else f" {field.name}={value}"
    return text


def _fields(cls: type[RewardEstimator]) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()


def _value(parameter: str, text: str, default: Any) -> Any:
    if isinstance(default, bool):
        if text.lower() not in _SWITCH:
            raise ValueError(f"{parameter} = {text!r} is neither true nor false")
        return _SWITCH[text.lower()]
    try:
        return type(default)(text)
    except ValueError as error:
        raise ValueError(f"{parameter} = {text!r} is not of type {type(default).__name__}") from error

"""Parameters of a rollout strategy: dataclass fields that say what they allow, and the check of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any


def parameter(
    default: Any,
    help: str,
    *,
    within: str | None = None,
    least: float | None = None,
    choices: Sequence[str] = (),
    why: str = "",
    default_text: str = "",
    may_change: bool = False,
) -> Any:
    """A field of a strategy, which is its flag ``--NAME.FIELD``.

    Args:
        default: None if it depends on the run: ``complete`` then fills it in.
        help: the flag's help; the default is added to it.
        within: the range of allowed values, such as "(0, 1]"; a round bracket excludes its end.
        least: the lowest allowed value, where there is no highest.
        choices: the allowed values of a text.
        why: what would happen below ``least``, for the message.
        default_text: how a default of None comes about, such as "1.5 x --rollout.batch_size".
        may_change: a resumed run may be given another value.
    """
    metadata = {
        "help": help,
        "within": within,
        "least": least,
        "choices": tuple(choices),
        "why": why,
        "default_text": default_text,
        "may_change": may_change,
    }
    return dataclasses.field(default=default, metadata=metadata)


def check(strategy: Any, name: str) -> None:
    """Check every parameter that has a value against what its field allows.

    Raises:
        ValueError: naming the flag, the value and what is allowed.
    """
    for field in dataclasses.fields(strategy):
        value, allowed = getattr(strategy, field.name), field.metadata
        if value is None:
            continue
        shown = f"--{name}.{field.name} {value:g}" if isinstance(value, float) else f"--{name}.{field.name} {value}"
        if allowed.get("choices") and value not in allowed["choices"]:
            raise ValueError(f"{shown} is unknown; use one of {', '.join(allowed['choices'])}")
        if allowed.get("least") is not None and not value >= allowed["least"]:
            raise ValueError(
                f"{shown} is below {allowed['least']}" + (f": {allowed['why']}" if allowed.get("why") else "")
            )
        if allowed.get("within") and not _lies_within(value, allowed["within"]):
            raise ValueError(f"{shown} is not in {allowed['within']}")


def _lies_within(value: float, text: str) -> bool:
    low, high = (float(end) for end in text[1:-1].split(","))
    above = value > low if text[0] == "(" else value >= low
    below = value < high if text[-1] == ")" else value <= high
    return above and below

import dataclasses
from collections.abc import Sequence
from typing import Any


def parameter(default: Any, help: str, *, within: str = "", choices: Sequence[str] = ()) -> Any:
    """Return a dataclass field with a default, a help line and the values that it allows.

    Args:
        help: one line, without the default; the command line shows it.
        within: the allowed interval, such as "(0, 1]" or "[0, inf)". A round bracket excludes its end.
        choices: the allowed values, if the parameter is a text.
    """
    metadata = {"help": help, "within": within, "choices": tuple(choices)}
    return dataclasses.field(default=default, metadata=metadata)


def parameter_fields(cls: type) -> tuple[dataclasses.Field[Any], ...]:
    """Return the parameters of a class: its dataclass fields, if it has any."""
    return dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()


def check(owner: Any) -> None:
    """Compare every parameter of an estimator or strategy with what its field allows.

    Raises:
        ValueError: "NAME.FIELD = VALUE is not in (0, 1]", for the first parameter out of range.
    """
    for field in dataclasses.fields(owner):
        value, within, choices = (getattr(owner, field.name), *map(field.metadata.get, ("within", "choices")))
        if within and not (isinstance(value, (int, float)) and _lies_within(value, within)):
            raise ValueError(f"{owner.name}.{field.name} = {value!r} is not in {within}")
        if choices and value not in choices:
            raise ValueError(f"{owner.name}.{field.name} = {value!r} is none of {', '.join(choices)}")


def _lies_within(value: float, interval: str) -> bool:
    low, high = (float(end) for end in interval[1:-1].split(","))
    above = value > low if interval[0] == "(" else value >= low
    below = value < high if interval[-1] == ")" else value <= high
    return above and below  # False for NaN

"""A prompt as a strategy draws it; a checkpoint keeps those that are left of a batch."""

from typing import NamedTuple


class Drawn(NamedTuple):
    """A prompt that the strategy has chosen."""

    prompt_id: int
    inclusion: float  # probability with which the prompt is in the batch, fixed before anything is generated
    weight: float  # factor on the prompt's advantages, > 0
    as_even: float = 1.0  # probability with even draws, over ``inclusion``
    as_forecast: float = 1.0  # probability with draws by the forecast, over ``inclusion``
    # Of its group, if the strategy gives each prompt its own number. Those of a batch sum to B N.
    rollouts: int | None = None

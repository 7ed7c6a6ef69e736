"""Scalars that OpenRLHF logged, read from TensorBoard's event files.

Axes: T points of a tag.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Scalars(NamedTuple):
    """One TensorBoard tag.

    Attributes:
        step: (T,) ascending.
        value: (T,) logged at these steps.
        wall_time: (T,) seconds since 1970 when they were logged.
    """

    step: Floats
    value: Floats
    wall_time: Floats


def read_scalars(folder: Path) -> dict[str, Scalars]:
    """Return the scalars of a folder's event files by tag; a folder without event files gives an empty dictionary.

    A resumed run logs some steps again; the last value of a step counts.

    Raises:
        ImportError: tensorboard is not installed.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})  # 0: all of them
    accumulator.Reload()
    scalars = {}
    for tag in accumulator.Tags()["scalars"]:
        last = {event.step: event for event in sorted(accumulator.Scalars(tag), key=lambda event: event.wall_time)}
        rows = [(step, last[step].value, last[step].wall_time) for step in sorted(last)]
        scalars[tag] = Scalars(*np.array(rows, dtype=np.float64).T)
    return scalars

"""Scalars that a training logged, read from TensorBoard's event files."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np


class Scalars(NamedTuple):
    """The points of one tag: ascending steps, their values, and seconds since 1970 when they were logged."""

    step: np.ndarray
    value: np.ndarray
    wall_time: np.ndarray


def read_scalars(folder: Path) -> dict[str, Scalars]:
    """Return the scalars of a folder's event files by tag; of a step that was logged again, the last value."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})  # 0: all of them
    accumulator.Reload()
    scalars = {}
    for tag in accumulator.Tags()["scalars"]:
        last = {
            event.step: event
            for event in sorted(accumulator.Scalars(tag), key=lambda event: event.wall_time)
        }
        rows = [(step, last[step].value, last[step].wall_time) for step in sorted(last)]
        scalars[tag] = Scalars(*np.array(rows, dtype=np.float64).T)
    return scalars

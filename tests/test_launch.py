"""The example in CONTRIBUTING.md."""

import re
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]


def test_the_estimator_in_contributing_keeps_the_contract():
    sources = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.DOTALL)
    [source] = [source for source in sources if "RewardEstimator" in source]
    names = {"__name__": "contributing_example"}
    exec(source.replace("@register\n", ""), names)
    average = names["MovingAverage"](keep=0.5)
    state, estimate = average.observe(average.initial_state(1), np.array([[1.0, 1.0, np.nan]]))
    # 0.5 * 0.5 + 0.5 * 1
    assert (state["average"][0], estimate.mean[0], estimate.variance[0]) == (0.75, 0.75, 0.1875)

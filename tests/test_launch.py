"""What Ray is asked for, and the documents' examples."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

from openrlhf_dbb.driver import arguments, cluster

ROOT = Path(__file__).parents[1]
SEPARATE = ["--no-train.colocate_all", "--actor.num_gpus_per_node", "2", "--vllm.num_engines", "3"]


@pytest.mark.parametrize(
    ("flags", "gpus"),
    [
        (["--actor.num_gpus_per_node", "2", "--vllm.num_engines", "2"], 2),  # colocated: shared
        (SEPARATE, 2 + 3),
        ([*SEPARATE, "--vllm.tensor_parallel_size", "2"], 2 + 6),
        ([*SEPARATE, "--algo.kl.init_coef", "0.1", "--ref.num_gpus_per_node", "1"], 2 + 3 + 1),
        ([*SEPARATE, "--algo.kl.init_coef", "0.1", "--train.colocate_actor_ref"], 2 + 3),
    ],
)
def test_gpus_are_counted_as_openrlhf_reserves_them(flags, gpus):
    assert cluster.gpus_needed(arguments.parse(["--preset", "tiny", *flags]).args) == gpus


def test_the_estimator_in_contributing_keeps_the_contract():
    sources = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.DOTALL)
    [source] = [source for source in sources if "RewardEstimator" in source]
    names = {"__name__": "contributing_example"}
    exec(source.replace("@register\n", ""), names)
    average = names["MovingAverage"](keep=0.5)
    state, estimate = average.observe(average.initial_state(1), np.array([[1.0, 1.0, np.nan]]))
    # 0.5 * 0.5 + 0.5 * 1
    assert (state["average"][0], estimate.mean[0], estimate.variance[0]) == (0.75, 0.75, 0.1875)


def test_the_methods_and_their_pieces_are_documented():
    from openrlhf_dbb import methods
    from openrlhf_dbb.core import strategies
    from openrlhf_dbb.driver import flags

    text = (ROOT / "docs/methods.md").read_text()
    for name in methods.names():
        assert f"| `{name}` |" in text
    named = [flag for flag, _, _ in flags._PIECES]
    for name, cls in strategies.available().items():
        named += [f"--{name}.{field.name}" for field in dataclasses.fields(cls)]
    for flag in ["--rollout.strategy", *named]:
        assert re.search(re.escape(flag) + r"(?![\w.])", text), flag

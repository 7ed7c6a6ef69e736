"""What a trainer's checkpoint keeps of a strategy comes back as it was, value by value and type by type."""

import re
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from openrlhf_dbb.core import exact_json, strategies
from openrlhf_dbb.core.strategies import Drawn, Predictive, RunFacts

CONTRIBUTING = Path(__file__).parents[1] / "CONTRIBUTING.md"
PREDICTIVE = Predictive(np.arange(10, 30), np.linspace(0.5, 5, 20), np.linspace(5, 0.5, 20))


def same(one, other):
    """Whether two values are equal, with equal types, at every depth."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.random.Generator):
        return same(one.bit_generator.state, other.bit_generator.state)
    if isinstance(one, np.ndarray):
        found = (one.dtype, one.shape, one.tobytes())
        return found == (other.dtype, other.shape, other.tobytes())
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    is_nan = one != one and other != other
    return one == other or is_nan


@pytest.mark.parametrize(
    "value",
    [
        {7: 2, -1: 3},
        {"7": 2, 7: 3, None: 4, (1, 2): 5, 2.5: 6},
        {True: "a", "python": "tuple", "value": [1]},
        {"bit_generator": "PCG64"},
        [(), (1, (2, [3])), Drawn(4, 0.25, 2.0), {5, 6}, frozenset([7])],
        [0.1, 1e308, float("inf"), float("nan"), -0.0, 2**70, None, True, "\ud800é\0"],
        np.arange(6, dtype=np.float32).reshape(2, 3),
        [
            np.zeros((0, 3), dtype=np.int8),
            np.array(5),
            np.float64(0.1),
            np.int64(3),
            np.bool_(True),
        ],
        {"empty": {}, "list": []},
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_comes_back_as_it_was(value):
    assert same(exact_json.loads(exact_json.dumps(value, "x")), value)


def test_a_draw_of_an_older_checkpoint_has_the_values_that_came_later_by_default():
    text = '{"python": "Drawn", "value": [4, 0.25, 2.0, 1.0, 1.0]}'
    assert exact_json.loads(text) == Drawn(4, 0.25, 2.0, rollouts=None)


@pytest.mark.parametrize("kind", ["PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"])
def test_a_generator_goes_on_with_the_same_numbers(kind):
    random = np.random.Generator(getattr(np.random, kind)(3))
    random.integers(10, dtype=np.int32)  # leaves half of a number for later
    again = exact_json.loads(exact_json.dumps({"random": random}, "x"))["random"]
    assert same(again, random)
    assert (
        again.integers(10, size=5, dtype=np.int32).tolist()
        == random.integers(10, size=5, dtype=np.int32).tolist()
    )


@pytest.mark.parametrize(
    "value", [Counter(a=1), object(), b"12", np.array([None]), 1j, [lambda: 1]]
)
def test_what_cannot_be_kept_is_refused(value):
    with pytest.raises(
        ValueError, match=r"^the state of strategy 'mine' holds .*JSON cannot keep; use"
    ):
        exact_json.dumps({"deep": [value]}, "the state of strategy 'mine'")


def test_what_older_checkpoints_hold_is_read():
    state = np.random.default_rng(5).bit_generator.state
    text = '{"strategy": {"_random": %s, "_batch": [[3, 0.5, 1.0, 1.0, 1.0]]}, "left": 4}'
    read = exact_json.loads(text % str(state).replace("'", '"'))
    assert (read["left"], read["strategy"]["_batch"]) == (4, [[3, 0.5, 1.0, 1.0, 1.0]])
    assert read["strategy"]["_random"].random() == np.random.default_rng(5).random()


@pytest.fixture(scope="module")
def rest(tmp_path_factory):
    """The strategy that CONTRIBUTING.md shows as an example."""
    sources = re.findall(r"```python\n(.*?)```", CONTRIBUTING.read_text(), flags=re.DOTALL)
    [source] = [source for source in sources if "RolloutStrategy" in source]
    folder = tmp_path_factory.mktemp("other")
    (folder / "resting.py").write_text(source.replace("@register\n", ""))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield "resting:Rest"
        sys.modules.pop("resting", None)


def decisions(strategy, sampler, seed, steps):
    """What a sampler decides in some steps, for groups with random scores."""
    random = np.random.default_rng(seed)
    for _ in range(steps):
        yield sampler.round_size(4)
        for prompt in random.permutation(np.arange(10, 30)).tolist()[:6]:
            drawn = sampler.next_prompt(lambda: PREDICTIVE) if strategy.draws else None
            scores = random.integers(0, 2, size=3).astype(float)
            yield drawn, sampler.skips(prompt), sampler.judge(prompt, scores)
            if drawn is not None:
                sampler.observe(drawn, bool(scores.min() < scores.max()))
        sampler.end_step()
        sampler.end_pass()
        yield sampler.metrics()


@pytest.mark.parametrize("name", [*strategies.available(), "the example"])
@pytest.mark.parametrize("seed", range(5))
def test_a_strategy_s_state_comes_back_as_it_was_and_decides_the_same(rest, name, seed):
    strategy = strategies.STRATEGIES.build(rest if name == "the example" else name)
    facts = RunFacts(groups=4, rollouts=3, seed=seed)
    sampler = strategy.sampler(facts)
    other = strategy.sampler(facts)
    list(decisions(strategy, sampler, seed, seed + 1))
    state = sampler.state()
    again = exact_json.loads(exact_json.dumps(state, "x"))
    assert same(again, state)
    assert state or name in ("plain", "dynamic")
    other.load(again)
    assert list(decisions(strategy, other, 9, 4)) == list(decisions(strategy, sampler, 9, 4))


@pytest.mark.parametrize(
    "text",
    [
        '{"python": "tuple"}',
        '{"python": "tuple", "value": 3}',
        '{"python": "unknown", "value": 1}',
        '{"python": "array", "value": ""}',
        '{"python": "Drawn", "value": [1]}',
        '{"python": "dict", "value": [[[], 1]]}',
        '{"bit_generator": "unknown"}',
    ],
)
def test_a_damaged_state_is_refused_as_broken_json_is(text):
    with pytest.raises(ValueError, match="is no state of a strategy"):
        exact_json.loads(text)


def test_a_refused_part_is_told_in_one_line():
    with pytest.raises(ValueError, match="masked_array") as refused:
        exact_json.dumps(np.ma.array([1], mask=[1]), "the state")
    assert "\n" not in str(refused.value)

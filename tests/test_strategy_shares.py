"""Fixed shares by source: what is drawn after each number of draws, and what does not fit the data."""

import pickle
from collections import Counter

import numpy as np
import pytest

from openrlhf_dbb import Posteriors, estimators
from openrlhf_dbb.core.filling import Answer
from openrlhf_dbb.core.host import Capability
from openrlhf_dbb.core.loop import Loop
from openrlhf_dbb.core.rules import Plan, refusal
from openrlhf_dbb.core.strategies import Predictive, RunFacts
from openrlhf_dbb.core.strategies.shares import Shares

SOURCES = {number: "math" if number < 20 else "code" for number in range(30)}
SOURCES |= {number: "chat" for number in range(30, 40)} | {40: "logic"}


def sampler(text, groups=10, sources=SOURCES, seed=0):
    return Shares(of=text).sampler(RunFacts(groups, rollouts=4, seed=seed, sources=sources))


def draws(made, count):
    return [made.next_prompt(lambda: None).prompt_id for _ in range(count)]


@pytest.mark.parametrize(
    ("text", "shares"),
    [
        ("math=0.5,code=0.3,rest", {"math": 0.5, "code": 0.3, "rest": 0.2}),
        (" math = 0.5 , rest", {"math": 0.5, "rest": 0.5}),
        ("a=b=1", {"a=b": 1.0}),
        ("rest=0.4,code=0.6", {"rest": 0.4, "code": 0.6}),
        ("rest", {"rest": 1.0}),
    ],
)
def test_shares_are_read(text, shares):
    assert Shares(of=text).by_name == pytest.approx(shares)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("math", "'math' is no source"),
        ("math=half,rest", "'math=half' is no source"),
        ("math=0,rest", "'math=0' is no source"),
        ("math=nan,rest", "'math=nan' is no source"),
        ("math=0.2,math=0.3,rest", "'math=0.3' gives 'math' a second share"),
        ("", "'' is no source"),
        ("math=0.5,code=0.3", "sum to 0.8; give"),
        ("math=0.5,code=0.7,rest", "sum to 1.2; give"),
        ("math=0.5,code=0.5,rest", "sum to 1; give"),
        (0.5, "0.5 is not a text; write"),
    ],
)
def test_a_text_without_shares_is_refused_in_one_line(text, problem):
    with pytest.raises(ValueError, match=rf"^shares\.of.*{problem}") as refused:
        Shares(of=text)
    assert "\n" not in str(refused.value)


def test_shares_are_exact_and_not_by_chance():
    """Ten prompts a step: five, three and two; and after any number of draws less than one off."""
    for seed in range(3):
        made = sampler("math=0.5,code=0.3,rest", seed=seed)
        drawn = [SOURCES[prompt_id] for prompt_id in draws(made, 200)]
        for step in range(20):
            assert Counter(drawn[10 * step : 10 * step + 10])["math"] == 5
            assert Counter(drawn[10 * step : 10 * step + 10])["code"] == 3
        for count in range(1, 201):
            there = Counter(drawn[:count])
            assert abs(there["math"] - 0.5 * count) < 1
            assert abs(there["code"] - 0.3 * count) < 1


def test_a_share_of_no_whole_number_of_prompts_is_exact_over_the_run():
    made = sampler("math=0.37,code=0.21,rest", groups=7)
    drawn = Counter(SOURCES[prompt_id] for prompt_id in draws(made, 700))
    assert (drawn["math"], drawn["code"]) == (259, 147)


def test_each_prompt_of_a_source_comes_once_before_any_comes_again():
    made = sampler("math=0.5,code=0.3,rest")
    drawn = draws(made, 100)
    for name, number in (("math", 20), ("code", 10)):
        of_source = [prompt_id for prompt_id in drawn if SOURCES[prompt_id] == name]
        first = of_source[:number]
        assert sorted(first) == [number for number in SOURCES if SOURCES[number] == name]
        assert len(set(of_source[number : 2 * number])) == number
    rest = [prompt_id for prompt_id in drawn if SOURCES[prompt_id] in ("chat", "logic")]
    assert sorted(rest[:11]) == list(range(30, 41))
    assert made.metrics() == {
        "shares/math/passes": 2.5, "shares/code/passes": 3.0, "shares/rest/passes": 20 / 11,
    }  # fmt: skip


def test_no_prompt_comes_twice_in_a_step():
    """A pass over ten prompts ends within a step of seven, of which it gives four."""
    sources = {number: "few" if number < 10 else "many" for number in range(100)}
    for seed in range(5):
        made = sampler("few=0.55,rest", groups=7, sources=sources, seed=seed)
        for _ in range(40):
            assert len(set(draws(made, 7))) == 7
            made.end_step()


def test_a_source_that_runs_out_is_said():
    made = sampler("math=0.5,code=0.3,rest")
    draws(made, 33)
    assert made.note == ""
    draws(made, 3)
    assert "all 10 prompts of 'code' have been drawn once" in made.note


def test_a_checkpoint_goes_on_with_the_same_prompts():
    made = sampler("math=0.5,code=0.3,rest")
    draws(made, 17)
    state = pickle.dumps(made.state())
    expected = draws(made, 40)
    again = sampler("math=0.5,code=0.3,rest", seed=9)
    again.load(pickle.loads(state))
    assert draws(again, 40) == expected


@pytest.mark.parametrize(
    ("text", "groups", "problem"),
    [
        ("math=0.5,code=0.5", 10, "names no share of source 'chat'.*add it, or rest"),
        ("maths=0.5,rest", 10, "gives a share to 'maths', of which the data has no prompt; leave"),
        (
            "math=0.3,code=0.3,chat=0.3,logic=0.05,rest",
            10,
            "share to 'rest', of which the data has no prompt",
        ),
        (
            "code=0.9,rest",
            12,
            "source 'code' has 10 prompts, and a step takes up to 11 of them; lower",
        ),
    ],
)
def test_sources_that_do_not_fit_are_refused(text, groups, problem):
    with pytest.raises(ValueError, match=problem):
        sampler(text, groups)


def test_shares_need_sources_and_no_forecast():
    assert Shares(of="a=0.5,rest").needs == {Capability.DRAW, Capability.SOURCES}
    assert Shares().needs == {Capability.DRAW}
    assert refusal(Plan(estimators.build("gaussian"), strategy=Shares(of="a=0.5,rest"))) is None


def test_without_shares_each_prompt_comes_once_a_pass():
    made = Shares().sampler(RunFacts(2, 4))
    known = Predictive(np.arange(5), np.ones(5), np.ones(5))
    drawn = [made.next_prompt(lambda: known).prompt_id for _ in range(10)]
    assert sorted(drawn[:5]) == sorted(drawn[5:]) == list(range(5))


def generate(requests):
    return [
        Answer([request.prompt] * request.rollouts, np.arange(request.rollouts) % 2.0)
        for request in requests
    ]


def test_a_loop_draws_by_the_sources_of_its_posteriors_and_counts_them(tmp_path):
    texts, labels = [f"{number}" for number in range(12)], ["1"] * 12
    sources = ["math"] * 9 + ["code"] * 3
    url = f"sqlite:///{tmp_path}/runs.db"
    options = {"groups": 4, "rollouts": 2, "strategy": "shares"}
    with Posteriors.create(url, "run", texts, labels, sources=sources) as posteriors:
        loop = Loop(
            posteriors, texts, labels, generate,
            strategy_parameters={"of": "math=0.5,code=0.5"}, **options,
        )  # fmt: skip
        for _ in range(5):
            metrics = loop.step().metrics
            assert (metrics["source/math/groups"], metrics["source/code/groups"]) == (2, 2)
        assert metrics["shares/code/passes"] == 10 / 3
    with (
        Posteriors.create(url, "other", texts, labels) as posteriors,
        pytest.raises(
            ValueError, match="'shares' needs the source of each prompt; name its column"
        ),
    ):
        Loop(
            posteriors, texts, labels, generate,
            strategy_parameters={"of": "math=0.5,code=0.5"}, **options,
        )  # fmt: skip

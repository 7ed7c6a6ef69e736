"""Laws every rollout strategy obeys, ours and one of another package: the example of CONTRIBUTING.md."""

import dataclasses
import math
import pickle
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from openrlhf_dbb import chosen, methods
from openrlhf_dbb.core import strategies
from openrlhf_dbb.core.strategies import Decision, Predictive, RolloutStrategy, RunFacts
from openrlhf_dbb.driver import arguments, checks
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.estimators.registry import Registry

CONTRIBUTING = Path(__file__).parents[1] / "CONTRIBUTING.md"
OTHERS = "their_strategies:Rest"
FACTS = RunFacts(groups=6, rollouts=4, seed=3)
PROMPTS = 20

every_strategy = pytest.mark.parametrize("name", [*strategies.available(), OTHERS])


@pytest.fixture(scope="module", autouse=True)
def other_package(tmp_path_factory):
    """The example of CONTRIBUTING.md as a module that can be imported; it does not register itself here."""
    sources = re.findall(r"```python\n(.*?)```", CONTRIBUTING.read_text(), flags=re.DOTALL)
    [source] = [source for source in sources if "RolloutStrategy" in source]
    folder = tmp_path_factory.mktemp("other")
    (folder / "their_strategies.py").write_text(source.replace("@register\n", ""))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield
        sys.modules.pop("their_strategies", None)


def parse(name, *argv):
    return arguments.parse(["--preset", "tiny", "--rollout.strategy", name, *argv])


@every_strategy
def test_its_parameters_are_flags_with_help_and_a_range_that_a_continued_run_must_keep(name):
    cls = strategies.get(name)
    actions = {
        action.dest: action
        for action in arguments.build_parser(["--rollout.strategy", name])._actions
    }
    for field in dataclasses.fields(cls):
        flag = f"{cls.name}.{field.name}"
        assert field.metadata["help"] in actions[flag].help
        assert actions[flag].default == field.default
        if field.metadata["choices"]:
            assert list(actions[flag].choices) == list(field.metadata["choices"])
            with pytest.raises(ValueError, match=f"^{flag} = 'other' is none of"):
                cls(**{field.name: "other"})
            continue
        if not field.metadata["within"]:  # a text that the class reads
            assert isinstance(field.default, str)
            continue
        low = field.metadata["within"][1:-1].split(",")[0]
        wrong = type(field.default)(low) - 1
        message = f"{flag} = {wrong} is not in {field.metadata['within']}"
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            cls(**{field.name: wrong})
        with pytest.raises(UsageError, match=f"^--{re.escape(message)}$"):
            parse(name, f"--{flag}", str(wrong))


@every_strategy
def test_the_command_line_chooses_it(name):
    settings = parse(name)
    facts = RunFacts(groups=64, rollouts=8, seed=42)
    checks.check(settings)
    assert (chosen.facts(settings.args), settings.strategy) == (facts, strategies.get(name)())
    text = settings.strategy.describe()
    assert text and "\n" not in text
    assert f": {text}; " in methods.describe("none", settings.args, settings.estimator)


def steps(strategy, sampler, first, count):
    """The prompts that are drawn, and what becomes of them; prompt i succeeds in (i modulo 5) / 4 of its rollouts."""
    share = (np.arange(PROMPTS) + first) % 5 / 4
    predictive = Predictive(np.arange(PROMPTS), 0.1 + 2 * share, 2.1 - 2 * share)
    for step in range(first, first + count):
        assert sampler.round_size(FACTS.groups) >= 1
        decisions = []
        for place in range(PROMPTS):
            drawn = sampler.next_prompt(lambda: predictive) if strategy.draws else None
            prompt_id = drawn.prompt_id if drawn else place
            decision = decided(strategy, sampler, prompt_id, step, drawn)
            decisions.append(decision)
            yield prompt_id, decision
        assert Decision.TRAIN in decisions
        sampler.end_step()
        sampler.end_pass()
        assert all(math.isfinite(value) for value in sampler.metrics().values())
        yield sampler.metrics()


def decided(strategy, sampler, prompt_id, step, drawn):
    """What becomes of a prompt's group; None if it is skipped."""
    if sampler.skips(prompt_id):
        assert strategy.needs_budget
        return None
    scores = np.random.default_rng([prompt_id, step]).random(FACTS.rollouts) < prompt_id % 5 / 4
    judged = scores[: sampler.first_rollouts(prompt_id)]
    decision = sampler.judge(prompt_id, judged.astype(float))
    if decision is Decision.MORE:
        assert len(judged) < FACTS.rollouts
        decision = sampler.judge(prompt_id, scores.astype(float))
    if decision is not Decision.TRAIN:
        assert strategy.needs_scores
        assert len(set(judged)) == 1
    if drawn:
        sampler.observe(drawn, len(set(scores)) > 1)
    return decision


@every_strategy
def test_groups_that_vary_are_trained_on_and_a_checkpoint_continues_with_the_same_decisions(name):
    strategy = strategies.STRATEGIES.build(name)
    sampler = strategy.sampler(FACTS)
    list(steps(strategy, sampler, 0, 5))
    state = pickle.dumps(sampler.state())
    expected = list(steps(strategy, sampler, 5, 10))
    resumed = strategy.sampler(dataclasses.replace(FACTS, seed=99))
    resumed.load(pickle.loads(state))
    assert list(steps(strategy, resumed, 5, 10)) == expected


@pytest.mark.parametrize(
    ("score_range", "scores", "trained"),
    [
        # The known scores vary.
        (None, [1, 0, 0], True), (None, [1, 1, 1], False), (None, [1, math.nan], False), (None, [math.nan], False),
        # Their mean is within, the bounds are not.
        ((0.25, 0.75), [1, 1, 0, 0], True), ((0.25, 0.75), [1, 0, 0, 0], False),
    ],
)  # fmt: skip
def test_only_dynamic_sampling_replaces_groups_that_do_not_vary_or_whose_mean_is_out_of_range(
    score_range, scores, trained
):
    for name, expected in (
        ("plain", Decision.TRAIN),
        ("dynamic", Decision.TRAIN if trained else Decision.REPLACE),
    ):
        sampler = strategies.get(name)().sampler(
            RunFacts(groups=4, rollouts=2, score_range=score_range)
        )
        assert sampler.judge(0, np.array(scores, dtype=float)) is expected


def test_an_installed_package_declares_a_strategy(tmp_path, monkeypatch):
    package = tmp_path / "theirs-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(f"[openrlhf_dbb.strategies]\nrest = {OTHERS}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    # Not our registry, which would keep it.
    registry = Registry(
        "rollout strategy",
        RolloutStrategy,
        "openrlhf_dbb.core.strategies",
        "openrlhf_dbb.strategies",
    )
    assert registry.get("rest") is strategies.get(OTHERS)

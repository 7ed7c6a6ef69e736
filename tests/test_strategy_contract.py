"""Laws every rollout strategy obeys, ours and one of another package: the example of CONTRIBUTING.md."""

import dataclasses
import math
import pickle
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from estimators.registry import Registry
from openrlhf_dbb import methods
from openrlhf_dbb.core import strategies
from openrlhf_dbb.core.strategies import Decision, Predictive, RolloutStrategy, RunFacts
from openrlhf_dbb.driver import arguments, checks, flags
from openrlhf_dbb.errors import UsageError

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
        yield folder
        sys.modules.pop("their_strategies", None)


def parse(name, *argv):
    return arguments.parse(["--preset", "tiny", "--rollout.strategy", name, *argv])


def outside(field):
    """A value that the field does not allow."""
    low = field.metadata["within"][1:-1].split(",")[0]
    return type(field.default)(low) - 1


class Training:
    """A strategy at work on 20 prompts, which succeed in 0 to 100 % of their rollouts."""

    def __init__(self, strategy, facts=FACTS, place=0):
        self.sampler, self.draws, self.place = strategy.sampler(facts), strategy.draws, place
        self.asked, self.decisions = set(), set()

    def scores(self, prompt_id):
        successes = np.random.default_rng([prompt_id, self.place]).random(FACTS.rollouts) < prompt_id % 5 / 4
        return successes.astype(float)

    def predictive(self):
        """One that moves with the training: successes and failures expected of 2 rollouts."""
        share = (np.arange(PROMPTS) + self.place) % 5 / 4
        return Predictive(np.arange(PROMPTS), 0.1 + 2 * share, 2.1 - 2 * share)

    def next_prompt(self):
        if not self.draws:
            prompt_id = self.place % PROMPTS
            return prompt_id, self.sampler.rollouts(prompt_id)
        drawn = self.sampler.next_prompt(self.predictive)
        assert drawn.prompt_id in range(PROMPTS) and 0 < drawn.inclusion <= 1 and drawn.weight > 0
        return drawn.prompt_id, FACTS.rollouts

    def draw(self, count):
        drawn = []
        while len(drawn) < count:
            prompt_id, asked = self.next_prompt()
            self.place += 1
            self.asked.add(asked)
            if asked:
                drawn.append(prompt_id)
            if self.place % PROMPTS == 0:
                self.sampler.end_pass()
                break
        return drawn

    def step(self):
        """The prompts that are trained on."""
        trained = []
        while len(trained) < FACTS.groups:
            size = self.sampler.round_size(FACTS.groups - len(trained))
            assert size >= 1
            waiting = self.draw(size)
            while waiting:
                prompt_id = waiting.pop(0)
                decision = self.sampler.judge(prompt_id, self.scores(prompt_id))
                self.decisions.add(decision)
                if decision is Decision.TRAIN:
                    trained.append(prompt_id)
                elif decision is Decision.REPLACE:
                    waiting += self.draw(1)
            self.sampler.end_round()
        self.sampler.end_step()
        return trained[: FACTS.groups]


def build(name):
    return strategies.STRATEGIES.build(name)


@every_strategy
def test_its_parameters_are_flags_with_help_and_a_range(name):
    cls = strategies.get(name)
    parser = flags.build_parser(["--rollout.strategy", name])
    actions = {action.dest: action for action in parser._actions}
    for field in dataclasses.fields(cls):
        action = actions[f"{cls.name}.{field.name}"]
        assert field.metadata["help"] in action.help
        assert action.default == field.default
        with pytest.raises(ValueError) as caught:
            cls(**{field.name: outside(field)})
        assert str(caught.value) == f"{cls.name}.{field.name} = {outside(field)} is not in {field.metadata['within']}"
        with pytest.raises(UsageError, match=rf"^--{cls.name}\.{field.name} = {outside(field)} is not in [^\n]+$"):
            parse(name, f"--{cls.name}.{field.name}", str(outside(field)))
        assert methods.is_piece(f"{cls.name}.{field.name}", cls())  # a continued run must keep it


@every_strategy
def test_the_command_line_chooses_it(name):
    settings = parse(name)
    checks.check(settings)
    facts = RunFacts(groups=64, rollouts=8, seed=42)
    assert settings.facts == facts
    assert settings.strategy == build(name)
    assert type(strategies.build(settings.args)) is type(settings.strategy.sampler(facts))
    text = settings.strategy.describe()
    assert text and "\n" not in text
    assert f": {text}; " in methods.describe("none", settings.args, settings.estimator)


@every_strategy
def test_batches_are_filled_with_whole_groups_and_metrics_are_finite(name):
    strategy = build(name)
    training = Training(strategy)
    for _ in range(30):
        assert len(training.step()) == FACTS.groups
        assert all(math.isfinite(value) for value in training.sampler.metrics().values())
    assert training.asked <= ({0, FACTS.rollouts} if strategy.needs_budget else {FACTS.rollouts})
    assert strategy.needs_scores or training.decisions == {Decision.TRAIN}


@every_strategy
def test_a_group_whose_rewards_differ_is_trained_on(name):
    sampler = build(name).sampler(FACTS)
    for scores in ([1, 0, 0, 1], [0.25, 0.5, 0.75, 0.5], [1, 0, np.nan, np.nan]):
        assert sampler.judge(0, np.array(scores, dtype=float)) is Decision.TRAIN


@every_strategy
def test_a_checkpoint_continues_with_the_same_decisions(name):
    strategy = build(name)
    first = Training(strategy)
    for _ in range(5):
        first.step()
    state = pickle.dumps(first.sampler.state())
    place = first.place
    expected = [(first.step(), first.sampler.metrics()) for _ in range(10)]
    assert pickle.dumps(pickle.loads(state)) == state

    resumed = Training(strategy, dataclasses.replace(FACTS, seed=99), place)
    resumed.sampler.load(pickle.loads(state))
    assert [(resumed.step(), resumed.sampler.metrics()) for _ in range(10)] == expected


def test_the_example_of_contributing_lets_solved_prompts_rest():
    sampler = strategies.STRATEGIES.build(OTHERS, passes=2).sampler(FACTS)
    assert sampler.judge(7, np.ones(4)) is Decision.TRAIN
    assert sampler.judge(8, np.array([1, 1, 1, np.nan])) is Decision.TRAIN
    asked = []
    for _ in range(4):
        asked.append((sampler.rollouts(7), sampler.rollouts(8), sampler.metrics()["rest/resting"]))
        sampler.end_pass()
    assert asked == [(0, 4, 1), (0, 4, 1), (0, 4, 1), (4, 4, 0)]  # the rest of this pass, and two more


@pytest.mark.parametrize(
    "name", ["math:sqrt", "their_strategies:Nothing", "openrlhf_dbb.core.strategies:RolloutStrategy"]
)
def test_what_is_no_strategy_is_refused(name):
    with pytest.raises(UsageError, match=f"^--rollout.strategy: .*{name}.* (not a subclass|cannot be imported)"):
        parse(name)


def test_an_installed_package_declares_a_strategy(tmp_path, monkeypatch):
    package = tmp_path / "theirs-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(f"[openrlhf_dbb.strategies]\nrest = {OTHERS}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry = Registry(
        "rollout strategy", RolloutStrategy, "openrlhf_dbb.core.strategies", "openrlhf_dbb.strategies"
    )  # not ours, which would keep it
    assert registry.get("rest") is strategies.get(OTHERS)

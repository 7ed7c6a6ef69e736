"""What every trainer's integration promises: its lists, the table made of them, and how another one is added."""

import ast
import asyncio
import re
import sys
import threading
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from openrlhf_dbb import estimators
from openrlhf_dbb.core import rules
from openrlhf_dbb.core.host import FEATURES, Capability, Host
from openrlhf_dbb.core.replay import Replay
from openrlhf_dbb.core.strategies import STRATEGIES
from openrlhf_dbb.integrations.hosts import HOSTS
from openrlhf_dbb.integrations.shared import Settings

ROOT = Path(__file__).parents[1]
NAMES = [feature.name for feature in FEATURES]
NEEDS = {feature.name: feature.needs for feature in FEATURES}


@cache
def _tests_of(file):
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("host", HOSTS, ids=lambda host: host.name)
def test_every_feature_has_a_test_that_exists_or_a_reason(host):
    for feature, test in host.tested.items():
        file, _, name = test.partition("::")
        assert feature in NAMES and name in _tests_of(file)
    for feature in NAMES:
        assert (feature in host.tested) != (NEEDS[feature] in host.lacks), feature
    for reason in host.lacks.values():
        assert reason and not reason.endswith(".")


@pytest.mark.parametrize("host", HOSTS, ids=lambda host: host.name)
def test_what_a_trainer_lacks_is_refused_with_its_name_and_reason(host):
    dbb = estimators.build("dbb")
    for name in STRATEGIES.available():
        strategy = STRATEGIES.build(name)
        line = rules.refusal(rules.Plan(dbb, strategy=strategy, group=8, host=host))
        lacking = strategy.needs & host.lacks.keys()
        assert bool(line) == bool(lacking)
        if lacking:
            [capability] = lacking
            assert line.startswith(f"strategy='{name}' ")
            for piece in (host.name, host.lacks[capability], "; use strategy="):
                assert piece in line
    line = rules.refusal(rules.Plan(dbb, host=host, others=[Replay(samples=1)]))
    assert bool(line) == (Capability.EXTRA_ROWS in host.lacks)
    if line:
        for piece in (host.name, host.lacks[Capability.EXTRA_ROWS], "; leave it out"):
            assert piece in line


@pytest.mark.parametrize(
    ("name", "value"), [("pass_rate_column", "a"), ("source_column", "a"), ("probe_fraction", 1)]
)
def test_a_setting_that_asks_a_trainer_for_what_it_lacks_is_refused(name, value):
    settings = Settings(estimator="dbb", **{name: value})
    poor = Host("a trainer", dict.fromkeys(Capability, "it is fixed"), {})
    with pytest.raises(ValueError, match=rf"{name}\S* .*a trainer .*it is fixed; leave it out"):
        settings.check(poor, {})
    settings.check(Host("a trainer", {}, {}), {})
    Settings(estimator="dbb").check(poor, {})


def rows_of(table):
    """The cells of each row of a table in Markdown, below its header."""
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [list(map(str.strip, line.strip("|").split("|"))) for line in lines[2:]]


def test_the_page_has_the_table_of_the_lists(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import hosts_table

    page = hosts_table.PAGE.read_text(encoding="utf-8")
    assert hosts_table.with_table(page) == page
    shared, _, rest = hosts_table.table().partition("\n")
    shared_names = shared.removeprefix("All of them have: ").removesuffix(".").split(", ")
    rows = rows_of(rest)
    assert {*shared_names, *(name for name, *_ in rows)} == set(NAMES)
    assert all(name in host.tested for name in shared_names for host in HOSTS)
    for name, *answers in rows:
        assert "no" in answers
        expected = ["yes" if name in host.tested else "no" for host in HOSTS]
        assert answers == expected


# The sketch of a further host in examples/


@pytest.fixture
def sketch():
    """The names that the sketch defines."""
    path = ROOT / "examples" / "another_host.py"
    code = path.read_text()
    assert code.count("\n") <= 90
    module = type(sys)("sketch")
    exec(compile(code, str(path), "exec"), module.__dict__)
    return module


@pytest.fixture
def orchestrator():
    """An event loop in a thread, as the orchestrator's."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


EXAMPLES = [
    {"prompt": [{"role": "user", "content": f"{row}+1="}], "answer": row + 1} for row in range(6)
]
REWARDS = ["1010", "1111", "0000", "1001", "0110", "0101"]  # of a row's rollouts


@pytest.mark.parametrize("strategy", ["plain", "dynamic", "posterior", "two_stage"])
def test_the_sketch_of_another_host_trains(sketch, orchestrator, tmp_path, strategy):
    begun = dict.fromkeys(range(6), 0)

    async def generate(row, rollouts):
        await asyncio.sleep(0.001 * (6 - row))  # the last ones are finished first
        first = begun[row] % 4
        begun[row] += rollouts
        return [
            {"row": row, "reward": float(reward)}
            for reward in REWARDS[row][first : first + rollouts]
        ]

    engine = sketch.Rollouts(generate, orchestrator)
    url = f"sqlite:///{tmp_path}/runs.db"
    memory = sketch.Memory(url, "sixth", EXAMPLES, engine, strategy, groups=2, rollouts=4)
    with memory.posteriors as posteriors:
        for number in (1, 2, 3):
            rollouts, advantages = memory.step()
            rewards = np.array([rollout["reward"] for rollout in rollouts]).reshape(2, 4)
            assert np.isfinite(advantages).all()
            if strategy in ("dynamic", "two_stage"):
                assert (rewards.std(axis=1) > 0).all()
            folder = tmp_path / f"step_{number}"
            folder.mkdir()
            memory.save(folder)
        [(steps, generated)] = posteriors.store.query("SELECT count(*), sum(generated) FROM steps")
    assert (steps, generated) == (3, sum(begun.values()))


def test_the_sketch_refuses_what_it_lacks(sketch):
    plan = rules.Plan(estimators.build("dbb"), host=sketch.PRIME_RL, others=[Replay(samples=1)])
    assert re.search(r"prime-rl does not: this sketch .*; leave it out", rules.refusal(plan))

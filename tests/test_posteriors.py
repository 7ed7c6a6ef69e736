"""The public Posteriors on both databases, without a training framework: text and known rates in, advantages out."""

import json
import math
import signal
import subprocess
import sys
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from filler import check

from openrlhf_dbb import Posteriors
from openrlhf_dbb.core.posteriors import MemorySupportError
from openrlhf_dbb.core.scale import own_estimator
from openrlhf_dbb.core.step import Responses, StepExtras
from openrlhf_dbb.estimators import FORMS, available, build
from openrlhf_dbb.estimators.dbb import DiscountedBetaBernoulli
from openrlhf_dbb.storage import StoreError, open_store

PROMPTS = ["1+1=", "2+2=", "3+3="]
LABELS = ["2", "4", "6"]
DATA = PROMPTS, LABELS
HALF = {"estimator": "dbb", "parameters": {"discount": 0.5}}


def group(prompt, rewards):
    """The columns of one group, as ``observe`` takes them."""
    return [PROMPTS[prompt]] * len(rewards), [LABELS[prompt]] * len(rewards), rewards


def batch(rewards_P_G):
    """The columns of a group of each prompt."""
    size = len(rewards_P_G[0])
    texts, labels = (
        [value for value in values for _ in range(size)] for values in (PROMPTS, LABELS)
    )
    return texts, labels, np.concatenate(rewards_P_G)


def history(url, run="demo"):
    with open_store(url) as store:
        return store.query(
            "SELECT step, prompt, rollouts, successes, alpha, beta FROM posterior_history "
            "JOIN prompts USING (prompt_id) JOIN runs USING (run_id) WHERE runs.name = :run ORDER BY step, prompt",
            run=run,
        )


def forecast(posteriors):
    """Alpha and beta before the next visit, (2, P), in the order of the data."""
    expected = posteriors.predictive()
    places = np.searchsorted(expected.prompt_ids, list(posteriors.prompt_ids.values()))
    by_text = dict(
        zip(posteriors.prompt_ids, np.array([expected.alpha, expected.beta]).T[places], strict=True)
    )
    return np.array([by_text[key] for key in zip(*DATA, strict=True)]).T


def test_two_steps_by_hand(url):
    with Posteriors.create(url, "demo", *DATA, **HALF) as posteriors:
        first = posteriors.observe(1, *group(0, [1, 1, 1, 1]))
        # alpha, beta = 0.5 + 4, 0.5: all rollouts succeed, and each still gets sqrt(beta / alpha)
        assert first.mean.tolist() == [0.9] * 4 and first.variance == pytest.approx([0.09] * 4)
        assert first.advantages == pytest.approx([1 / 3] * 4)
        assert first.zero_variance.tolist() == first.rescued.tolist() == [1.0] * 4
        second = posteriors.observe(2, *group(0, [0, 0, 1, None]))
        # 2.25 + 1, 0.25 + 2 of the three that were verified
        mean = 3.25 / 5.5
        assert second.mean == pytest.approx([mean] * 4)
        deviation = math.sqrt(mean * (1 - mean))
        assert second.advantages == pytest.approx(
            [-mean / deviation] * 2 + [(1 - mean) / deviation, 0]
        )
        assert second.metrics["estimator/missing"] == 0.25
        assert posteriors.step == 2
    assert history(url) == [(1, "1+1=", 4, 4.0, 4.5, 0.5), (2, "1+1=", 3, 1.0, 3.25, 2.25)]


def test_rewards_are_optimized_and_scores_estimated_from(new_url):
    with Posteriors.create(new_url("sqlite"), "demo", *DATA, **HALF) as posteriors:
        # alpha, beta = 0.5 + 1, 0.5 + 1; the second rollout has a length penalty, the third one's reward is missing
        scored = posteriors.observe(1, *group(0, [1, -0.5, None]), scores=[1, 0, 1], form="dr_grpo")
    assert scored.advantages.tolist() == [0.5, -1.0, 0.0]
    assert scored.group_std == pytest.approx([1.5 / math.sqrt(2)] * 3)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_warm_start_begins_with_another_runs_posteriors(url, new_url, kind, elsewhere):
    source = new_url(kind) if elsewhere else url
    with Posteriors.create(source, "old", *DATA, **HALF) as old:
        old.observe(1, *group(0, [1, 1, 1, 1]))
        old.finish()
    options = {"warm_start": "old", "warm_start_weight": 0.5} | (
        {"warm_start_store": source} if elsewhere else {}
    )
    with Posteriors.create(url, "new", *DATA, **HALF, **options) as new:
        assert (new.warm_start.matched, new.warm_start.unmatched) == (1, 2)
        # 0.5 * 0.5 * 4.5 + 2, 0.5 * 0.5 * 0.5
        assert new.observe(1, *group(0, [1, 1])).mean == pytest.approx([3.125 / 3.25] * 2)


def test_a_mistyped_store_of_a_warm_start_is_named_and_not_created(tmp_path):
    missing = tmp_path / "nothere.db"
    options = {"warm_start": "old", "warm_start_store": f"sqlite:///{missing}"}
    with pytest.raises(StoreError, match=f"there is no store at {missing}; check the path"):
        Posteriors.create(f"{tmp_path}/new.db", "new", *DATA, **options)
    assert not missing.exists()


def test_a_warm_start_of_the_same_file_may_be_given_by_its_url(tmp_path):
    url = f"sqlite:///{tmp_path}/runs.db"
    with Posteriors.create(url, "old", *DATA, **HALF) as old:
        old.observe(1, *group(0, [1, 1, 1, 1]))
        old.finish()
    (tmp_path / "link.db").symlink_to(tmp_path / "runs.db")
    for name in ("runs", "link"):
        options = {"warm_start": "old", "warm_start_store": f"{tmp_path}/{name}.db"}
        with Posteriors.create(url, f"from-{name}", *DATA, **HALF, **options) as new:
            assert new.warm_start.matched == 1


def test_spo_begins_as_its_public_code_with_a_warm_start(new_url):
    url = new_url("sqlite")
    prior = {"discount": 1.0, "prior_alpha": 0.5, "prior_beta": 0.5}
    with Posteriors.create(url, "offline", *DATA, estimator="dbb", parameters=prior) as offline:
        offline.observe(1, *group(0, [1, 1, 1, 0, 0, 0, 0, 0]))
    with Posteriors.create(
        url, "spo", *DATA, estimator="spo", warm_start="offline", warm_start_weight=8 / 9
    ) as posteriors:
        # alpha, beta = 8 (3 + 0.5) / 9, 8 (5 + 0.5) / 9; the others have the prior
        assert posteriors.observe(1, *group(0, [1])).mean[0] == pytest.approx(3.5 / 9)
        posteriors.observe(2, *group(1, [1, 0]))
    expected = [0.96 * 28 / 9 + 1, 0.96 * 44 / 9, 0.96 * 0.5 + 1, 0.96 * 0.5 + 1]
    assert [value for row in history(url, "spo") for value in row[4:]] == pytest.approx(expected)


def test_a_warm_start_goes_on_with_the_count_of_updates(url):
    """So that the groups of the new run are later than all of the old one."""
    with Posteriors.create(url, "old", *DATA, estimator="auto") as old:
        old.observe(1, *group(0, [1, 1, 1, 1]))
        old.observe(2, *group(1, [0, 0]))
    with Posteriors.create(url, "new", *DATA, estimator="auto", warm_start="old") as new:
        new.observe(1, *group(1, [1, 1]))
        new.settle()
        ids = np.array([new.prompt_ids[key] for key in zip(*DATA, strict=True)])
        state = dict(zip(new.estimator.state_fields, new.run.load(ids[:2]).state.T, strict=True))
        assert (state["seen_1"].tolist(), state["seen_2"].tolist()) == ([1, 3], [0, 2])
        assert new.run.load_shared()["clock"].tolist() == [3, 3]


@dataclass(frozen=True)
class Mine(DiscountedBetaBernoulli):
    """An estimator that this package does not know."""

    name: ClassVar[str] = "mine"


def test_an_estimator_of_ones_own_is_an_object_and_is_found_again(new_url, monkeypatch):
    url = new_url("sqlite")
    monkeypatch.setitem(sys.modules, Mine.__module__, sys.modules[Mine.__module__])
    with Posteriors.create(url, "demo", *DATA, estimator=Mine(discount=0.25)) as posteriors:
        # alpha, beta = 0.25 + 2, 0.25
        assert posteriors.observe(1, *group(0, [1, 1])).mean.tolist() == [0.9, 0.9]
    with Posteriors.resume(url, "demo", *DATA) as posteriors:
        assert posteriors.estimator == Mine(discount=0.25)


def test_a_module_that_only_a_database_names_is_not_imported(new_url, tmp_path, monkeypatch, fill):
    (tmp_path / "theirs.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with open_store(url := new_url("sqlite")) as store:
        run = fill.run(store, "demo", estimator="theirs:Theirs")
    with pytest.raises(
        ValueError,
        match=r"'theirs:Theirs'.* give --estimator theirs:Theirs, or import theirs",
    ):
        Posteriors.resume(url, "demo", *DATA)
    assert own_estimator(run.record) is None


def test_no_secret_is_stored(new_url):
    url = "http://me:hunter2/x@h/a?token=hunter2,https://hunter2@h/b#hunter2"
    config = {
        "a": [{"api_key": "hunter2"}, (url,)],
        "hub_token": "hunter2",
        "empty_token": None,
        "label_key": "answer",
    }
    text = dict.fromkeys(("model", "dataset", "reward"), url)
    with Posteriors.create(new_url("sqlite"), "demo", *DATA, **text, config=config) as posteriors:
        record = posteriors.run.record
        masked = "http://***@h/a?***,https://***@h/b#***"
    assert (record.model, record.dataset, record.reward) == (masked,) * 3
    hidden = {
        "a": [{"api_key": "***"}, [masked]],
        "hub_token": "***",
        "empty_token": None,
        "label_key": "answer",
    }
    assert record.config == hidden


def test_no_secret_of_a_checkpoints_tag_or_of_a_metrics_name_is_stored(new_url):
    url = new_url("sqlite")
    with Posteriors.create(url, "demo", *DATA) as posteriors:
        posteriors.observe(*PAIR)
        posteriors.record_metrics(1, {"loss of s3://key:hunTer2Zq9@bucket/a": 0.5, "loss/a": 1.0})
        posteriors.checkpoint(1, "s3://key:hunTer2Zq9@bucket/step1")
        posteriors.checkpoint(1, "global_step1")
        run = posteriors.run.record
    with open_store(url) as store:
        tags = store.checkpoints(run)
        [row] = store.query("SELECT metrics FROM dbb_step WHERE run_id = :run", run=run.run_id)
    assert tags == [(1, "global_step1"), (1, "s3://***@bucket/step1")]
    assert json.loads(row.metrics) == {"loss of s3://***@bucket/a": 0.5, "loss/a": 1.0}


PAIR = 1, *group(0, [1, 0])
BAD = [
    ((2, *group(0, [1])), "step 2 of run 'demo' is not the next one, 1"),
    (
        (1, ["1+1="], ["2"], [1, 0]),
        r"rewards has shape \(2,\); pass one value for each of the 1 rollouts",
    ),
    ((1, ["who?"], ["2"], [1]), "prompt 'who[?]' with label '2' is not in the data set"),
    ((1, *group(0, [0.5])), r"score 0.5 of prompt '1\+1=' is not 0 or 1, as memory 'dbb' needs"),
    (
        (1, *group(0, [0.9999999999999999])),
        r"score 0.9999999999999999 of prompt '1\+1=' is not 0 or 1, .*give the verifier's verdict, 0 or 1",
    ),
    (("1", *group(0, [1])), "step is '1'; give a whole number"),
    ((1, [None], ["2"], [1]), "row 1 of prompts is None, which is not a str"),
    ((1, "1", ["2"], [1]), "prompts = '1' is not a list"),
    ((*PAIR, {"scores": ["1", "0"]}), "row 1 of scores is '1'; give finite numbers"),
    ((*PAIR, {"scores": [0, math.inf]}), "row 2 of scores is inf; give finite numbers"),
    (
        (*PAIR, {"extras": StepExtras(tokens=[-1, 2])}),
        r"row 1 of tokens is -1; give numbers in \[0",
    ),
    (
        (*PAIR, {"extras": StepExtras(tokens=[1, 0.5])}),
        "row 2 of tokens is 0.5; give whole numbers",
    ),
    ((*PAIR, {"extras": StepExtras(weights=[math.nan, 1])}), "row 1 of weights is nan"),
    (
        (*PAIR, {"extras": StepExtras(weights=[1, 0])}),
        r"row 2 of weights is 0; give numbers in \(0, inf\)",
    ),
    (
        (*PAIR, {"extras": StepExtras(inclusion=[0, 1])}),
        r"row 1 of inclusion is 0; give numbers in \(0, 1\]",
    ),
    (
        (*PAIR, {"extras": StepExtras(inclusion=[1, 1.0000000000000002])}),
        r"row 2 of inclusion is 1.0000000000000002; give numbers in \(0, 1\]",
    ),
    (
        (*PAIR, {"extras": StepExtras(policy_versions=[0, 1])}),
        r"row 2 of policy_versions is 1; give numbers in \[0, 0\]",
    ),
    (
        (*PAIR, {"extras": StepExtras(trained=[True, 0.5])}),
        "row 2 of trained is 0.5; give True or False",
    ),
    ((*PAIR, {"extras": StepExtras(skipped=-1)}), "skipped is -1; give a whole number"),
    (
        (*PAIR, {"extras": StepExtras(responses=Responses(["a", 1]))}),
        "row 2 of response texts is 1",
    ),
    ((*PAIR, {"extras": StepExtras(read=["a"])}), "there are 2 prompts and 1 texts that were read"),
    (
        (*PAIR, {"extras": StepExtras(responses=Responses(["", ""], keep=-1))}),
        "keep is -1; give a whole number from 0",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[case[1][:30] for case in BAD])
def test_bad_input_is_one_error_and_changes_nothing(new_url, arguments, message):
    url = new_url("sqlite")
    options = arguments[4] if len(arguments) > 4 else {}
    with Posteriors.create(url, "demo", *DATA, **HALF) as posteriors:
        with pytest.raises(ValueError, match=message):
            posteriors.observe(*arguments[:4], **options)
        assert posteriors.observe(1, *group(0, [1, 1, 1, 1])).mean.tolist() == [0.9] * 4
    assert history(url) == [(1, "1+1=", 4, 4.0, 4.5, 0.5)]


def unseen_steps(posteriors, steps):
    """Each of these steps visits the first prompt, without a score, and the second one."""
    for step in steps:
        posteriors.observe(
            step, *[[*a, *b] for a, b in zip(group(0, [None] * 2), group(1, [1, 0]), strict=True)]
        )


NEVER_SCORED = [(PROMPTS[0], LABELS[0])]


@pytest.fixture
def unseen(url):
    """A store whose run has three steps without a score of the first prompt, the last after a resume."""
    with Posteriors.create(url, "demo", *DATA) as posteriors:
        unseen_steps(posteriors, (1, 2))
        assert posteriors.unverified == []
        assert not posteriors.predictive().unverified.any()
    with Posteriors.resume(url, "demo", *DATA) as posteriors:
        unseen_steps(posteriors, [3])
    return url


def test_a_prompt_without_any_score_is_counted_also_over_a_resume(unseen):
    with Posteriors.resume(unseen, "demo", *DATA) as posteriors:
        assert posteriors.unverified == NEVER_SCORED
        number = posteriors.prompt_ids[NEVER_SCORED[0]]
        place = posteriors.predictive().prompt_ids.tolist().index(number)
        assert np.flatnonzero(posteriors.predictive().unverified).tolist() == [place]
        assert posteriors.observe(4, *group(0, [None] * 2)).metrics["estimator/unverified"] == 1


def test_roll_back_forgets_the_steps_without_a_score(unseen):
    with Posteriors.resume(unseen, "demo", *DATA) as posteriors:
        posteriors.roll_back(2)
        assert posteriors.unverified == []
        unseen_steps(posteriors, (3, 4))
        assert posteriors.unverified == NEVER_SCORED
    with open_store(unseen) as store:
        assert check(store) == []


def test_a_score_forgives_the_steps_without_one(unseen):
    with Posteriors.resume(unseen, "demo", *DATA) as posteriors:
        posteriors.observe(4, *group(0, [1, None]))
        assert posteriors.unverified == []
        unseen_steps(posteriors, (5, 6))
    with Posteriors.resume(unseen, "demo", *DATA) as posteriors:
        assert posteriors.unverified == []
        unseen_steps(posteriors, [7])
        assert posteriors.unverified == NEVER_SCORED
    with open_store(unseen) as store:
        assert check(store) == []


def test_another_run_does_not_begin_with_the_counts_of_steps_without_a_score(unseen):
    with Posteriors.create(unseen, "new", *DATA, warm_start="demo") as new:
        assert new.unverified == []
        assert "unverified" not in new.run.load_shared()


@pytest.mark.parametrize("estimator", available())
def test_a_step_without_any_score_is_a_step_that_teaches_nothing(new_url, estimator):
    options = {"estimator": estimator}
    url = new_url("sqlite")
    with (
        Posteriors.create(url, "demo", *DATA, **options) as posteriors,
        Posteriors.create(url, "other", *DATA, **options) as other,
    ):
        scored = posteriors.observe(1, *group(0, [None, math.nan, None]))
        assert scored.advantages.tolist() == [0, 0, 0] and scored.metrics["estimator/missing"] == 1
        found, wanted = (
            each.observe(each.step + 1, *batch(GROUPS)) for each in (posteriors, other)
        )
        np.testing.assert_allclose(found.mean, wanted.mean, rtol=1e-12)
    assert [row[0] for row in history(url)] == [2, 2, 2]


def test_one_rollout_a_prompt_is_refused_where_it_can_have_no_advantage(new_url):
    with Posteriors.create(new_url("sqlite"), "demo", *DATA) as posteriors:
        with pytest.raises(
            ValueError,
            match=r"'point' with .* 1 in the step: .*\b2 .*estimator='auto'",
        ):
            posteriors.observe(1, *DATA, [1, 0, 1])
        # a group that is large enough gives the step an advantage
        posteriors.observe(1, ["1+1=", "1+1=", "2+2="], ["2", "2", "4"], [1, 0, 1])
        assert posteriors.step == 1


def column_kinds():
    """Columns of an own loop that hold the prompts of DATA, labels and the rewards 1, 0, missing."""
    torch = pytest.importorskip("torch")
    pandas = pytest.importorskip("pandas")
    plain = [1.0, 0.0, math.nan]
    filtered = pandas.Series(["-", *PROMPTS])[1:]  # its index begins with 1
    return {
        "bfloat16": (PROMPTS, torch.tensor(plain, dtype=torch.bfloat16)),
        "with gradients": (PROMPTS, torch.tensor(plain, requires_grad=True)),
        "list of tensors": (PROMPTS, list(torch.tensor(plain, dtype=torch.bfloat16))),
        "masked": (PROMPTS, np.ma.array([1.0, 0.0, 9.0], mask=[False, False, True])),
        "view": (dict.fromkeys(PROMPTS).keys(), dict(enumerate(plain)).values()),
        "generator": ((prompt for prompt in PROMPTS), iter([True, False, None])),
        "series": (filtered, pandas.Series([1, 0, None], dtype="Float64")),
        "missing values of pandas": (np.array(PROMPTS), [1, Decimal(0), pandas.NA]),
    }


@pytest.mark.parametrize("columns", column_kinds())
def test_columns_of_an_own_loop_are_read(url, columns):
    prompts, rewards = column_kinds()[columns]
    with Posteriors.create(url, "demo", prompts, iter(LABELS), estimator="auto") as posteriors:
        assert set(posteriors.prompt_ids) == set(zip(*DATA, strict=True))
        prompts, rewards = column_kinds()[columns]
        scored = posteriors.observe(1, prompts, tuple(LABELS), rewards)
        posteriors.settle()
    assert scored.advantages[2] == 0
    assert [row[2:4] for row in history(url)] == [(1, 1.0), (1, 0.0)]


class Kind(Enum):
    MINE = "mine"


@dataclass(slots=True)
class Part:
    path: Path = Path("a/b")
    token: str = "hf_1"
    rate: float = math.nan


def test_a_configuration_that_json_cannot_hold_is_stored_as_text(url):
    config = {
        "max_grad_norm": math.inf, "low": -np.float64("inf"), "nested": [{"nan": np.float32("nan")}, (1,)],
        "kind": Kind.MINE, "part": Part(), "flags": {True}, 3: np.int64(4), "any": Decimal("0.5"),
    }  # fmt: skip
    stored = {
        "max_grad_norm": "inf", "low": "-inf", "nested": [{"nan": "nan"}, [1]], "kind": "mine",
        "part": {"path": "a/b", "token": "***", "rate": "nan"}, "flags": [True], "3": 4, "any": "0.5",
    }  # fmt: skip
    with Posteriors.create(url, "demo", *DATA, config=config) as posteriors:
        assert posteriors.run.record.config == stored


def test_rewards_whose_sum_is_not_finite_change_nothing(url):
    with Posteriors.create(url, "demo", *DATA, estimator="gaussian") as posteriors:
        with pytest.raises(
            ValueError, match=r"step 1 is refused: .* prompt 1 is .*inf.* must be finite"
        ):
            posteriors.observe(1, *group(0, [1e308] * 4))
        # as dbb with discount 0.5: the weight is 0.5 * 2 + 2
        assert posteriors.observe(1, *group(0, [1, 2])).mean == pytest.approx([(0.5 + 3) / 3] * 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": [], "labels": []}, "there are no prompts"),
        ({"labels": [2, 4, 6]}, "row 1 of labels is 2, which is not a str"),
        ({"prompts": {"a", "b", "c"}}, "is not a list; pass a list of str"),
        (
            {"prompts": ["a", "b", "a"]},
            "1 of 3 rows .* row 3: its label is '6', but the same prompt in row 1 has '2'",
        ),
        ({"estimator": DiscountedBetaBernoulli}, "is no estimator; give a name, or an object"),
        ({"estimator": "dbb", "parameters": {"discount": "x"}}, r"dbb.discount = 'x' is not in"),
        (
            {"warm_start": "demo", "warm_start_weight": "1"},
            r"weight is '1'; it must be in \(0, 1\]",
        ),
        ({"run_name": 5}, "the run's name 5 is empty, not printable"),
        ({"if_exists": "x"}, "if_exists = 'x' is none of error, new"),
        ({"warm_start": "nobody"}, "there is no run 'nobody'"),
        ({"warm_start": "other"}, "none of the 3 prompts of run 'new'"),
        ({"pass_rates": [[1, 2]]}, "pass_rates "),
        ({"sources": ["a"]}, "3 prompts and 1 sources; pass one for each prompt"),
        ({"sources": ["a", "b", None]}, "row 3 of sources is None"),
        ({"pass_rates": [[3, 2], [1, 2], [1, 2]]}, "pass_rates "),
        ({"pass_rates": [[0, 0.5]] * 3}, "pass_rates "),
        ({"pass_rates": [[math.nan] * 2] * 3}, "pass_rates "),
    ],
)
def test_a_run_that_cannot_begin_is_one_error_and_leaves_none(new_url, arguments, message):
    url = new_url("sqlite")
    for name, columns in (("demo", DATA), ("other", (["other"], [""]))):
        with Posteriors.create(url, name, *columns) as run:
            run.observe(1, columns[0][:1] * 2, columns[1][:1] * 2, [1, 0])
    with pytest.raises((ValueError, StoreError), match=message):
        Posteriors.create(
            **{"store": url, "run_name": "new", "prompts": PROMPTS, "labels": LABELS} | arguments
        )
    with open_store(url) as store:
        assert [run.name for run in store.runs()] == ["demo", "other"]


def test_a_run_of_another_version_is_not_resumed(store, fill):
    fill.run(store, "old", estimator_version=0)
    with pytest.raises(ValueError, match="run 'old' was written by version 0 of estimator 'dbb'"):
        Posteriors.resume(store, "old", *DATA)


def test_a_taken_name_gets_a_number_where_that_is_asked_for(new_url):
    url = new_url("sqlite")
    for wanted in ("demo", "demo-2", "demo-3"):
        with Posteriors.create(url, "demo", *DATA, if_exists="new") as posteriors:
            assert posteriors.run.record.name == wanted


GROUPS = [[1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]]
STEPS = [
    GROUPS,
    [[1, 1, 1, 0], [1, 0, 1, 0], [0, 0, 1, 0]],
    [[1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]],
    GROUPS,
]


@pytest.mark.parametrize("estimator", ["auto", "empirical_bayes"])  # whose prompts share a prior
def test_a_run_taken_back_goes_on_as_one_that_is_not_to_the_last_bit(url, estimator):
    def observe(posteriors, first, last):
        return [
            posteriors.observe(step, *batch(STEPS[step - 1])).advantages.tolist()
            for step in range(first, last)
        ]

    with Posteriors.create(url, "whole", *DATA, estimator=estimator) as whole:
        wanted = observe(whole, 1, 5)
        whole.settle()
        shared = whole.run.load_shared()
    with Posteriors.create(url, "parts", *DATA, estimator=estimator) as parts:
        observe(parts, 1, 5)
        parts.roll_back(2)
        assert observe(parts, 3, 4) == wanted[2:3]
    with Posteriors.resume(url, "parts", *DATA, step=1) as parts:
        assert observe(parts, 2, 5) == wanted[1:]
        parts.settle()
        again = parts.run.load_shared()
    assert again.keys() == shared.keys() and all(
        np.array_equal(again[field], shared[field]) for field in shared
    )
    assert history(url, "parts") == history(url, "whole")
    with open_store(url) as store:
        assert check(store) == []


@pytest.mark.parametrize("memory", ["auto", "dbb", "gaussian"])
def test_a_group_scored_alone_is_remembered_and_its_advantages_do_not_see_that(url, memory):
    """Point's advantages are those of the group's own mean and deviation, bit for bit, whatever the run remembers."""
    random = np.random.default_rng(7)
    point = build("point")
    with Posteriors.create(
        url, "grpo", *DATA, estimator="point", parameters={"memory": memory}
    ) as grpo:
        for step in range(1, 5):
            rewards = random.integers(0, 2, 12).astype(float)
            rewards[step] = np.nan
            prompts, labels = (column * 4 for column in DATA)
            scored = grpo.observe(step, prompts, labels, rewards)
            groups = rewards.reshape(4, 3).T
            alone = FORMS.build("group_norm").advantages(groups, point.estimate({}, groups))
            assert scored.advantages.tobytes() == alone.T.ravel().tobytes()
    with (
        Posteriors.resume(url, "grpo", *DATA) as again,
        Posteriors.create(url, "other", *DATA, estimator=memory) as own,
    ):
        assert again.run.record.state_fields == own.run.record.state_fields
        assert again.step == 4


def state_of(posteriors, key):
    """What is stored of a prompt's posterior after the last step, by field."""
    posteriors.settle()
    table = posteriors.run.load(np.array([posteriors.prompt_ids[key]]))
    return dict(zip(posteriors.run.record.state_fields, table.state[0].tolist(), strict=True))


def test_a_memory_of_verdicts_sees_scores_and_one_of_real_rewards_the_rewards(new_url):
    """With discount 0.5 and a prior of 0.5: the penalties of the third and fourth rollout change the second memory."""
    for memory, expected in (("dbb", 2.5 / 5), ("gaussian", (0.5 + 1 - 1 + 3.5) / 5)):
        of_point = {"estimator": "point", "parameters": {"memory": memory}}
        with Posteriors.create(new_url("sqlite"), "grpo", *DATA, **of_point) as grpo:
            scored = grpo.observe(
                1, *group(0, [1, 0, -1, 3.5]), scores=[1, 0, 0, 1], form="dr_grpo"
            )
            assert scored.advantages == pytest.approx(np.array([1, 0, -1, 3.5]) - 3.5 / 4)
            state = state_of(grpo, (PROMPTS[0], LABELS[0]))
            mean = (
                state["mean"]
                if memory == "gaussian"
                else state["alpha"] / (state["alpha"] + state["beta"])
            )
            assert mean == pytest.approx(expected)


# Of each estimator: its parameters, the scores of a step that it refuses, and what to do then.
DBB = {"memory": "dbb"}
REAL = 'parameters={"memory": "gaussian"} '
MEMORIES = [
    ("point", {}, [1, 1, 1, 1.2], f"memory 'auto' .*{REAL}.*--point.memory gaussian"),
    ("point", {}, [0, 0.9, 0.9, 0.9], f"memory 'auto' .*{REAL}.*--point.memory gaussian"),
    ("point", {}, [-1, 1, -1, 1], f"memory 'auto' .*{REAL}.*--point.memory gaussian"),
    ("point", DBB, [None, 2, 1, 0], f"memory 'dbb' .*{REAL}.*--point.memory gaussian"),
    ("laplace", {}, [1, 0.5, 1, 1], f"memory 'auto' .*{REAL}.*--laplace.memory gaussian"),
    (
        "laplace",
        {"memory": "gaussian"},
        [1, 0, 1, 2],
        f"estimator 'laplace' .*estimator=\"point\", {REAL}",
    ),
    ("dbb", {}, [1, 0.5, 1, 1], "memory 'dbb' .*--dbb.partial_credit.*--estimator gaussian"),
    (
        "dbb",
        {"partial_credit": True},
        [1, 0.5, 1.2, 1],
        r"not in \[0, 1\].*memory 'dbb' .*--estimator gaussian",
    ),
    ("auto", {}, [1, 0, 1, -1], "memory 'auto' .*--estimator gaussian"),
    ("ema", {}, [1, 0, 1, -1], "memory 'ema' .*--estimator gaussian"),
    ("spo", {}, [1, 0, 1, -1], "memory 'spo' .*--estimator gaussian"),
    ("empirical_bayes", {}, [1, 0, 1, -1], "memory 'empirical_bayes' .*--estimator gaussian"),
]


@pytest.mark.parametrize(("estimator", "parameters", "scores", "cure"), MEMORIES)
def test_a_step_with_a_score_that_the_memory_does_not_take_is_refused_and_changes_nothing(
    new_url, estimator, parameters, scores, cure
):
    options = {"estimator": estimator, "parameters": parameters}
    good = group(1, [1, 0, 1, 1])
    both = [[*first, *second] for first, second in zip(good, group(0, scores), strict=True)]
    with (
        Posteriors.create(new_url("sqlite"), "other", *DATA, **options) as other,
        Posteriors.create(new_url("sqlite"), "demo", *DATA, **options) as posteriors,
    ):
        with pytest.raises(MemorySupportError, match=rf"score -?\d.*prompt '1\+1='.*{cure}"):
            posteriors.observe(1, *both)
        wanted = other.observe(1, *good)
        found = posteriors.observe(1, *good)
        assert found.mean.tolist() == wanted.mean.tolist()
        for key in posteriors.prompt_ids:
            assert state_of(posteriors, key) == pytest.approx(state_of(other, key), nan_ok=True)
        for field, values in other.run.load_shared().items():
            np.testing.assert_array_equal(posteriors.run.load_shared()[field], values)


@pytest.mark.parametrize(
    ("source", "target"),
    [("point", "dbb"), ("laplace", "dbb"), ("auto", "dbb"), ("dbb", "point"), ("ema", "auto")],
)
def test_a_run_of_another_estimator_seeds_a_warm_start_by_its_visits(url, source, target):
    """The target's forecast equals that of a run in which it observed the same groups itself."""
    steps = [group(0, [1, 1, 0, 1]), group(1, [0, 0]), group(0, [0, 1])]
    with Posteriors.create(url, "old", *DATA, estimator=source) as old:
        for step, columns in enumerate(steps, 1):
            old.observe(step, *columns)
    with Posteriors.create(url, "seen", *DATA, estimator=target) as seen:
        for step, columns in enumerate(steps, 1):
            seen.observe(step, *columns)
        expected = forecast(seen)
    with Posteriors.create(url, "new", *DATA, estimator=target, warm_start="old") as new:
        assert (new.warm_start.matched, new.warm_start.unmatched) == (2, 1)
        assert forecast(new)[:, :2].tolist() == expected[:, :2].tolist()


@pytest.mark.parametrize(
    "scores", [[0, 0.9, 0.9, 0.9], [-1, 1, -1, 1], [2, 1, 0, 1], [0.5, 0.5, 0, 0]]
)
@pytest.mark.parametrize("target", ["auto", "point", "dbb"])
def test_a_warm_start_that_would_see_part_of_a_run_is_refused(new_url, scores, target):
    """Of groups of 0 and 0.9 those of 0 alone would be replayed; a group of -1 and 1 would be all wrong."""
    url = new_url("sqlite")
    texts = StepExtras(responses=Responses(["a", "b", "c", "d"]))
    with Posteriors.create(url, "old", *DATA, estimator="gaussian") as old:
        old.observe(1, *group(0, scores), extras=texts)
        old.observe(2, *group(1, [0, 0, 0, 0]), extras=texts)
    with pytest.raises(MemorySupportError, match=r"run 'old' has scores .*point.memory gaussian"):
        Posteriors.create(url, "new", *DATA, estimator=target, warm_start="old")
    with Posteriors.create(url, "new", *DATA, estimator="gaussian", warm_start="old") as new:
        assert new.warm_start.matched == 2


def test_an_estimator_that_keeps_nothing_of_a_prompt_takes_its_prior_from_another_run(new_url):
    url = new_url("sqlite")
    with Posteriors.create(url, "old", *DATA, estimator="dbb") as old:
        old.observe(1, *batch([[1, 1], [0, 1], [0, 0]]))
    with Posteriors.create(url, "new", *DATA, estimator="empirical_bayes", warm_start="old") as new:
        # groups, and their sums of S/N, (S/N)^2 and 1/N
        assert new.run.load_shared()["moments"].tolist() == [3, 1.5, 1.25, 1.5]


LOOP = """
import signal
import sys
from openrlhf_dbb import Posteriors
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets jobs in its background ignore it
with Posteriors.create(sys.argv[1], "run", ["p", "q"], ["", ""], estimator="dbb") as run:
    for step in range(1, 1_000_000):
        run.observe(step, ["p", "p", "q"], [""] * 3, [step % 2, 1, 0])
        print(step, flush=True)
"""


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_a_loop_of_ones_own_may_be_interrupted_or_killed(tmp_path, sent):
    url = f"sqlite:///{tmp_path}/runs.db"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen([sys.executable, "-c", LOOP, url], **pipes) as process:
        said = [process.stdout.readline() for _ in range(20)]
        process.send_signal(sent)
        said += process.stdout.readlines()
    assert process.returncode == -sent
    with Posteriors.resume(url, "run", ["p", "q"], ["", ""]) as run:
        seen = int(said[-1])
        assert seen - 1 <= run.step <= seen + 1  # a step is stored while the next is prepared
        run.observe(run.step + 1, ["p"], [""], [1])
    with open_store(url) as store:
        assert check(store) == []


# ---- pass rates that were measured before

KNOWN = [[5.0, 8.0], [math.nan, math.nan], [2.4, 8.0]]
MEANS = {  # expected before the next visit, after S of N
    # The prior is discounted twice, the rate once
    "dbb": lambda s, n: (0.25 + 0.5 * s) / (0.5 + 0.5 * n),
    "spo": lambda s, n: (0.96 * 0.5 + s) / (0.96 + n),
}


def states(url):
    with open_store(url) as store:
        return store.query(
            "SELECT prompt_id, alpha, beta, visits, step, state FROM dbb_posterior ORDER BY prompt_id"
        )


@pytest.mark.parametrize("estimator", ["dbb", "spo"])
def test_known_pass_rates_are_a_visit_before_the_first_step(url, estimator):
    with Posteriors.create(url, "demo", *DATA, estimator=estimator, pass_rates=KNOWN) as posteriors:
        alpha, beta = began = forecast(posteriors)
        mean = MEANS[estimator]
        assert alpha / (alpha + beta) == pytest.approx([mean(5, 8), 0.5, mean(2.4, 8)])
        assert posteriors.run.record.parent is None
    before = states(url)
    assert [row[3:5] for row in before] == [(0, 0), (0, 0)]
    with Posteriors.resume(url, "demo", *DATA) as posteriors:
        np.testing.assert_array_equal(forecast(posteriors), began)
        posteriors.observe(1, ["1+1="] * 2, ["2"] * 2, [1, 0])
        posteriors.roll_back(0)
        np.testing.assert_array_equal(forecast(posteriors), began)
    assert states(url) == before


@pytest.mark.parametrize("estimator", ["auto", "gaussian"])
def test_known_pass_rates_do_not_move_time(new_url, estimator):
    """A pass is as long as without them; then the counts have faded by a pass as those of a first step have."""
    with Posteriors.create(
        new_url("sqlite"), "demo", *DATA, estimator=estimator, pass_rates=KNOWN
    ) as posteriors:
        scored = posteriors.observe(1, *DATA, [1, 1, 0])
        assert np.isfinite(scored.mean).all()
        assert scored.mean[0] > scored.mean[2]
        posteriors.settle()
        # From 0: a step, and three prompts of a pass of three
        if "clock" in posteriors.estimator.shared_fields:
            assert posteriors.run.load_shared()["clock"].tolist() == [1, 3]


TEN = [f"{number} =" for number in range(10)], ["1"] * 10
RATES = [[at, 9.0] for at in range(10)]  # the harder the lower the number
SOURCES = ["low"] * 5 + ["high"] * 5


def metrics_by_prompt(posteriors):
    """The metrics of a first step that are of sources or of the hardest prompts."""
    texts = [TEN[0][at] for at in (0, 0, 3, 3, 9, 9)]
    metrics = posteriors.observe(1, texts, ["1"] * 6, [1, 0, 0, 0, 1, 1]).metrics
    return {name: metrics[name] for name in metrics if name.startswith(("source/", "hardest/"))}


def test_metrics_by_source_and_of_the_hardest(new_url):
    url = new_url("sqlite")
    Posteriors.create(url, "demo", *TEN, estimator="dbb", pass_rates=RATES).close()
    with Posteriors.resume(url, "demo", *TEN, sources=SOURCES) as posteriors:
        resumed = metrics_by_prompt(posteriors)
    assert resumed == {
        "source/low/groups": 2,
        "source/low/right": 0.25,
        "source/low/mixed": 0.5,
        "source/high/groups": 1,
        "source/high/right": 1,
        "source/high/mixed": 0,
        "hardest/10": 0.5,
        "hardest/25": 0.5,
        "hardest/50": 0.25,
    }
    more = {"pass_rates": RATES, "sources": SOURCES}
    with Posteriors.create(url, "told", *TEN, estimator="dbb", **more) as posteriors:
        assert metrics_by_prompt(posteriors) == resumed


def test_where_all_prompts_are_alike_none_is_among_the_hardest_half(new_url):
    with Posteriors.create(new_url("sqlite"), "even", *TEN, estimator="dbb") as unknown:
        assert metrics_by_prompt(unknown) == {}


def test_of_scores_of_minus_1_and_1_a_source_counts_groups_that_differ_as_mixed(new_url):
    url = new_url("sqlite")
    Posteriors.create(url, "real", *DATA, estimator="gaussian").close()
    with Posteriors.resume(url, "real", *DATA, sources=["all"] * 3) as posteriors:
        texts = PROMPTS[:2] * 2
        labels = LABELS[:2] * 2
        metrics = posteriors.observe(1, texts, labels, [-1, 1, 1, 1]).metrics
    assert (metrics["source/all/right"], metrics["source/all/mixed"]) == (0.5, 0.5)


class Mute:
    def __str__(self):
        raise RuntimeError("no text")

    __repr__ = __str__


class Level(Enum):
    HIGH = 3


@dataclass
class Piece:
    level: object
    api_key: str = "secret"


def test_a_configuration_of_any_objects_is_stored(tmp_path):
    config = {
        "level": Level.HIGH,
        "part": Piece(Level.HIGH),
        "array": np.array([1, 2]),
        "kind": np.float32,
        "mute": Mute(),
    }
    with Posteriors.create(
        f"sqlite:///{tmp_path}/a.db", "r", ["a"], ["1"], config=config
    ) as posteriors:
        assert posteriors.run.record.config == {
            "level": 3,
            "part": {"level": 3, "api_key": "***"},
            "array": [1, 2],
            "kind": "<class 'numpy.float32'>",
            "mute": "a Mute",
        }


def test_a_configuration_of_tensors_is_stored(tmp_path):
    torch = pytest.importorskip("torch")
    config = {
        "ones": torch.ones(2, dtype=torch.bfloat16),
        "meta": torch.empty(2, device="meta"),
        "kind": torch.bfloat16,
    }
    with Posteriors.create(
        f"sqlite:///{tmp_path}/a.db", "r", ["a"], ["1"], config=config
    ) as posteriors:
        stored = posteriors.run.record.config
    assert stored["ones"] == [1.0, 1.0]
    assert stored["meta"] == "a Tensor"
    assert stored["kind"] == "torch.bfloat16"


def test_a_configuration_that_cannot_be_stored_is_refused(tmp_path):
    itself = {}
    itself["itself"] = itself
    for config, reason in (
        (itself, "config .*holds itself"),
        ("abc", "config = 'abc' is no dictionary"),
    ):
        with pytest.raises(ValueError, match=reason):
            Posteriors.create(f"sqlite:///{tmp_path}/a.db", "r", ["a"], ["1"], config=config)

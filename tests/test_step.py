"""What a step holds beside its posteriors: counts of rollouts, stored texts, probes."""

import math
from collections import Counter

import numpy as np
import pytest

from openrlhf_dbb import Posteriors, Probes, Responses, StepExtras
from openrlhf_dbb.core.kept import rows_to_keep
from openrlhf_dbb.core.probes import probed_prompts

NAN = math.nan
KEYS = [(f"prompt {i}", str(i)) for i in range(4)]


@pytest.fixture
def create(new_url):
    """Function: posteriors of four prompts in a new run, closed at the end."""
    made = []

    def create(estimator="dbb", **parameters):
        url = new_url("sqlite")
        made.append(
            Posteriors.create(
                url, "run", *zip(*KEYS, strict=True), estimator=estimator, parameters=parameters
            )
        )
        return made[-1]

    yield create
    for posteriors in made:
        posteriors.close()


def observe(ours, step, *groups, **extras):
    """One step of (prompt, trained, scores) with responses of 10 tokens; the result, and advantages by group."""
    scores = np.concatenate([scores for *_, scores in groups]).astype(float)
    sizes = [len(scores) for *_, scores in groups]
    texts, labels = zip(
        *(KEYS[prompt] for prompt, *_, scores in groups for _ in scores), strict=True
    )
    trained = np.repeat([trained for _, trained, _ in groups], sizes)
    extras = StepExtras(tokens=np.full(len(scores), 10), trained=trained, **extras)
    scored = ours.observe(step, texts, labels, scores, extras=extras)
    ours.settle()
    return scored, np.split(scored.advantages, np.cumsum(sizes)[:-1])


def query(ours, sql):
    return [tuple(row) for row in ours.store.query(sql)]


HISTORY = "SELECT prompt, rollouts, alpha, beta FROM posterior_history JOIN prompts USING (prompt_id) ORDER BY prompt"
COUNTS = """SELECT generated, generated_tokens, trained, zero_variance, informative, rescued, skipped, groups
            FROM steps"""


def test_what_became_of_a_step_s_rollouts_by_hand(create):
    """Prompt 0: all right, rescued. 1: mixed, one missing. 2: kept once and filtered once. 3: nothing verified."""
    ours = create(discount=0.5)
    groups = (
        (0, True, [1, 1]),
        (1, True, [1, 0, NAN]),
        (2, False, [0, 0]),
        (2, True, [1, 0]),
        (3, True, [NAN, NAN]),
    )
    scored, (sure, _, rejected, kept, nothing) = observe(ours, 1, *groups, skipped=2)
    assert query(ours, HISTORY) == [
        ("prompt 0", 2, 2.5, 0.5),
        ("prompt 1", 2, 1.5, 1.5),
        ("prompt 2", 4, 1.5, 3.5),
    ]
    assert sure == pytest.approx([math.sqrt(0.5 / 2.5)] * 2) and nothing.tolist() == [0, 0]
    assert rejected.tolist() == [0, 0] and kept[1] == pytest.approx(-math.sqrt(1.5 / 3.5))
    # of 11 rollouts 9 are trained on; informative are those of prompts 0, 1 and 2
    assert query(ours, COUNTS) == [(11, 110, 9, 2, 7, 2, 2, 4)]
    assert (
        scored.metrics["rollout/filtered"] == pytest.approx(2 / 11)
        and scored.metrics["rollout/skipped"] == 2
    )
    assert scored.metrics["estimator/zero_variance"] == pytest.approx(2 / 9)


def test_zero_variance_is_not_logged_where_a_group_is_one_rollout(create):
    ours = create()
    alone, _ = observe(ours, 1, (0, True, [1]), (1, True, [0]))
    pairs, _ = observe(ours, 2, (0, True, [1, 1]), (1, True, [0, 1]))
    more = {
        name
        for name in pairs.metrics.keys() - alone.metrics.keys()
        if not name.startswith("hardest/")
    }
    assert more == {"estimator/zero_variance", "estimator/rescued"}
    assert pairs.metrics["estimator/zero_variance"] == 0.5


# Stored texts

PROMPTS = [(f"prompt {i}", str(i)) for i in range(30)]


def kept_prompts(prompts, step, keep):
    rows = [prompt for prompt in prompts for _ in range(8)]
    return Counter(rows[row] for row in rows_to_keep(rows, step, keep))


@pytest.mark.parametrize("keep", [0, 1, 65, 1000, None])
def test_as_many_as_asked_for_in_the_order_of_the_rows(keep):
    rows = rows_to_keep([prompt for prompt in PROMPTS[:16] for _ in range(8)], 3, keep)
    assert len(rows) == len(set(rows.tolist())) == min(128, 128 if keep is None else keep)
    assert rows.tolist() == sorted(rows)


def test_groups_are_kept_whole_half_of_them_always_and_in_time_all():
    assert kept_prompts(PROMPTS, 5, 64) == kept_prompts(PROMPTS[::-1], 5, 64)
    steps = [kept_prompts(PROMPTS, step, 64) for step in range(60)]
    assert {count for kept in steps for count in kept.values()} == {8}
    assert len(set.intersection(*map(set, steps))) == 4
    assert set.union(*map(set, steps)) == set(PROMPTS)


def test_only_stored_texts_are_decoded(create):
    ours = create()
    asked = []

    def decode(row):
        asked.append(row)
        return ["0 right", "0 missing", "1 wrong", "1 right"][row]

    responses = Responses(
        decode, truncated=[False, False, True, False], log_probs=[-1, NAN, -2, -4], keep=3
    )
    observe(ours, 1, (0, True, [1, NAN]), (1, True, [0, 1]), responses=responses)
    sql = "SELECT text, sample, reward, missing, length, truncated, log_prob FROM rollouts"
    everything = {
        ("0 right", 0, 1.0, 0, 10, 0, -1.0),
        ("0 missing", 1, None, 1, 10, 0, None),
        ("1 wrong", 0, 0.0, 0, 10, 1, -2.0),
        ("1 right", 1, 1.0, 0, 10, 0, -4.0),
    }
    assert set(query(ours, sql)) < everything and len(asked) == 3


def test_what_was_read_is_stored_and_the_unreadable_are_counted(create):
    ours = create()
    read = ["7", None, "no answer: no tag", "nothing"]
    responses = Responses(["a", "b", "c", "d"], keep=None)
    scored, _ = observe(
        ours, 1, (0, True, [1, 0]), (1, True, [0, 1]), responses=responses, read=read
    )
    assert scored.metrics["rollout/unreadable"] == pytest.approx(1 / 3)  # of those that tell
    assert set(query(ours, "SELECT text, read FROM rollouts")) == set(
        zip("abcd", read, strict=True)
    )
    scored, _ = observe(ours, 2, (0, True, [1, 0]), responses=Responses(["a", "b"]))
    assert "rollout/unreadable" not in scored.metrics
    assert query(ours, "SELECT DISTINCT read FROM rollouts WHERE step = 2") == [(None,)]


# Probes

MANY = [(f"{i}+1=", str(i + 1)) for i in range(10_000)]


def test_the_probed_prompts_depend_on_prompt_label_and_seed_alone():
    chosen = probed_prompts(MANY, 0.1, seed=42)
    # binomial: standard deviation sqrt(0.1 * 0.9 / 10000) = 0.003
    assert abs(len(chosen) / 10_000 - 0.1) < 4 * 0.003
    assert probed_prompts(MANY, 0.0, seed=42) == set() and probed_prompts(
        MANY, 1.0, seed=42
    ) == set(MANY)
    assert probed_prompts(reversed(MANY[:100]), 0.1, seed=42) == chosen & set(MANY[:100])
    assert chosen < probed_prompts(MANY, 0.2, seed=42)
    # 100 expected of independent tenths
    assert len(chosen & probed_prompts(MANY, 0.1, seed=43)) < 0.02 * 10_000


def test_a_probe_with_a_single_score_is_stored_and_not_measured(create):
    ours = create(partial_credit=True)
    probes = Probes([KEYS[0], KEYS[1]], np.array([[0.5, 0.25], [1, NAN]]))
    scored, _ = observe(ours, 1, (0, True, [1, 0]), (1, True, [0.5]), probes=probes)
    assert sorted(query(ours, "SELECT samples, successes, squares FROM dbb_probe")) == [
        (1, 1, 1),
        (2, 0.75, 0.3125),
    ]
    # the mean of prompt 0 is 1.5 / 3; the noise is (0.3125 - 0.75 * 0.375) / 2
    error = pytest.approx((0.5 - 0.375) ** 2 - 0.03125 / 2)
    assert scored.metrics["probe/mse"] == scored.metrics["probe/mse_point"] == error


GROUPS = (0, True, [1, 1, 1, 1]), (1, True, [1, 0, 0, 0]), (2, True, [NAN, NAN, NAN, NAN])
SCORES = np.array([[1.0, 0, 0, 0], [1, 1, 1, 1], [1, 1, 0, NAN], [NAN] * 4])
PROBES = Probes([KEYS[1], KEYS[2], KEYS[0], KEYS[3]], SCORES)


def test_probes_are_stored_with_the_step_and_change_nothing_else(create):
    """Prompt 2 has no estimate and prompt 3 no score: they are left out."""
    ours = create(discount=0.5)
    without = create(discount=0.5)
    scored, _ = observe(ours, 1, *GROUPS, probes=PROBES)
    plain, _ = observe(without, 1, *GROUPS)
    assert scored.advantages.tolist() == plain.advantages.tolist()
    assert query(ours, "SELECT * FROM dbb_history") == query(without, "SELECT * FROM dbb_history")
    sql = "SELECT prompt, p.samples, p.successes FROM probes p JOIN prompts USING (prompt_id)"
    assert (
        sorted(query(ours, sql)) == [("prompt 0", 3, 2.0), ("prompt 1", 4, 1.0)]
        and query(without, sql) == []
    )
    # dbb: 4.5 / 5 and 1.5 / 5; noise 2/9 / 2 and 3/16 / 3; the groups' own means are 1 and 1/4
    assert scored.metrics["probe/groups"] == 2
    dbb = [(0.9 - 2 / 3) ** 2 - 1 / 9, (0.3 - 0.25) ** 2 - 1 / 16]
    assert scored.metrics["probe/mse"] == pytest.approx(np.mean(dbb))
    point = [(1 - 2 / 3) ** 2 - 1 / 9, -1 / 16]
    assert scored.metrics["probe/mse_point"] == pytest.approx(np.mean(point))

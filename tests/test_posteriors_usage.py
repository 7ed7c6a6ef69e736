"""What became of the rollouts of a step: by hand, and beside the posteriors in the store."""

import math

import numpy as np
import pytest

import estimators
from openrlhf_dbb.core.posteriors import Posteriors
from openrlhf_dbb.core.step import Groups, Rollouts, Scored, StepExtras, usage

NAN = math.nan
A, B, C, D, E, F, G = ((text, "label") for text in "abcdefg")


def test_a_step_by_hand():
    """Groups of 4. a: zero variance, rescued. b: varies, one missing. c: filtered. d: kept once and filtered once.
    e: replayed and skipped only. f: zero variance, not rescued. g: filtered once, kept once with nothing verified."""
    groups = [  # prompt, trained, advantages, tokens of a response
        (A, True, [0.25, 0.25, 0.25, 0.25], 5),
        (C, False, [-0.25, -0.25, -0.25, -0.25], 2),
        (B, True, [1.5, -0.5, 0, -0.5], 3),
        (D, False, [-0.5, -0.5, -0.5, -0.5], 7),
        (F, True, [0, 0, 0, 0], 1),
        (D, True, [1.5, -0.5, -0.5, -0.5], 4),
        (G, False, [0.5, 0.5, 0.5, 0.5], 1),
        (G, True, [0, 0, 0, 0], 1),
    ]
    prompts = [prompt for prompt, *_ in groups for _ in range(4)]
    extras = StepExtras(
        tokens=np.repeat([tokens for *_, tokens in groups], 4),
        trained=np.repeat([trained for _, trained, *_ in groups], 4),
        replayed={B: (2, 21), E: (3, 30)},
        skipped={E: 2, B: 1},
    )
    rollouts = Rollouts.checked(*zip(*prompts, strict=True), np.zeros(32), None, extras)
    members = [F, D, C, B, A, G]
    groups_of_rows = Groups.by_prompt(np.array([members.index(prompt) for prompt in prompts]), np.ones(32, dtype=bool))
    advantages = np.concatenate([advantages for *_, advantages, _ in groups]).astype(float)
    zero_variance, other = np.array([float(prompt not in (D, B)) for prompt in prompts]), np.zeros(32)
    counts = usage(rollouts, groups_of_rows, Scored(advantages, other, other, zero_variance, other, other))
    assert counts.columns() == {  # by group: f, d, c, b, a, g
        "generated": 4 + 8 + 4 + 4 + 4 + 8,
        "generated_tokens": 4 + (4 * 7 + 4 * 4) + 8 + 12 + 20 + 8,
        "trained": 4 + 4 + 0 + 4 + 4 + 4,
        "trained_tokens": 4 + 16 + 0 + 12 + 20 + 4,
        "zero_variance": 4 + 0 + 4 + 0 + 4 + 8,
        "informative": 0 + 4 + 0 + 4 + 4 + 0,
        "rescued": 4,
        "replayed": 2 + 3,
        "replayed_tokens": 21 + 30,
        "skipped": 2 + 1,
        "groups": 6,
        "informative_groups": 3,
    }


KEYS = [(f"prompt {i}", str(i)) for i in range(4)]


@pytest.fixture
def posteriors(open_new, fill):
    """Function: posteriors of four prompts in a new run, and the store."""

    def make(name, fields=("alpha", "beta"), **parameters):
        store = open_new("sqlite")
        run = fill.run(store, fields=fields)
        return Posteriors(estimators.build(name, **parameters), store, run, *zip(*KEYS, strict=True)), store

    return make


def observe(ours, step, *groups, **beside):
    """One step of (prompt, trained, scores) with responses of 10 tokens; the advantages, group by group."""
    scores = np.concatenate([scores for *_, scores in groups]).astype(float)
    sizes = [len(scores) for *_, scores in groups]
    texts, labels = zip(*(KEYS[prompt] for prompt, *_, scores in groups for _ in scores), strict=True)
    trained = np.repeat([trained for _, trained, _ in groups], sizes)
    scored = ours.observe(
        step, texts, labels, scores, extras=StepExtras(tokens=np.full(len(scores), 10), trained=trained, **beside)
    )
    ours.settle()
    return np.split(scored.advantages, np.cumsum(sizes)[:-1])


def history(store, step):
    rows = store.query(
        "SELECT prompt, rollouts, alpha, beta FROM posterior_history JOIN prompts USING (prompt_id) "
        "WHERE step = :step ORDER BY prompt",
        step=step,
    )
    return [tuple(row) for row in rows]


def test_filtered_groups_update_the_posteriors_and_are_counted(posteriors):
    ours, store = posteriors("dbb", discount=0.5)
    kept, _ = observe(ours, 1, (0, True, [1, 0, 1, 1]), (1, False, [0, 0, 0, 0]))
    # alpha = 0.5 + S, beta = 0.5 + 4 - S; advantages sqrt(beta / alpha) and -sqrt(alpha / beta)
    assert history(store, 1) == [("prompt 0", 4, 3.5, 1.5), ("prompt 1", 4, 0.5, 4.5)]
    right, wrong = math.sqrt(1.5 / 3.5), -math.sqrt(3.5 / 1.5)
    assert kept == pytest.approx([right, wrong, right, right])
    # its next visit continues from the filtered one: 0.25 + 2, 2.25 + 2
    [later] = observe(ours, 2, (1, True, [1, 1, 0, 0]))
    assert history(store, 2) == [("prompt 1", 4, 2.25, 4.25)]
    assert later[0] == pytest.approx(math.sqrt(4.25 / 2.25))
    used = store.query("SELECT step, generated, trained, zero_variance, informative, groups FROM steps ORDER BY step")
    assert [tuple(row) for row in used] == [(1, 8, 4, 4, 4, 2), (2, 4, 4, 0, 4, 1)]


def test_a_prompt_kept_and_rejected_in_one_step_is_one_group(posteriors):
    ours, store = posteriors("point", fields=())
    rejected, kept, again = observe(ours, 1, (0, False, [1, 1, 1]), (1, True, [0, 1, 1]), (0, True, [0, 0, 0]))
    # 3 of 6: mean 1/2, variance 6/5 * 1/4
    assert [*rejected, *again] == pytest.approx([0.5 / math.sqrt(0.3)] * 3 + [-0.5 / math.sqrt(0.3)] * 3)
    # 2 of 3: mean 2/3, variance 3/2 * 2/9
    assert kept == pytest.approx(np.array([-2, 1, 1]) / 3 / math.sqrt(1 / 3))
    used = store.query("SELECT generated, trained, zero_variance, informative, groups FROM steps")
    assert [tuple(row) for row in used] == [(9, 6, 0, 6, 2)]


def test_what_was_not_verified_or_only_skipped_is_counted_alone(posteriors):
    ours, store = posteriors("dbb", discount=0.5)
    skipped = {KEYS[3]: 2}
    observe(ours, 1, (0, True, [1, NAN, NAN]), (2, False, [NAN, NAN]), skipped=skipped, replayed={KEYS[0]: (5, 50)})
    assert history(store, 1) == [("prompt 0", 1, 1.5, 0.5)]
    used = store.query(
        "SELECT generated, trained, zero_variance, informative, rescued, replayed, skipped, groups FROM steps"
    )
    assert [tuple(row) for row in used] == [(5, 3, 3, 3, 3, 5, 2, 2)]


def test_zero_variance_is_not_logged_where_a_group_is_one_rollout(posteriors):
    ours, _ = posteriors("dbb")
    texts, labels = zip(*KEYS[:2], strict=True)
    alone = ours.observe(1, texts, labels, [1, 0]).metrics
    pairs = ours.observe(2, texts * 2, labels * 2, [1, 0, 1, 1]).metrics
    of_groups = {"estimator/zero_variance", "estimator/rescued"}
    assert pairs.keys() - alone.keys() == of_groups and not alone.keys() - pairs.keys()
    assert pairs["estimator/zero_variance"] == 0.5


def test_an_estimator_without_history_is_not_rescued(posteriors):
    ours, store = posteriors("point", fields=())
    agreeing, _ = observe(ours, 1, (0, True, [1, 1, 1]), (1, True, [1, 0, 0]))
    assert agreeing.tolist() == [0, 0, 0]
    used = store.query("SELECT zero_variance, informative, rescued, informative_groups, groups FROM steps")
    assert [tuple(row) for row in used] == [(3, 3, 0, 1, 2)]

"""One's own loop: what it trains on, what is stored, and a resume. Row i's rollouts score as its pattern says."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from trainings import EACH, check_questions, in_ones_own_loop

from openrlhf_dbb import Posteriors
from openrlhf_dbb.core.filling import Answer
from openrlhf_dbb.core.loop import Loop
from openrlhf_dbb.core.recorded import DATA_SET, Record, RecordedRollout
from openrlhf_dbb.core.replay import Replay, TokenRollout
from openrlhf_dbb.core.strategies.greso import GresoSampler
from openrlhf_dbb.errors import RunError
from openrlhf_dbb.evaluation import held_out
from openrlhf_dbb.evaluation.held_out import Sample

TEXTS = ["a", "b", "c", "d", "e", "f"]
LABELS = ["1", "2", "3", "4", "5", "6"]
SCORES = ["1010", "1111", "0000", "1001", "0110", "0101"]


def generate(requests):
    """Each rollout is its row and its score."""
    answers = []
    for request in requests:
        pattern = SCORES[request.prompt] * 4
        scores = [
            float(score) for score in pattern[request.begun : request.begun + request.rollouts]
        ]
        answers.append(Answer([(request.prompt, score) for score in scores], np.array(scores)))
    return answers


@pytest.fixture
def opened(tmp_path):
    """Function: a loop over a new run, or over the run of this name again."""
    left = []

    def make(
        name,
        *,
        resume=False,
        estimator="dbb",
        generate=generate,
        texts=TEXTS,
        labels=LABELS,
        **options,
    ):
        url = f"sqlite:///{tmp_path}/{name}.db"
        if resume:
            posteriors = Posteriors.resume(url, name, texts, labels)
        else:
            posteriors = Posteriors.create(url, name, texts, labels, estimator=estimator)
        left.append(posteriors)
        return Loop(
            posteriors,
            texts,
            labels,
            generate,
            **{"groups": 2, "rollouts": 4, "seed": 1, **options},
        )

    yield make
    for posteriors in left:
        posteriors.close()


def rows(step):
    return [row for row, _ in step.rollouts], step.advantages.tolist()


def test_a_step_is_groups_of_rollouts_with_their_advantages(opened):
    loop = opened("plain", estimator="point")
    step = loop.step()
    prompts = [row for row, _ in step.rollouts]
    assert [prompts[0]] * 4 + [prompts[4]] * 4 == prompts
    for group in range(2):
        scores = np.array([score for _, score in step.rollouts[4 * group : 4 * group + 4]])
        spread = scores.std(ddof=1)
        expected = (scores - scores.mean()) / spread if spread else np.zeros(4)
        np.testing.assert_allclose(step.advantages[4 * group : 4 * group + 4], expected)
    assert (step.number, loop.generated) == (1, 8)


@pytest.mark.parametrize(
    "strategy", ["plain", "dynamic", "greso", "posterior", "two_stage", "allocate"]
)
def test_every_strategy_stores_each_rollout_and_goes_on_from_a_checkpoint(
    opened, tmp_path, strategy
):
    options = {"strategy": strategy, "max_rollouts": 400}
    whole = opened("whole", **options)
    expected = [rows(whole.step()) for _ in range(6)]
    loop = opened("run", **options)
    first = [rows(loop.step()) for _ in range(3)]
    loop.save(tmp_path / "step3")
    later = loop.step()  # undone below
    loop.posteriors.settle()
    loop.posteriors.close()
    again = opened("run", resume=True, **options)
    again.load(tmp_path / "step3")
    assert first + [rows(again.step()) for _ in range(3)] == expected
    assert later.number == 4
    again.posteriors.settle()
    [(generated, trained)] = again.posteriors.store.query(
        "SELECT sum(generated), sum(trained) FROM steps"
    )
    assert (generated, trained) == (again.generated, 6 * 8)


def test_the_limit_of_rollouts_ends_the_iteration(opened):
    loop = opened("short", max_rollouts=17)
    assert [step.number for step in loop] == [1, 2]
    assert loop.generated == 16


def test_a_strategy_that_keeps_no_group_ends_in_one_line(opened, monkeypatch):
    monkeypatch.setitem(globals(), "SCORES", ["1111", "0000"] * 3)
    loop = opened("equal", strategy="dynamic")
    with pytest.raises(
        RunError, match=r"'dynamic' has kept no group in 21 passes over the data; use"
    ):
        loop.step()
    assert loop.generated == 21 * 6 * 4


def test_passes_in_which_every_prompt_is_skipped_are_the_strategys_own_business(
    opened, monkeypatch
):
    """GRESO may skip all of so few prompts in more than 20 passes in a row."""
    monkeypatch.setattr(GresoSampler, "skips", lambda sampler, prompt_id: next(skips, False))
    skips = iter([True] * 6 * 30)
    loop = opened("skipped", strategy="greso")
    assert loop.step().number == 1
    assert loop.generated < 400


def token_rollouts(step):
    tokens = np.array([1, 2, 3], dtype=np.int32)
    actions = np.array([False, True])
    for prompt_id, (_, score) in zip(step.prompt_ids, step.rollouts, strict=True):
        yield TokenRollout(prompt_id, tokens, actions, np.array([-0.5], dtype=np.float32), score)


def test_replayed_rows_come_back_with_a_resume(opened, tmp_path):
    """Six prompts in steps of two: the second visit of a prompt is the first that replays."""
    options = {"replay": Replay(samples=2, cache=4)}

    def train(loop, count):
        found = []
        for _ in range(count):
            step = loop.step()
            loop.remember(token_rollouts(step))
            found.append(
                [
                    (row.rollout.prompt_id, row.rollout.reward, row.advantage)
                    for row in step.extra_rows
                ]
            )
        return found

    expected = train(opened("whole", **options), 6)
    assert expected[:3] == [[], [], []]
    assert all(len(rows) == 4 for rows in expected[3:])  # 2 of each of a step's 2 prompts
    loop = opened("run", **options)
    train(loop, 4)
    loop.save(tmp_path / "step4")
    loop.posteriors.close()
    again = opened("run", resume=True, **options)
    again.load(tmp_path / "step4")
    assert train(again, 2) == expected[4:]


def test_whitened_advantages_have_mean_0_and_variance_1_over_the_tokens(opened):
    loop = opened("white", form="reinforce_baseline", tokens_of=lambda rollout: 1 + rollout[0])
    step = loop.step()
    tokens = np.array([1 + row for row, _ in step.rollouts])
    mean = np.average(step.advantages, weights=tokens)
    assert mean == pytest.approx(0, abs=1e-12)
    assert np.average((step.advantages - mean) ** 2, weights=tokens) == pytest.approx(1)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"strategy": "other"}, "unknown rollout strategy 'other'"),
        ({"strategy": "dynamic", "rollouts": 1}, "give 2 or more"),
        ({"form": "reinforce_baseline"}, "pass tokens_of"),
        (
            {"form": "reinforce_baseline", "thin": 0.5},
            "thin=0.5 with form='reinforce_baseline': .* leave one out",
        ),
        ({"thin": -1}, "thin = -1; give"),
        ({"probe_fraction": 1.5}, "probe_fraction = 1.5; give"),
        ({"probe_fraction": "all"}, "probe_fraction = 'all'; give"),
        ({"probe_fraction": 0.5, "probe_samples": 1}, "probe_samples = 1; give 2 or more"),
    ],
)
def test_what_does_not_fit_is_refused_at_once(opened, options, problem):
    with pytest.raises(ValueError, match=problem):
        opened("refused", **options)


@pytest.mark.parametrize(
    "edit",
    [
        lambda saved: [],
        lambda saved: saved | {"step": math.inf},
        lambda saved: saved | {"filler": 3},
        lambda saved: saved | {"filler": saved["filler"] | {"again": [["x", None]]}},
        lambda saved: saved | {"filler": {"python": "scalar", "value": "x"}},
    ],
)
def test_an_edited_file_of_a_checkpoint_is_refused_and_nothing_is_undone(opened, tmp_path, edit):
    loop = opened("one")
    loop.step()
    loop.save(tmp_path / "step1")
    loop.step()
    file = tmp_path / "step1" / "posteriors.json"
    saved = json.loads(file.read_text())
    file.write_text(json.dumps(edit(saved)))
    with pytest.raises(ValueError):
        loop.load(tmp_path / "step1")
    loop.posteriors.settle()
    assert loop.posteriors.run.record.last_step == 2


def test_a_folder_of_another_run_is_refused(opened, tmp_path):
    loop = opened("one")
    loop.step()
    loop.save(tmp_path / "step1")
    with pytest.raises(ValueError, match=r"belongs to run .*, not to 'two'"):
        opened("two").load(tmp_path / "step1")
    with pytest.raises(ValueError, match="was not saved by a loop"):
        loop.load(tmp_path / "nothing")


@pytest.fixture
def saved_after_a_step(opened, tmp_path):
    """A folder that the loop "one" saved after its first step."""
    loop = opened("one")
    loop.step()
    loop.save(tmp_path / "step1")
    loop.posteriors.close()
    return tmp_path / "step1"


@pytest.mark.parametrize(
    ("texts", "labels"),
    [
        (TEXTS[::-1], LABELS[::-1]),
        (TEXTS, [*LABELS[:-1], "7"]),
        ([*TEXTS, "g"], [*LABELS, "7"]),
    ],
    ids=["another order", "another label", "another row"],
)
def test_a_folder_of_other_data_is_refused(opened, saved_after_a_step, texts, labels):
    loop = opened("one", resume=True, texts=texts, labels=labels)
    with pytest.raises(ValueError) as refused:
        loop.load(saved_after_a_step)
    assert str(refused.value) == (
        f"{saved_after_a_step} was saved with other prompts and labels, or with these in another "
        "order; give the data that the run was begun with, or begin another run with "
        "warm_start='one'"
    )


def test_a_folder_of_an_earlier_release_that_tells_no_data_is_loaded(opened, saved_after_a_step):
    file = saved_after_a_step / "posteriors.json"
    saved = json.loads(file.read_text())
    del saved[DATA_SET]
    file.write_text(json.dumps(saved))
    loop = opened("one", resume=True)
    loop.load(saved_after_a_step)
    assert loop.step().number == 2


# ---- what every host has


@pytest.mark.parametrize(("estimator", "form"), EACH)
def test_every_estimator_and_form_gives_what_posteriors_give(opened, tmp_path, estimator, form):
    loop = opened("each", estimator=estimator, form=form, tokens_of=lambda rollout: 1 + rollout[0])
    step = loop.step()
    rows_R = [row for row, _ in step.rollouts]
    scores_R = [score for _, score in step.rollouts]
    texts = [TEXTS[row] for row in rows_R]
    labels = [LABELS[row] for row in rows_R]
    expected = in_ones_own_loop(
        tmp_path, estimator, form, texts, labels, scores_R, [1 + row for row in rows_R]
    )
    np.testing.assert_allclose(step.advantages, expected, rtol=1e-9, atol=1e-12)


def test_explain_and_the_page_show_a_loop_s_step(opened, tmp_path, capsys):
    loop = opened("openrlhf_dbb", text_of=str)
    step = loop.step()
    loop.posteriors.finish()
    check_questions(
        tmp_path, capsys, "openrlhf_dbb", TEXTS[step.rollouts[0][0]], step.advantages[:4]
    )


def test_what_the_verifier_read_is_stored(opened):
    def reads(requests):
        answers = generate(requests)
        return [
            replace(answer, read=[f"read {score}" for _, score in answer.rollouts])
            for answer in answers
        ]

    loop = opened("read", generate=reads, text_of=str)
    loop.step()
    loop.posteriors.settle()
    read = loop.posteriors.store.query("SELECT DISTINCT score, read FROM rollouts ORDER BY score")
    assert read == [(0.0, "read 0.0"), (1.0, "read 1.0")]


def test_thinned_advantages_are_trained_on_and_those_of_the_form_are_stored(opened, tmp_path):
    """In the first step all groups of dbb have advantages of size below 2."""
    options = {"thin": 2.0, "text_of": str}
    loop = opened("thin", **options)
    plain = opened("plain", text_of=str)
    step = loop.step()
    assert set(np.abs(step.advantages)) == {0.0, 2.0}
    stored = "SELECT advantage FROM rollouts ORDER BY prompt_id, sample"
    plain.step()
    for each in (loop, plain):
        each.posteriors.settle()
    assert loop.posteriors.store.query(stored) == plain.posteriors.store.query(stored)
    loop.posteriors.roll_back(0)
    loop.posteriors.close()
    again = opened("thin", resume=True, **options)
    np.testing.assert_array_equal(again.step().advantages, step.advantages)


def test_held_out_samples_are_stored_by_prompt(opened):
    loop = opened("held")
    loop.step()
    of_a = [Sample(1.0, 3), Sample(0.0, 5, truncated=True)]
    held_out.record(
        loop.posteriors,
        {"sums": {("x", "1"): of_a, ("y", "2"): [Sample(math.nan, 2)]}},
        model="step 1",
    )
    found = """SELECT step, benchmark, prompt, samples, verified, successes, tokens, truncated
               FROM evaluation_results JOIN prompts USING (prompt_id) ORDER BY prompt"""
    stored = loop.posteriors.store.query(found)
    assert stored == [(1, "sums", "x", 2, 2, 1.0, 8, 1), (1, "sums", "y", 2, 0, 0.0, 2, 0)]
    for nothing in ({}, {"sums": {}}, {"sums": {("x", "1"): []}}):
        with pytest.raises(ValueError, match=r"no.* samples; (pass|leave)"):
            held_out.record(loop.posteriors, nothing)


@pytest.fixture
def probed_and_plain(opened):
    """Two loops of six steps, each prompt twice, the first with probes of three rollouts; its probed rows."""
    asked = []

    def with_probes(requests):
        for request in requests:
            asked.append((request.prompt, request.rollouts))
        return generate(requests)

    plain = opened("plain")
    loop = opened("probed", generate=with_probes, probe_fraction=0.5, probe_samples=3)
    for _ in range(6):
        np.testing.assert_array_equal(loop.step().advantages, plain.step().advantages)
    loop.posteriors.settle()
    plain.posteriors.settle()
    return loop, plain, {row for row, rollouts in asked if rollouts == 3}


def test_probes_train_nothing(probed_and_plain):
    loop, plain, _ = probed_and_plain
    found = "SELECT step, prompt_id, rollouts, successes, mean FROM posterior_history ORDER BY step, prompt_id"
    assert loop.posteriors.store.query(found) == plain.posteriors.store.query(found)
    assert loop.generated == plain.generated == 48


def test_chosen_prompts_are_probed_at_every_visit(probed_and_plain):
    loop, _, probed = probed_and_plain
    assert 0 < len(probed) < 6
    expected = []
    for row in probed:
        number = loop.posteriors.prompt_ids[TEXTS[row], LABELS[row]]
        expected += [(number, 3, float(SCORES[row][:3].count("1")))] * 2
    stored = loop.posteriors.store.query("SELECT prompt_id, samples, successes FROM probes")
    assert sorted(stored) == sorted(expected)


def recordable(requests):
    """As ``generate``, with the rollouts as a record holds them."""
    answers = []
    for answer in generate(requests):
        rollouts = []
        for row, score in answer.rollouts:
            tokens = np.array([row, 7, int(score)], dtype=np.int32)
            log_probs = np.array([-0.5], dtype=np.float32)
            rollouts.append(RecordedRollout(tokens, np.array([False, True]), log_probs, score))
        answers.append(replace(answer, rollouts=rollouts))
    return answers


def never(requests):
    pytest.fail("something was generated")


def tokens_of(step):
    return [rollout.tokens.tolist() for rollout in step.rollouts]


@pytest.mark.parametrize("strategy", ["plain", "dynamic"])
def test_recorded_batches_are_trained_on_in_their_order_and_nothing_is_generated(
    opened, tmp_path, strategy
):
    folder = tmp_path / "rollouts"
    first = opened(
        "first", estimator="point", strategy=strategy, generate=recordable, record=folder
    )
    steps = [first.step() for _ in range(3)]
    again = opened("again", estimator="point", seed=5, generate=never, rollouts_of=folder)
    trained = list(again)  # ends with the record
    for step, same in zip(steps, trained, strict=True):
        assert tokens_of(step) == tokens_of(same)
        assert step.advantages.tolist() == same.advantages.tolist()
    for loop in (first, again):
        loop.posteriors.settle()
    observed = "SELECT sum(generated), sum(trained) FROM steps"
    assert first.posteriors.store.query(observed) == again.posteriors.store.query(observed)
    other = opened("other", estimator="dbb", form="dr_grpo", generate=never, rollouts_of=folder)
    assert tokens_of(other.step()) == tokens_of(steps[0])


def test_a_resume_goes_on_with_the_recorded_step(opened, tmp_path):
    folder = tmp_path / "rollouts"
    first = opened("first", generate=recordable, record=folder)
    steps = [tokens_of(first.step()) for _ in range(2)]
    first.save(tmp_path / "step2")
    undone = first.step()
    first.posteriors.close()
    first = opened("first", resume=True, generate=recordable, record=folder)
    first.load(tmp_path / "step2")
    assert Record(folder).steps == 2
    steps.append(tokens_of(first.step()))
    assert steps[2] == tokens_of(undone)
    again = opened("again", generate=never, rollouts_of=folder)
    again.step()
    again.save(tmp_path / "again1")
    again.step()
    again.posteriors.close()
    again = opened("again", resume=True, generate=never, rollouts_of=folder)
    again.load(tmp_path / "again1")
    assert [tokens_of(step) for step in again] == steps[1:]


def test_a_loop_refuses_a_record_that_does_not_fit(opened, tmp_path):
    folder = tmp_path / "rollouts"
    opened("first", generate=recordable, record=folder).step()
    for option in ({"strategy": "dynamic"}, {"probe_fraction": 0.5}, {"record": tmp_path / "x"}):
        with pytest.raises(ValueError, match=r"rollouts_of=.* generates nothing; leave out"):
            opened(str(option)[2:8], rollouts_of=folder, **option)
    with pytest.raises(ValueError, match="recorded with groups 2, here it is 3; give the same"):
        opened("three", rollouts_of=folder, groups=3)
    with pytest.raises(ValueError, match="holds the rollouts of run 'first'"):
        opened("second", generate=recordable, record=folder)
    with pytest.raises(ValueError, match="returned a tuple; return RecordedRollout"):
        opened("tuples", record=tmp_path / "tuples").step()

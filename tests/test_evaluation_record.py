"""A finished evaluation in the store: the numbers of its files, prompt by prompt."""

import json

import numpy as np
import pytest
from store_invariants import check

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.evaluation.record import record
from storage import StoreError, open_store, read_evaluations

pq = pytest.importorskip("pyarrow.parquet")

MANIFEST = {
    "status": "finished", "model": "a/model", "n": 3, "runs": 2, "seed": 0,
    "sampling": {"temperature": 0.6}, "benchmarks": {"sums": {"title": "Sums"}},
}  # fmt: skip


@pytest.fixture
def evaluation(tmp_path):
    """Function: a folder "mine" with two prompts in two runs, three samples each."""
    import pyarrow as pa

    from openrlhf_dbb.evaluation.results import schema

    def row(run, index, scores, answers, tokens, truncated):
        texts = {"id": f"q{index}", "prompt": f"<user>{index}", "label": str(index)}
        lists = {"scores": scores, "answers": answers, "responses": ["..."] * 3, "tokens": tokens}
        return {"run": run, "index": index, **texts, **lists, "truncated": truncated}

    def make(**changes):
        folder = tmp_path / "mine"
        folder.mkdir(exist_ok=True)
        rows = [
            row(0, 0, [1.0, 1.0, 0.0], ["0", "0", "5"], [4, 5, 6], [False] * 3),
            row(0, 1, [None, 0.0, 1.0], ["1", "2", "1"], [7, 7, 7], [True, False, False]),
            row(1, 0, [0.0, 0.0, 0.0], ["8", None, None], [1, 1, 1], [False] * 3),
            row(1, 1, [None, None, None], ["1", "1", None], [9, 9, 9], [True] * 3),
        ]
        pq.write_table(pa.Table.from_pylist(rows, schema=schema()), folder / "sums.parquet")
        (folder / "evaluation.json").write_text(json.dumps(MANIFEST | changes))
        return folder

    return make


@pytest.fixture
def trained(store, fill):
    """A store with run "run" of one step."""
    run = fill.run(store)
    fill.step(run, 1, fill.prompts(store, 2), [1, 2])
    run.finish()
    return store


def test_the_results_are_stored_with_the_run(trained, evaluation, capsys):
    record(trained.url, "run", evaluation())
    (stored,) = read_evaluations(trained)
    assert (stored.name, stored.model, stored.run_id, stored.step) == ("mine", "a/model", 1, None)
    assert stored.config == {name: MANIFEST[name] for name in ("n", "runs", "seed", "sampling", "benchmarks")}
    rows = stored.results["sums"]
    assert rows.samples.tolist() == [[3, 3], [3, 3]]
    assert rows.verified.tolist() == [[3, 2], [3, 0]]
    assert rows.successes.tolist() == [[2.0, 1.0], [0.0, 0.0]]
    np.testing.assert_array_equal(rows.best, [[1.0, 1.0], [0.0, np.nan]])
    # "0" is right; "1" and "2" tie at one vote each, one right and one wrong; "8" is wrong; nothing verified
    np.testing.assert_array_equal(rows.majority, [[1.0, 0.5], [0.0, np.nan]])
    assert rows.tokens.tolist() == [[15, 21], [3, 27]]
    assert rows.truncated.tolist() == [[0, 1], [0, 3]]
    prompts = trained.query("SELECT prompt, label FROM prompts WHERE prompt_id IN (3, 4) ORDER BY prompt")
    assert [tuple(prompt) for prompt in prompts] == [("<user>0", "0"), ("<user>1", "1")]
    assert [trained.query("SELECT prompt FROM prompts WHERE prompt_id = :id", id=int(number))[0][0]
            for number in rows.prompt_ids] == ["<user>0", "<user>1"]  # fmt: skip
    assert "stored with run run in " in capsys.readouterr().out
    assert check(trained) == []


def test_once_more_takes_the_place_of_the_first(trained, evaluation):
    for _ in range(2):
        record(trained.url, "run", evaluation())
    assert len(read_evaluations(trained)) == 1


def test_an_evaluation_that_has_not_finished_is_refused(trained, evaluation):
    with pytest.raises(UsageError, match="status is 'running', not 'finished'"):
        record(trained.url, "run", evaluation(status="running"))
    assert read_evaluations(trained) == []


def test_a_run_that_is_not_there_is_named(trained, evaluation):
    with pytest.raises(StoreError, match=r"there is no run 'other' in .*; the newest are: 'run'"):
        record(trained.url, "other", evaluation())


def test_a_store_that_is_not_there_is_not_made(evaluation, tmp_path):
    with pytest.raises(StoreError, match="there is no store at"):
        record(f"sqlite:///{tmp_path}/none.db", "run", evaluation())
    assert not (tmp_path / "none.db").exists()


def test_the_view_gives_what_the_evaluate_command_prints(trained, evaluation):
    from openrlhf_dbb.evaluation.metrics import summarize
    from openrlhf_dbb.evaluation.results import read_evaluation

    folder = evaluation()
    record(trained.url, "run", folder)
    summary = summarize(read_evaluation(folder).results["sums"])
    with open_store(trained.url) as store:
        (row,) = store.query("SELECT accuracy, best, majority, length, truncated, missing FROM evaluations")
    names = ("accuracy", "best", "majority", "length", "truncated", "missing")
    assert tuple(row) == pytest.approx([getattr(summary, name).mean for name in names], rel=1e-15)

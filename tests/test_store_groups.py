"""Policy versions and the ledger of groups: settled once with their step, abandoned by a roll back or at the end."""

import json
from dataclasses import replace

import numpy as np
import pytest
from sqlalchemy import event, text
from store_invariants import check

from openrlhf_dbb.cli.main import main
from storage import GroupRows, StoreError, open_store, read_log, read_posteriors
from storage.inspection import group_fates, prompt_history, rollouts
from storage.retry import Interrupted

NAN = float("nan")


@pytest.fixture
def run(store, fill):
    return fill.run(store)


@pytest.fixture
def ids(store, fill):
    return np.sort(fill.prompts(store, 4))


def given_fates(**fates):
    return {fate: np.array(ordinals) for fate, ordinals in fates.items()}


def train(run, ids, fill):
    """Two steps of groups of 4, then two open groups.

    Groups 1 to 4 are asked for before step 1, which trains on 1 and 2 and filters 3. Groups 5 and 6 are asked for
    after it; step 2 trains on 4, which is of policy 0, and on 6, and gives 5 up. Groups 7 and 8 are open.
    """
    a, b, c, d = ids
    fill.groups(run, ids)
    usage = fill.usage([a, b, c], [4, 1, 0], trained=[4, 4, 0], trained_tokens=[40, 40, 0], informative=[4, 4, 0],
                       rescued=[4, 0, 0])  # fmt: skip
    fill.step(run, 1, [a, b, c], [4, 1, 0], usage=usage, fates=given_fates(trained=[1, 2], filtered=[3]))
    fill.groups(run, [a, b], version=1)
    kept = replace(fill.rollouts([b, d], [2, 3]), policy_version=np.array([1.0, 1.0, 0.0, 0.5]))
    fates = given_fates(stale=[5], trained=[6, 4])
    fill.step(run, 2, [b, d], [2, 3], policy_version=np.array([NAN, 0.25]), kept=kept, fates=fates)
    fill.groups(run, [c, a], version=2, number=1)


def ledger(store, columns="ordinal, fate, step"):
    return [tuple(row) for row in store.query(f"SELECT {columns} FROM groups ORDER BY run_id, ordinal")]


TRAINED = [
    (1, "trained", 1), (2, "trained", 1), (3, "filtered", 1), (4, "trained", 2), (5, "stale", 2), (6, "trained", 2),
]  # fmt: skip


def test_every_group_has_its_fate_and_lag(store, run, ids, fill):
    train(run, ids, fill)
    a, b, c, d = ids
    columns = "run_id, ordinal, pass, prompt_id, rollouts, policy_version, fate, step, lag"
    assert ledger(store, columns) == [
        (1, 1, 0, a, 4, 0, "trained", 1, 0),
        (1, 2, 0, b, 4, 0, "trained", 1, 0),
        (1, 3, 0, c, 4, 0, "filtered", 1, 0),
        (1, 4, 0, d, 4, 0, "trained", 2, 1),
        (1, 5, 0, a, 4, 1, "stale", 2, 0),
        (1, 6, 0, b, 4, 1, "trained", 2, 0),
        (1, 7, 1, c, 4, 2, "open", None, None),
        (1, 8, 1, a, 4, 2, "open", None, None),
    ]
    assert run.last_ordinal() == 8
    fates = {"open": 2, "trained": 4, "filtered": 1, "stale": 1, "abandoned": 0}
    assert group_fates(store, run.record) == fates
    assert check(store) == []


def test_visits_and_rollouts_have_their_policy_version(store, run, ids, fill):
    train(run, ids, fill)
    a, b, c, d = ids
    visits = "SELECT step, prompt_id, policy_version, lag FROM posterior_history ORDER BY step, prompt_id"
    expected = [(1, a, 0, 0), (1, b, 0, 0), (1, c, 0, 0), (2, b, 1, 0), (2, d, 0.25, 0.75)]
    assert store.query(visits) == expected
    samples = "SELECT prompt_id, sample, policy_version, lag FROM rollouts ORDER BY prompt_id, sample"
    assert store.query(samples) == [(b, 0, 1, 0), (b, 1, 1, 0), (d, 0, 0, 1), (d, 1, 0.5, 0.5)]
    assert [row["lag"] for row in rollouts(store, run.record, 2)] == [0, 0, 1, 0.5]
    assert [visit["lag"] for visit in prompt_history(store, run.record, int(d))] == [0.75]
    for read in (read_log, read_posteriors):
        assert read(store, run.record).lag.tolist() == [0, 0, 0, 0, 0.75]
    # The step's own policy is NULL in the table, whether it was given as its number, as NaN or not at all.
    with store.database.transaction() as connection:
        for table, stored in (("dbb_history", [None] * 4 + [0.25]), ("dbb_rollout", [None, None, 0, 0.5])):
            rows = connection.execute(text(f"SELECT policy_version FROM {table} ORDER BY step, prompt_id"))
            assert [version for (version,) in rows] == stored


def test_a_step_of_its_own_policy_is_stored_as_ever(store, fill, ids):
    """With the digest that release 0.1.0 gave it (tests/store_versions), and no statement about groups."""
    statements = []
    run = fill.run(store)
    two = store.register_prompts(["1 + 1 = ?", "2 + 2 = ?"], ["2", "4"])
    rows = fill.rows(run, two - len(ids), [4, 1], shared={"clock": np.array([1.0, 0.1])})  # their ids there: 2 and 1
    event.listen(store.database.engine, "before_cursor_execute", lambda *given: statements.append(given[2]))
    run.record_step(1, rows)
    assert not any("dbb_group" in each or "policy_version" in each for each in statements)
    with store.database.transaction() as connection:
        assert bytes(connection.scalar(text("SELECT digest FROM dbb_step"))).hex() == "7af1a5c77c58603db0faacade2716139"
    # A repeat that says the same in other words.
    run.record_step(1, replace(rows, policy_version=np.array([0.0, NAN]), fates=given_fates(trained=[])))
    with pytest.raises(StoreError, match="it must be from 0 to 0, or NaN for the step's own policy"):
        run.record_step(1, replace(rows, policy_version=np.array([0.5, NAN])))


def test_repeats_change_nothing(store, run, ids, fill, dump):
    two = np.array([2, 2])
    groups = GroupRows(np.array([2, 1]), np.array([0, 1]), ids[:2], two, 0.0)
    run.record_groups(groups)
    run.record_groups(groups)
    assert ledger(store, "ordinal, pass, prompt_id") == [(1, 1, ids[1]), (2, 0, ids[0])]
    usage = fill.usage(ids[:2], [1, 2], 2)
    rows = fill.rows(run, ids[:2], [1, 2], 2, usage=usage, fates=given_fates(trained=[2, 1]))
    run.record_step(1, rows)
    before = dump(store)
    run.record_step(1, rows)
    run.record_step(1, replace(rows, fates=given_fates(trained=[1, 2], stale=[])))
    run.record_groups(groups)  # even after they were settled
    assert dump(store) == before
    for other in (None, given_fates(trained=[1], stale=[2])):
        with pytest.raises(StoreError, match=r"step 1 .* already recorded with different content"):
            run.record_step(1, replace(rows, fates=other))
    # Those of a call that are new are stored, if the others are the same.
    three = GroupRows(np.array([3, 2, 1]), np.array([1, 0, 1]), ids[[2, 0, 1]], np.array([2, 2, 2]), 0.0)
    run.record_groups(three)
    assert ledger(store) == [(1, "trained", 1), (2, "trained", 1), (3, "open", None)]
    assert check(store) == []


@pytest.mark.parametrize(
    ("change", "there"),
    [
        ({"passes": np.array([0, 1])}, r"\(0, 2, 4, 0.0\), not \(1, 2, 4, 0.0\)"),
        ({"prompt_ids": np.array([1, 3])}, r"\(0, 2, 4, 0.0\), not \(0, 3, 4, 0.0\)"),
        ({"rollouts": np.array([4, 5])}, r"\(0, 2, 4, 0.0\), not \(0, 2, 5, 0.0\)"),
        ({"policy_version": 0.5, "ordinals": np.array([3, 2])}, r"\(0, 2, 4, 0.0\), not \(0, 2, 4, 0.5\)"),
    ],
)
def test_a_number_is_never_used_again(store, run, ids, fill, dump, change, there):
    fill.groups(run, ids[:2])
    before = dump(store)
    rows = GroupRows(np.array([1, 2]), np.array([0, 0]), ids[:2], np.array([4, 4]), 0.0)
    message = rf"group 2 of run 'run' is already recorded with different content: .* is {there}; go on after"
    with pytest.raises(StoreError, match=message):
        run.record_groups(replace(rows, **change))
    assert dump(store) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ordinals": np.array([1, 1])}, "groups.ordinals: group 1 is there more than once"),
        ({"ordinals": np.array([1, 0])}, r"groups.ordinals\[1\] is 0; it must be at least 1"),
        ({"ordinals": np.array([1.0, 2.0])}, "groups.ordinals has type float64; integers"),
        ({"passes": np.array([-1, 0])}, r"groups.passes\[0\] is -1; it must be at least 0"),
        ({"rollouts": np.array([4, 0])}, r"groups.rollouts\[1\] is 0; it must be at least 1"),
        ({"prompt_ids": np.array([1])}, "groups.prompt_ids has 1 values for 2 ordinals"),
        *(({"policy_version": bad}, f"groups.policy_version is {bad}; it must be") for bad in (-1, NAN, np.inf, None)),
    ],
)
def test_bad_groups_are_refused(open_new, fill, change, message):
    store = open_new("sqlite")
    run, ids = fill.run(store), fill.prompts(store, 2)
    rows = GroupRows(np.array([1, 2]), np.array([0, 0]), ids, np.array([4, 4]), 0.0)
    with pytest.raises(StoreError, match=message):
        run.record_groups(replace(rows, **change))
    assert run.last_ordinal() == 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"fates": {"open": np.array([1])}}, "step 1: fates holds 'open'; it may hold trained, filtered, stale"),
        ({"fates": {"abandoned": np.array([1])}}, "step 1: fates holds 'abandoned'"),
        ({"fates": given_fates(trained=[1], stale=[2, 1])}, "step 1: fates: group 1 is there more than once"),
        ({"fates": given_fates(trained=[1.0])}, r"fates\['trained'\] has type float64"),
        ({"policy_version": np.array([0.0, -1.0])}, "policy_version of prompt . is -1.0; it must be from 0 to 0, or N"),
        ({"policy_version": np.array([0.5, NAN])}, "policy_version of prompt . is 0.5; it must be from 0 to 0"),
        ({"policy_version": np.array([np.inf, NAN])}, "policy_version of prompt . is inf"),
        ({"policy_version": np.array([0.0])}, r"policy_version has shape \(1,\); it must be \(2,\)"),
        ({"kept": np.array([1.0, 0.0])}, "rollouts.policy_version of prompt . is 1.0; it must be from 0 to 0"),
        ({"kept": np.array([0.0])}, r"rollouts.policy_version has shape \(1,\); it must be \(2,\)"),
    ],
)
def test_bad_fates_and_versions_are_refused(open_new, fill, more, message):
    store = open_new("sqlite")
    run, ids = fill.run(store), fill.prompts(store, 2)
    fill.groups(run, ids)
    if "kept" in more:
        more = {"kept": replace(fill.rollouts(ids, [1, 2], samples=1), policy_version=more["kept"])}
    with pytest.raises(StoreError, match=message):
        fill.step(run, 1, ids, [1, 2], **more)
    assert store.find_run("run").last_step == 0


@pytest.mark.parametrize(
    ("fates", "message"),
    [
        (given_fates(stale=[7, 9]), "group 9 cannot be stale, it is not recorded; only an open group"),
        (given_fates(trained=[7], filtered=[3, 8]), "group 3 cannot be filtered, it is filtered in step 1; only an op"),
        (given_fates(trained=[5, 7]), "group 5 cannot be trained, it is stale in step 2"),
        (given_fates(trained=[10]), "group 10 cannot be trained, it is abandoned; only"),
        (given_fates(trained=[11]), "group 11 cannot be trained, it is not recorded"),  # of another run
    ],
)
def test_only_open_groups_are_settled_and_only_with_the_whole_step(store, run, ids, fill, dump, fates, message):
    train(run, ids, fill)
    other = fill.run(store, "other")
    fill.groups(other, np.repeat(ids[0], 11))
    with store.database.transaction(write=True) as connection:
        abandoned = "INSERT INTO dbb_group VALUES (1, 10, 0, 1, 4, 0, 'abandoned', NULL)"
        connection.exec_driver_sql(abandoned)
    before = dump(store)
    with pytest.raises(StoreError, match=f"step 3 of run 'run': {message}"):
        fill.step(run, 3, ids[:2], [1, 2], fates=fates)
    assert dump(store) == before
    assert store.find_run("run").last_step == 2


def test_a_roll_back_abandons_what_is_open_or_settled_later(store, run, ids, fill):
    train(run, ids, fill)
    other = fill.run(store, "other")
    fill.groups(other, ids[:1])
    run.roll_back(1)
    lost = [(ordinal, "abandoned", None) for ordinal in (4, 5, 6, 7, 8)]
    assert ledger(store) == [*TRAINED[:3], *lost, (1, "open", None)]
    assert check(store) == []
    # Numbers go on; the same prompts are asked for anew.
    assert fill.groups(run, ids[[1, 3]], version=1).tolist() == [9, 10]
    fill.step(run, 2, ids[[1, 3]], [2, 3], fates=given_fates(trained=[9, 10]))
    assert ledger(store)[8:10] == [(9, "trained", 2), (10, "trained", 2)]
    assert check(store) == []
    run.roll_back(0)
    assert {fate for _, fate, _ in ledger(store)[:10]} == {"abandoned"}
    assert run.last_ordinal() == 10
    assert check(store) == []


def test_a_claim_changes_nothing_and_a_roll_back_to_the_same_step_abandons_the_open_ones(store, run, ids, fill, dump):
    train(run, ids, fill)
    before = dump(store)["dbb_group"]
    claimed = store.claim_run(1)
    assert dump(store)["dbb_group"] == before
    with pytest.raises(StoreError, match="was taken over"):
        fill.groups(run, ids)
    with pytest.raises(StoreError, match="was taken over"):
        run.record_groups(GroupRows(np.array([9]), np.array([0]), ids[:1], np.array([4]), 0.0))
    events = store.query("SELECT count(*) FROM dbb_event")
    assert claimed.roll_back(2) == 0
    assert ledger(store) == [*TRAINED, (7, "abandoned", None), (8, "abandoned", None)]
    assert store.query("SELECT count(*) FROM dbb_event") == events
    assert check(store) == []


@pytest.mark.parametrize("step", [1, 2])
def test_a_roll_back_cut_off_before_its_commit_is_done_again(store, run, ids, fill, step):
    """It is told from one whose acknowledgement was lost even where no step is undone."""
    train(run, ids, fill)
    cut = []

    def cut_off(connection):
        if not cut:
            cut.append(connection)
            raise Interrupted("cut off")

    event.listen(store.database.engine, "commit", cut_off)
    run.roll_back(step)
    assert len(cut) == 1
    assert group_fates(store, run.record)["open"] == 0
    assert run.record.last_step == step
    assert check(store) == []


def test_the_end_of_a_run_abandons_the_open_ones(store, run, ids, fill, dump):
    train(run, ids, fill)
    run.finish()
    assert ledger(store) == [*TRAINED, (7, "abandoned", None), (8, "abandoned", None)]
    assert check(store) == []
    before = dump(store)
    run.finish()
    assert dump(store) == before
    with pytest.raises(StoreError, match="run 'run' finished at step 2"):
        fill.groups(run, ids[:1])


def test_a_run_without_steps_is_deleted_with_its_groups(store, run, ids, fill):
    other = fill.run(store, "other")
    fill.groups(other, ids[:1])
    fill.groups(run, ids)
    run.discard()
    assert ledger(store, "run_id, ordinal") == [(2, 1)]


def test_a_warm_start_takes_no_groups(store, run, ids, fill):
    train(run, ids, fill)
    new = fill.run(store, "new")
    new.warm_start(store, run.record, ids)
    assert new.last_ordinal() == 0
    assert group_fates(store, new.record) == {}


GROUP = "a group is settled by a recorded step later than its policy, or by none; of a finished run none is open"
USAGE = "where a step has groups, it has trained on those trained, and filtered those filtered"


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        (
            "UPDATE dbb_group SET step = 2 WHERE ordinal = 7",
            {f"{GROUP}: group 7: open, step 2, policy version 2.0"},
        ),
        (
            "UPDATE dbb_group SET fate = 'trained' WHERE ordinal = 7",
            {f"{GROUP}: group 7: trained, step None, policy version 2.0"},
        ),
        (
            "UPDATE dbb_group SET fate = 'stale', step = 3 WHERE ordinal = 8",
            {f"{GROUP}: group 8: stale, step 3, policy version 2.0"},
        ),
        ("UPDATE dbb_group SET fate = 'odd' WHERE ordinal = 8", {f"{GROUP}: group 8: odd, step None"}),
        ("UPDATE dbb_group SET policy_version = 2 WHERE ordinal = 4", {f"{GROUP}: group 4: trained, step 2, policy"}),
        ("UPDATE dbb_group SET policy_version = -1 WHERE ordinal = 8", {f"{GROUP}: group 8: open, step None, policy"}),
        (
            "UPDATE dbb_run SET status = 'finished'",
            {f"{GROUP}: group {ordinal}: open, step None, policy version 2.0" for ordinal in (7, 8)},
        ),
        (
            "UPDATE dbb_group SET rollouts = 3 WHERE ordinal = 4",
            {f"{USAGE}: step 2, prompt 4: 3 rollouts trained, 0 filtered, 0 stale; in the usage 4 trained, 0 filtered"},
        ),
        (
            "DELETE FROM dbb_group WHERE ordinal = 3",
            {f"{USAGE}: step 1, prompt 3: 0 rollouts trained, 0 filtered, 0 stale; in the usage 0 trained, 4 filtered"},
        ),
        (
            "UPDATE dbb_group SET prompt_id = 99 WHERE ordinal = 5",  # stale ones may be in no usage
            {"a row belongs to a prompt: prompt 99, 1 rows of dbb_group"},
        ),
        (
            "UPDATE dbb_history SET policy_version = 1 WHERE step = 1 AND prompt_id = 2",
            {"a policy version is from 0 to step - 1: step 1, prompt 2: 1.0"},
        ),
        (
            "UPDATE dbb_rollout SET policy_version = -1 WHERE prompt_id = 4 AND sample = 0",
            {"a policy version is from 0 to step - 1: step 2, prompt 4: -1.0"},
        ),
    ],
)
def test_damage_is_found(store, run, ids, fill, statement, expected):
    train(run, ids, fill)
    with store.database.transaction(write=True) as connection:
        connection.execute(text(statement))
    found = {f"{violation.what}: {violation.where}" for violation in check(store)}
    assert len(found) == len(expected)
    for line in expected:
        assert any(shown.startswith(line) for shown in found), found


def test_a_step_whose_usage_was_not_counted_may_have_groups(store, run, ids, fill):
    fill.groups(run, ids)
    fill.step(run, 1, ids[:1], [1], usage=None, fates=given_fates(trained=[1], filtered=[2]))
    assert check(store) == []


# commands


def test_show_counts_the_groups_by_fate(store, run, ids, fill, capsys):
    assert main(["show", "--store.url", store.url]) == 0
    assert "groups:" not in capsys.readouterr().out
    train(run, ids, fill)
    assert main(["show", "--store.url", store.url]) == 0
    line = "groups by fate:    2 open, 4 trained, 1 filtered, 1 stale, 0 abandoned\n"
    assert line in capsys.readouterr().out
    run.finish()
    assert main(["show", "--store.url", store.url]) == 0
    assert "groups by fate:    4 trained, 1 filtered, 1 stale, 2 abandoned\n" in capsys.readouterr().out
    assert main(["show", "--json", "--store.url", store.url]) == 0
    fates = {"open": 0, "trained": 4, "filtered": 1, "stale": 1, "abandoned": 2}
    assert json.loads(capsys.readouterr().out)["groups_by_fate"] == fates


def test_history_shows_the_lag_where_there_is_any(store, run, ids, fill, capsys):
    train(run, ids, fill)
    for prompt, names, last in ((ids[3], ["variance", "lag"], "0.75"), (ids[0], ["mean", "variance"], "0.09")):
        assert main(["history", str(prompt), "--store.url", store.url]) == 0
        header, visit = capsys.readouterr().out.splitlines()[3:]
        assert header.split()[-2:] == names
        assert visit.split()[len(header.split()) - 1] == last


def test_a_store_opened_again_goes_on_with_the_ledger(store, run, ids, fill):
    train(run, ids, fill)
    run.release()
    with open_store(store.url) as again:
        claimed = again.claim_run(1)
        assert claimed.last_ordinal() == 8
        fill.step(claimed, 3, ids[:1], [1], fates=given_fates(trained=[8]))
    assert ledger(store)[6:] == [(7, "open", None), (8, "trained", 3)]
    with pytest.raises(StoreError, match=r"was taken over|was released"):
        run.last_ordinal()

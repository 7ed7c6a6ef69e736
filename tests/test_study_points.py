"""Policies that a run saved on its way: measured once each, at the rollouts that the store says."""

from types import SimpleNamespace

import pytest

import storage
from study import exact, files, measure
from study.data import PointRow
from study.protocol import PlannedRun


@pytest.fixture
def study(tmp_path, fill, monkeypatch):
    """A finished run of 4 steps, 8 rollouts each, that has saved two models; accuracy is read off a model's folder."""
    with storage.open_store(f"sqlite:///{tmp_path}/study.db") as store:
        checkpoints = "runs/few-n1-single-s21/checkpoints"
        config = {"ckpt.path": checkpoints, "actor.adam.lr": 2e-4}
        run, ids = fill.run(store, "few-n1-single-s21", config=config), fill.prompts(store, 2)
        for step in range(1, 5):
            fill.step(run, step, ids, [1, 2], usage=fill.usage(ids, [4, 4]))
        run.finish()
    for step in (2, 4):
        (tmp_path / checkpoints / f"global_step{step}_hf").mkdir(parents=True)
    (tmp_path / checkpoints / "global_step4").mkdir()  # DeepSpeed's own
    seen = []

    def read(folder, kind):
        return SimpleNamespace(mark=None, policy=seen.append, accuracy=lambda _: 0.1 * len(seen))

    monkeypatch.setattr(exact, "read", read)
    monkeypatch.setattr(measure, "_side_by_side", lambda jobs, *_: (each(*given) for each, given, _ in jobs))
    planned = PlannedRun("few-n1-single-s21", "few-n1", "single", 1, 21, "medium", {})
    return SimpleNamespace(folder=tmp_path, planned=planned, seen=seen)


def test_each_saved_policy_is_measured_once(study):
    for _ in range(2):
        measure.measure_points([study.planned], study.folder, 1)
    assert [model and model.name for model in study.seen] == [None, "global_step2_hf", "global_step4_hf"]
    row = ("few-n1-single-s21", "few-n1", "single", 1, 21, 2e-4)
    assert files.read(study.folder / "points.csv", PointRow) == (
        PointRow(*row, 0, 0.0, 0.1), PointRow(*row, 2, 16.0, 0.2), PointRow(*row, 4, 32.0, 0.3),
    )  # fmt: skip


def test_a_run_that_is_not_finished_is_left_for_later(study):
    other = PlannedRun("few-n1-single-s22", "few-n1", "single", 1, 22, "medium", {})
    measure.measure_points([other], study.folder, 1)
    assert not (study.folder / "points.csv").exists() and study.seen == []

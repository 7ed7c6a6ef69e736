"""The best model of a run: whole at any moment, and after a resume the best of the steps that are left."""

import contextlib
import json
import os
import pathlib
import shutil

import pytest

from openrlhf_dbb.errors import RunError
from openrlhf_dbb.saved import best_model, checkpoints
from openrlhf_dbb.saved.best_model import Best, BestModel

RUN = "1b9d6bcd-0000"


def best(step, value, run=RUN, measure="eval_mean@8", evaluated=("aime24",)):
    return Best(run, step, measure, value, list(evaluated))


def offer(kept, candidate):
    """What the trainer does after an evaluation; the policy is its step."""
    if not kept.wants(candidate):
        return False
    folder = kept.begin()
    (folder / "model.safetensors").write_text(f"policy of step {candidate.step}")
    (folder / "config.json").write_text("{}")
    kept.finish(candidate, [checkpoints.sizes(folder)] * 2)
    return True


def shown(folder):
    """Step of the best model, whose folder is whole; None if there is none."""
    link = folder / "best"
    if not link.exists():
        return None
    said = best_model.read(link)
    assert (link / "model.safetensors").read_text() == f"policy of step {said.step}"
    assert (link / "config.json").read_text() == "{}"
    return said.step


def there(folder):
    """Steps of all models on disk, in order; what is left of a deleted one is none."""
    found = map(best_model.read, (folder / "best_models").glob("step*"))
    return sorted(best.step for best in found if best is not None)


@pytest.fixture
def kept(tmp_path):
    return BestModel(tmp_path / "checkpoints", RUN)


def test_the_highest_value_so_far_is_the_best(kept, tmp_path):
    values = ((1, float("nan")), (2, 0.25), (4, 0.125), (6, 0.5), (8, 0.5))
    taken = [offer(kept, best(step, value)) for step, value in values]
    assert taken == [False, True, False, True, False]  # the first of equal ones stays
    assert there(tmp_path) == [6]  # no checkpoint needs the others
    assert shown(tmp_path) == 6
    assert json.loads((tmp_path / "best/best.json").read_text()) == {
        "run": RUN, "step": 6, "measure": "eval_mean@8", "value": 0.5, "evaluated": ["aime24"],
    }  # fmt: skip


def test_another_measure_or_other_data_begins_anew(kept, tmp_path):
    offer(kept, best(2, 0.5))
    assert offer(kept, best(4, 0.25, measure="eval_best@8"))
    assert offer(kept, best(6, 0.125, measure="eval_best@8", evaluated=("aime24", "aime25")))
    assert shown(tmp_path) == 6


def test_a_best_model_is_deleted_once_no_resume_can_need_it(kept, tmp_path):
    offer(kept, best(2, 0.1))
    kept.settle(2)  # a checkpoint of step 2 is whole
    offer(kept, best(3, 0.2))
    assert there(tmp_path) == [2, 3]
    offer(kept, best(5, 0.3))
    assert there(tmp_path) == [
        2,
        5,
    ]  # a resume goes back to step 2, or to a later checkpoint, not to 3
    kept.settle(4)
    assert there(tmp_path) == [2, 5]  # a resume from step 4 needs the best of the steps up to 4
    kept.settle(6)
    assert there(tmp_path) == [5]


# After 4 steps 5 and 6 are undone; 5 was evaluated after its own checkpoint was whole.
@pytest.mark.parametrize(("resumed", "expected"), [(0, None), (4, 2), (5, 5), (6, 5)])
def test_a_resume_goes_back_to_the_best_of_its_steps(tmp_path, resumed, expected):
    before = BestModel(tmp_path / "checkpoints", RUN)
    offer(before, best(2, 0.1))
    before.settle(2)
    offer(before, best(5, 0.3))
    after = BestModel(tmp_path / "checkpoints", RUN)
    after.roll_back(resumed)
    assert shown(tmp_path) == expected
    assert after.newest() == before.newest(resumed)
    assert all(step <= resumed for step in there(tmp_path))
    # the undone step is evaluated again, with a value below the one that was undone, and above the one that is left
    assert offer(after, best(7, 0.2)) == (expected != 5)


def test_a_best_json_that_was_changed_is_no_model(kept, tmp_path):
    offer(kept, best(2, 0.5))
    file = tmp_path / "best/best.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"more": 1}))
    assert kept.newest() is None and offer(kept, best(4, 0.25)) and shown(tmp_path) == 4


class Killed(BaseException):
    """As if the process had been killed."""


CALLS = [
    (os, "rename"), (os, "replace"), (os, "unlink"), (os, "symlink"), (os, "mkdir"), (shutil, "rmtree"), (os, "fsync"),
]  # fmt: skip


def killed_at(monkeypatch, number):
    """End the process before its ``number``-th change of the disk from now on; a folder's deletion also half-way."""
    left = [number]

    def dying(function, name):
        def call(*args, **options):
            left[0] -= 1
            if left[0] == 0:
                if name == "rmtree" and os.path.isdir(args[0]):
                    next(iter(sorted(pathlib.Path(args[0]).iterdir()))).unlink()
                raise Killed
            return function(*args, **options)

        return call

    for module, name in CALLS:
        monkeypatch.setattr(module, name, dying(getattr(module, name), name))


@pytest.mark.parametrize("number", range(1, 40))
def test_a_kill_at_any_moment_leaves_the_old_or_the_new_one(tmp_path, monkeypatch, number):
    kept = BestModel(tmp_path / "checkpoints", RUN)
    offer(kept, best(2, 0.1))
    kept.settle(2)
    checkpoint = 2
    finished = False
    with monkeypatch.context() as patched, contextlib.suppress(Killed):
        killed_at(patched, number)
        offer(kept, best(3, 0.2))
        offer(kept, best(5, 0.3))
        checkpoint = 6  # is whole
        kept.settle(6)
        finished = True
    assert finished or number < 39  # the kills reach to the end
    assert shown(tmp_path) in (2, 3, 5)
    again = BestModel(tmp_path / "checkpoints", RUN)
    again.roll_back(checkpoint)
    assert shown(tmp_path) == {2: 2, 6: 5}[checkpoint]
    assert not again.unfinished.exists()
    assert offer(again, best(8, 0.4)) and shown(tmp_path) == 8
    again.settle(8)
    assert [path.name for path in again.folder.glob("step*")] == ["step8-1b9d6bcd"]


def test_it_is_beside_the_checkpoints_or_in_their_folder():
    assert BestModel(pathlib.Path("runs/mine/checkpoints"), RUN).link == pathlib.Path(
        "runs/mine/best"
    )
    # of several runs with folders like these, each has its own
    assert BestModel(pathlib.Path("ckpt/mine"), RUN).link == pathlib.Path("ckpt/mine/best")


def test_something_else_of_its_name_is_never_replaced(kept, tmp_path):
    (tmp_path / "best").mkdir()
    (tmp_path / "best/mine.txt").write_text("mine")
    with pytest.raises(RunError, match="best is in the way of the link to the run's best model"):
        offer(kept, best(2, 0.1))
    assert (tmp_path / "best/mine.txt").read_text() == "mine"

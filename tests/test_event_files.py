"""Scalars read from TensorBoard's event files, also of a run that was resumed."""

import pytest

from openrlhf_dbb.evaluation.event_files import read_scalars

tensorboard = pytest.importorskip("torch.utils.tensorboard")


def test_the_last_value_of_a_step_counts(tmp_path):
    for tag, values in (("a", [(2, 0.25), (1, 0.5)]), ("a", [(2, 0.75)]), ("b", [(7, 8.0)])):
        with tensorboard.SummaryWriter(str(tmp_path / "run")) as writer:
            for step, value in values:
                writer.add_scalar(tag, value, step)
    scalars = read_scalars(tmp_path / "run")
    assert {tag: (logged.step.tolist(), logged.value.tolist()) for tag, logged in scalars.items()} == {
        "a": ([1, 2], [0.5, 0.75]),
        "b": ([7], [8.0]),
    }
    assert read_scalars(tmp_path) == {}

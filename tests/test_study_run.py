"""Runs of a protocol: none is started after the time, and trained models are evaluated where they are."""

import pytest

import storage
from openrlhf_dbb.errors import UsageError
from study import measure, protocol, run

GPU = protocol.load("gpu")


def test_no_run_is_started_after_the_time(tmp_path, capsys):
    assert run.train(GPU.runs[:3], GPU, tmp_path, lanes=2, until=0.0) == {}
    assert capsys.readouterr().out.splitlines() == [
        "3 runs, 0 of them finished",
        "out of time: 3 runs are left; the same command continues",
    ]


def test_what_a_run_lacks_is_said_before_any_lane_starts(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UsageError, match=r"--preset qwen3-1\.7b needs CUDA, and there is none here"):
        run.refuse_early(GPU.runs[:3], GPU, tmp_path)


def test_each_finished_runs_model_is_evaluated_and_a_failure_is_named(fill, tmp_path, capfd):
    first, second = GPU.runs[:2]
    with storage.open_store(run.store_url(tmp_path)) as store:
        config = {"ckpt.output_dir": f"runs/{first.name}/model", "rollout.max_new_tokens": 4096}
        made = fill.run(store, first.name, config=config)
        fill.step(made, 1, fill.prompts(store, 2), (1, 0), 2)
        made.finish(0, 0)
    failed = measure.evaluate([first, second], GPU, tmp_path, until=float("inf"))
    assert failed == {first.name: "its evaluation ended with exit status 2; the same command continues"}
    assert f"runs/{first.name}" in capfd.readouterr().err  # where there is no model
    assert measure.evaluate([first], GPU, tmp_path, until=0.0) == {}

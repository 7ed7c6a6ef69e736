"""The study's task: its files, read by OpenRLHF's own loader and evaluated by data source."""

import json
from types import SimpleNamespace

import pytest

pytest.importorskip("transformers")

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.tiny import steps
from openrlhf_dbb.tiny.task import generate
from study import tasks


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def weights(task):
    return (task.model / "model.safetensors").read_bytes()


@pytest.fixture
def short(monkeypatch):
    """A warm start of 2 or 1 steps on few rows instead of hundreds on many."""
    monkeypatch.setattr("openrlhf_dbb.tiny.model.WARMUP_ROWS", 60)
    monkeypatch.setattr(
        tasks,
        "STARTS",
        {
            start: tasks.STARTS[start] | {"warmup_steps": size}
            for start, size in (("medium", 2), ("hard", 1), ("steps", 1))
        },
    )


def test_starts_of_a_seed_share_prompts_and_seeds_share_nothing(tmp_path, short):
    medium, hard, other = (
        tasks.prepare(tmp_path / f"{start}-{seed}", seed, start)
        for start, seed in (("medium", 1), ("hard", 1), ("medium", 2))
    )
    assert rows(medium.train) == rows(hard.train) == generate("train", 2048, 1)
    assert rows(medium.evaluation) == rows(hard.evaluation)
    assert [(row["datasource"], row["input"]) for row in rows(medium.evaluation)] == [
        *(("heldout", row["input"]) for row in generate("heldout", 512, 1)),
        *(("ood", row["input"]) for row in generate("ood", 128, 1)),
    ]
    assert rows(other.train) != rows(medium.train) and rows(other.evaluation) != rows(medium.evaluation)
    assert len({weights(medium), weights(hard), weights(other)}) == 3


def test_the_task_with_steps_has_its_own_prompts_and_a_model_of_the_same_size(tmp_path, short):
    made = tasks.prepare(tmp_path / "steps", 1, "steps")
    tiny = tasks.prepare(tmp_path / "tiny", 1, "medium")
    assert rows(made.train) == steps.generate("train", 2048, 1)
    assert rows(made.evaluation) == [
        *(row | {"datasource": "heldout"} for row in steps.generate("heldout", 512, 1)),
        *(row | {"datasource": "ood"} for row in steps.generate("ood", 128, 1)),
    ]
    assert [len(weights(task)) for task in (made, tiny)] == [len(weights(tiny))] * 2
    assert (made.model / "tokenizer.json").read_bytes() == (tiny.model / "tokenizer.json").read_bytes()
    tasks.prepare(tmp_path / "steps", 1, "medium")  # another task replaces the files
    assert rows(made.train) == rows(tiny.train)


def test_the_warm_start_learns_whole_chains(tmp_path, monkeypatch):
    from openrlhf_dbb.tiny import model

    taught = []
    monkeypatch.setattr(model, "_warm_start", lambda *given: taught.append(given[2]))
    tasks.prepare(tmp_path / "steps", 1, "steps")
    assert taught == [steps.generate("sft", model.WARMUP_ROWS, 1)]


def test_every_start_belongs_to_one_task():
    assert [start for kind in tasks.TASKS.values() for start in kind.starts] == list(tasks.STARTS)
    assert tasks.kind("hard") == tasks.TASKS["tiny"]
    assert tasks.kind("steps") == tasks.TASKS["steps"]
    for name, kind in tasks.TASKS.items():
        assert {tasks.STARTS[start].get("task", "tiny") for start in kind.starts} == {name}


def test_openrlhf_reads_the_files_and_the_evaluation_has_both_data_sources(tmp_path, short, monkeypatch):
    pytest.importorskip("openrlhf")
    from openrlhf_dbb.platform import cpu

    cpu.prepare_driver()
    import torch
    from openrlhf.datasets import PromptDataset
    from openrlhf.datasets.utils import blending_datasets

    from openrlhf_dbb.actors.evaluation import collect

    monkeypatch.setattr(tasks, "PROMPTS", {"train_prompts": 4, "heldout_prompts": 3, "ood_prompts": 2})
    task = tasks.prepare(tmp_path / "task", 1, "hard")
    strategy = SimpleNamespace(
        args=SimpleNamespace(data=SimpleNamespace(input_key="input", label_key="label")),
        is_rank_0=lambda: False,
        print=lambda *_: None,
    )
    train, data = (
        PromptDataset(blending_datasets(str(path), None, strategy, 42), None, strategy)
        for path in (task.train, task.evaluation)
    )
    assert train.datasources == ["default"] * 4
    assert train.labels == [row["label"] for row in rows(task.train)]
    scores = [1, 1, 0, 1, 0, 0, 1, 0, 0, 0]  # two samples for each of 3 + 2 prompts
    samples = [
        SimpleNamespace(
            rewards=torch.tensor([float(score)]),
            scores=None,
            response_length=torch.tensor([3]),
            truncated=torch.tensor([False]),
        )
        for score in scores
    ]
    logs = collect(data, samples, None, None).logs()
    assert logs["eval_heldout_mean@2"] == pytest.approx(3 / 6)
    assert logs["eval_heldout_best@2"] == pytest.approx(2 / 3)
    assert logs["eval_ood_mean@2"] == pytest.approx(1 / 4)
    assert logs["eval_ood_best@2"] == pytest.approx(1 / 2)


def test_an_unknown_start_is_refused_and_makes_nothing(tmp_path):
    with pytest.raises(UsageError, match="unknown start 'easy'; available: medium, hard, small, steps"):
        tasks.prepare(tmp_path / "task", 1, "easy")
    assert list(tmp_path.iterdir()) == []

"""Going on from the rows of another machine, and measuring the probability of right answers: nothing is done twice."""

import shutil
import subprocess
from queue import Empty

import pandas as pd
import pytest
import torch

from openrlhf_dbb import storage, tasks, tiny
from openrlhf_dbb.errors import UsageError
from study import __main__ as command
from study import collect, forced, measure, protocol, rows, run

PLAN = """
description = "one arm"
preset = "smollm2"
[forced]
heldout = "held out"
pool = "pool"
[flags]
"data.input_template" = "s{}"
"data.prompt_dataset" = "trained"
[arms.learns]
"method" = "draws"
[experiments.rival]
n = 4
arms = ["learns"]
seeds = [21, 22, 23, 24]
"""
PROBLEMS = {
    "held out": {"1+2=": "3", "4+8=": "12"},
    "pool": {"1+1=": "2", "7+7=": "14"},
    "trained": {"7+7=": "14"},
}
"""Right answers by question, of each spec."""


@pytest.fixture
def plan(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text(PLAN)
    return protocol.load(str(path))


@pytest.fixture
def folder(tmp_path):
    """The output folder."""
    made = tmp_path / "output"
    made.mkdir()
    return made


def name(seed):
    return f"rival-learns-s{seed}"


def write_rows(folder, finished, measured):
    """Rows of runs with 24 steps by these seeds, and of measurements by these pairs of seed and step."""
    own = {"experiment": "rival", "arm": "learns", "n": 4, "learning_rate": 2e-5}
    runs = [own | {"run": name(seed), "seed": seed, "steps": 24} for seed in finished]
    points = [
        own | {"run": name(seed), "seed": seed, "step": step, "rollouts": 64, "heldout": 0.5}
        for seed, step in measured
    ]
    for file, made in (("runs", runs), ("forced", points)):
        columns = list(rows.COLUMNS[file])
        rows.write(folder / f"{file}.csv", pd.DataFrame(made).reindex(columns=columns))


def finish(fill, folder, seed):
    """A finished run of two steps in the output folder's store, each of 16 rollouts."""
    config = {
        "ckpt.path": f"{name(seed)}/checkpoints",
        "ckpt.output_dir": f"{name(seed)}/model",
        "actor.adam.lr": 2e-5,
        "actor.model_name_or_path": str(folder / "start"),
    }
    with storage.open_store(run.store_url(folder)) as store:
        made = fill.run(store, name(seed), config=config)
        ids = fill.prompts(store, 4)
        for step in (1, 2):
            fill.step(made, step, ids, [1, 2, 3, 4])
        made.finish()


@pytest.fixture
def trained(monkeypatch):
    """Names of the runs that are given to lanes, which do nothing else."""
    names = []

    def take(number, waiting, folder, failed, bar):
        while True:
            try:
                names.append(waiting.get_nowait()[0].name)
            except Empty:
                return

    monkeypatch.setattr(run, "_lane", take)
    return names


def test_runs_with_rows_are_not_trained_again(plan, folder, fill, trained, capsys):
    # Of the second run the last step is not measured; the fourth is in the store alone.
    write_rows(folder, (21, 22), [(21, 8), (21, 24), (22, 8)])
    finish(fill, folder, 24)
    run.train(plan.runs, plan, folder, lanes=1)
    assert trained == [name(22), name(23)]
    assert "4 runs, 2 of them finished" in capsys.readouterr().out
    # What was measured of the lost training is not mixed with the new one's measurements.
    left = rows.read(folder / "forced.csv", rows.COLUMNS["forced"])
    assert list(zip(left.run, left.step, strict=True)) == [(name(21), 8), (name(21), 24)]


def test_without_measurements_a_row_of_the_run_is_enough(folder, trained, tmp_path):
    path = tmp_path / "plain.toml"
    path.write_text(PLAN.replace("[forced]", "[evaluate]"))
    plain = protocol.load(str(path))
    write_rows(folder, (21, 22), [])
    run.train(plain.runs, plain, folder, lanes=1)
    assert trained == [name(23), name(24)]


def test_the_command_keeps_all_rows_where_every_run_is_finished(plan, folder, trained, tmp_path):
    seeds = [each.seed for each in plan.runs]
    write_rows(folder, seeds, [(seed, 24) for seed in seeds])
    before = {path.name: path.read_text() for path in folder.glob("*.csv")}
    words = ["--protocol", str(tmp_path / "plan.toml"), "--output", str(folder)]
    assert command.main(words) == 0
    assert not trained
    assert {path.name: path.read_text() for path in folder.glob("*.csv")} == before


def test_a_store_without_runs_beside_no_rows_is_refused(folder):
    url = run.store_url(folder)
    storage.open_store(url).close()
    with pytest.raises(UsageError, match="no finished run"):
        collect.collect(url, folder)


def test_results_come_in_the_order_of_the_jobs():
    slow = ["sh", "-c", "sleep 1; echo first"]
    jobs = [(slow,), (["echo", "second"],)]
    made = measure._side_by_side(subprocess.check_output, jobs, 2, "")
    assert list(made) == [b"first\n", b"second\n"]


def save_model(path, seed):
    """A random model of 16 tokens; with seed None every token has the probability 1/16 everywhere."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed or 0)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    if seed is None:
        torch.nn.init.zeros_(model.lm_head.weight)
    model.save_pretrained(path)
    tiny.build_tokenizer().save_pretrained(path)


@pytest.fixture
def measured(monkeypatch):
    """Models in the order in which they are measured, without processes."""
    models = []
    really = forced.measure

    def measure_noted(model, *args, **settings):
        models.append(model)
        return really(model, *args, **settings)

    def problems(spec, instruction):
        return [{"prompt": asked, "label": right} for asked, right in PROBLEMS[spec].items()]

    monkeypatch.setattr(tasks, "problems", problems)
    monkeypatch.setattr(forced, "measure", measure_noted)
    monkeypatch.setattr(
        measure, "_side_by_side", lambda each, jobs, *_: (each(*given) for given in jobs)
    )
    return models


def test_policies_and_the_start_that_runs_share_are_measured_once(plan, folder, fill, measured):
    save_model(folder / "start", None)
    for seed in (21, 22):  # the others are not finished
        finish(fill, folder, seed)
        save_model(folder / name(seed) / "model", seed)
    save_model(folder / name(21) / "checkpoints" / "global_step1_hf", 1)
    measure.measure_forced(plan.runs, plan.forced, folder, 1)
    models = [str(model.relative_to(folder)) for model in measured]
    saved = f"{name(21)}/checkpoints/global_step1_hf"
    assert models == ["start", saved, f"{name(21)}/model", f"{name(22)}/model"]
    table = rows.read(folder / "forced.csv", rows.COLUMNS["forced"])
    found = table.set_index(["run", "step"])
    assert found.rollouts.to_dict() == {
        (name(21), 0): 0,
        (name(22), 0): 0,
        (name(21), 1): 16,
        (name(21), 2): 32,
        (name(22), 2): 32,
    }
    # A space, the digits and one of two ends, each token 1/16: 2/16^3 for one digit, 2/16^4 for two.
    for seed in (21, 22):
        start = found.loc[name(seed), 0]
        assert start.heldout == pytest.approx((2 / 16**3 + 2 / 16**4) / 2, rel=1e-5)
        assert start.pool == pytest.approx(
            2 / 16**3, rel=1e-5
        )  # without the problem of the training
    assert found.heldout.nunique() == 4  # each policy has its own value
    for path in (folder / "start", folder / name(21), folder / name(22)):
        shutil.rmtree(path)
    measure.measure_forced(plan.runs, plan.forced, folder, 1)
    assert len(measured) == 4
    finish(fill, folder, 23)
    save_model(folder / "start", None)
    save_model(folder / name(23) / "model", 23)
    measure.measure_forced(plan.runs, plan.forced, folder, 1)
    assert [model.name for model in measured[4:]] == ["start", "model"]
    again = rows.read(folder / "forced.csv", rows.COLUMNS["forced"])
    assert len(again) == len(table) + 2

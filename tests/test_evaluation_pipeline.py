"""Evaluation during a real training: each prompt's results stored as the verifier gave them, logged, and chosen by."""

import functools
import json
import re
from collections import Counter

import numpy as np
import pytest
import torch
import trainings
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.e2e

# Notes every score that it gives; one response in six or so cannot be verified.
NOTING = """
import json, pathlib, zlib

def reward_func(queries, prompts, labels):
    right = float(queries[0].startswith(prompts[0] + labels[0]))
    score = None if zlib.crc32(queries[0].encode()) % 6 == 0 else right
    with open(pathlib.Path(__file__).with_name("scores.jsonl"), "a") as file:
        file.write(json.dumps([prompts[0], score]) + "\\n")
    return {"rewards": [score], "scores": [score], "extra_logs": {}}
"""


def test_the_stores_numbers_are_those_that_the_verifier_gave(lane, tmp_path):
    """Four evaluations in a training of 6 steps, before it and after steps 2, 4 and 6: 24 held-out prompts, and a
    benchmark of 8 others, which the reward function never sees."""
    from openrlhf_dbb import tiny

    heldout = tiny.prepare(tiny.default_folder()).heldout.read_text().splitlines()[:32]
    (tmp_path / "benchmark.jsonl").write_text("\n".join(heldout[24:]))
    asked = [json.loads(line) for line in heldout[24:]]
    rows = [json.loads(line) for line in heldout[:24]]
    rows = [row | {"datasource": "sorting" if row["input"].startswith("s") else "sums"} for row in rows]
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "noting.py").write_text(NOTING)
    result = lane.train(
        tmp_path, *trainings.SMALL, "--estimator", "dbb", "--run_name", "run", "--train.num_episodes", "3",
        "--ckpt.save_steps", "-1",
        "--reward.remote_url", str(tmp_path / "noting.py"), "--eval.dataset", str(tmp_path / "eval.jsonl"),
        "--eval.steps", "2", "--eval.n_samples_per_prompt", "4", "--ckpt.best_metric_key", "eval_sums_mean@4",
        "--eval.benchmarks", f"mine={tmp_path}/benchmark.jsonl", "--eval.top_p", "0.95",
        "--logger.wandb.key", "0123" * 10,
    )  # fmt: skip
    assert result.error is None, result.output[-4000:]
    noted = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    tried, noted = noted[:48], noted[48:]  # the start scores three responses to each of 16 prompts
    assert len({prompt for prompt, _ in tried}) == 16
    of_evaluation = {row["input"] for row in rows}
    query = functools.partial(trainings.rows, tmp_path)
    by_prompt = query("""SELECT prompt, count(*), sum(samples), sum(verified), sum(successes) FROM evaluation_results
        JOIN prompts USING (prompt_id) WHERE name = 'training' AND benchmark <> 'mine' GROUP BY prompt""")
    of_benchmark = query("""SELECT step, prompt, label, samples FROM evaluation_results
        JOIN prompts USING (prompt_id) WHERE benchmark = 'mine' ORDER BY step, place""")
    columns = "step, benchmark, prompts, accuracy, best, missing, majority, generated_total"
    measures = query(f"SELECT {columns} FROM evaluations")
    steps = query("SELECT step, generated_total FROM steps")
    [model_rewards] = query("SELECT sum(rollouts), sum(successes) FROM steps")

    # The verifier's notes: every evaluation prompt four times in each of four evaluations, and what it said of them.
    given, right, verified = Counter(), Counter(), Counter()
    for prompt, score in noted:
        given[prompt] += 1
        verified[prompt] += score is not None
        right[prompt] += score or 0
    assert {prompt for prompt, *_ in by_prompt} == of_evaluation
    for prompt, evaluations, samples, checked, successes in by_prompt:
        assert (evaluations, samples) == (4, 16) and given[prompt] == 16
        assert (checked, successes) == (verified[prompt], right[prompt])
    assert 0 < sum(verified[prompt] for prompt in of_evaluation) < 24 * 16

    # The benchmark's prompts were asked as they are, and never shown to the reward function.
    assert of_benchmark == [(step, row["input"], row["label"], 4) for step in (0, 2, 4, 6) for row in asked]
    assert given.keys().isdisjoint(row["input"] for row in asked)

    # Training has generated, and been counted for, all the others.
    trained_on = [score for prompt, score in noted if prompt not in of_evaluation]
    assert steps == [(step, 128 * step) for step in range(1, 7)] and len(trained_on) == 768
    assert model_rewards == (sum(score is not None for score in trained_on), sum(score or 0 for score in trained_on))

    # What was logged, and the best checkpoint chosen by it.
    assert [(row[0], row[1]) for row in measures] == [(s, b) for s in (0, 2, 4, 6) for b in ("mine", "sorting", "sums")]
    logged = trainings.logged(tmp_path / "runs/run/tensorboard/run")
    for step, source, prompts, accuracy, best, missing, majority, generated in measures:
        assert prompts == (8 if source == "mine" else sum(row["datasource"] == source for row in rows))
        names = (f"eval/eval_{source}_{name}" for name in ("mean@4", "best@4", "missing"))
        assert [logged[name][step] for name in names] == pytest.approx([accuracy, best, missing], rel=1e-6)
        assert (majority is None) == (source != "mine") and generated == 128 * step
    assert set(logged["train/entropy_loss"]) == set(range(1, 7))
    means = {step: accuracy for step, source, _, accuracy, *_ in measures if source == "sums" and step}
    best_step = max(means, key=means.get)
    mean = {step: np.mean([row[3] for row in measures if row[0] == step]) for step in (0, 2, 4, 6)}
    assert logged["eval/eval_mean@4"] == pytest.approx(mean, rel=1e-6)
    assert "  rollouts     768 generated, 768 trained on" in result.output
    check_best(tmp_path / "runs/run", best_step, means[best_step], result.output)
    check_card(tmp_path, "best", best_step)
    check_card(tmp_path, "model", 6)
    check_tables(lane.folder / "wandb/latest-run/files/media/table/train", tmp_path)
    shown = re.search(r"accuracy +([\d.]+)% before, ([\d.]+)% after", result.output)
    assert [float(percent) / 100 for percent in shown.groups()] == pytest.approx([mean[0], mean[6]], abs=0.0006)


def check_best(folder, step, value, output):
    """The best model is that of its step, with a tokenizer, and no other one is left."""
    said = json.loads((folder / "best/best.json").read_text())
    assert (said["step"], said["measure"]) == (step, "eval_sums_mean@4")
    assert said["value"] == pytest.approx(value, rel=1e-12)
    assert len(list((folder / "best_models").iterdir())) == 1
    assert not list((folder / "checkpoints").glob("_actor/*"))  # none was asked for, and the best is none
    assert f"  best model   step {step}, eval_sums_mean@4 {value:.3f}: {folder}/best" in output
    best, last = (AutoModelForCausalLM.from_pretrained(folder / name).state_dict() for name in ("best", "model"))
    same = all(torch.equal(best[name], last[name]) for name in last)
    assert best.keys() == last.keys() and same == (step == 6)
    assert AutoTokenizer.from_pretrained(folder / "best")("1+2=")["input_ids"]


def check_card(folder, model, step):
    """The card beside a model is of its step; test_evaluation_training.py reads the rest."""
    card = (folder / "runs/run" / model / "README.md").read_text()
    assert f"# run, step {step}\n" in card and f": {step} steps, {128 * step} rollouts\n" in card
    assert ("chosen for its eval_sums_mean@4, the highest" in card) == (model == "best")
    assert "--logger.wandb.key '***'\n" in card


def check_tables(media, folder):
    """W&B got a table of 64 kept rollouts after each evaluated step, with the posteriors of the store."""
    tables = [json.loads(path.read_text()) for path in media.glob("rollouts_*.table.json")]
    query = """SELECT prompt, r.text, r.advantage, h.alpha, h.beta FROM rollouts r JOIN prompts USING (prompt_id)
               LEFT JOIN posterior_history h USING (run_id, step, prompt_id) WHERE step = {}"""
    stored = [Counter(trainings.rows(folder, query.format(step))) for step in (2, 4, 6)]
    places = [tables[0]["columns"].index(name) for name in ("prompt", "response", "advantage", "alpha", "beta")]
    sent = [Counter(tuple(row[place] for place in places) for row in table["data"]) for table in tables]
    assert sorted(sent, key=repr) == sorted(stored, key=repr) and {table.total() for table in sent} == {64}

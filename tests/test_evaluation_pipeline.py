"""Evaluation during a real training: each prompt's results stored as the verifier gave them, logged, and chosen by."""

import itertools
import json
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

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


@dataclass
class Trained:
    """A finished training and what went in."""

    folder: Path
    output: str
    held_out: list  # rows
    benchmark: list  # rows of the other eight
    noted: (
        list  # (prompt, score) of each response that the verifier saw after the start's own trial
    )

    @property
    def run(self):
        return self.folder / "runs/run"

    def query(self, sql):
        return trainings.rows(self.folder, sql)

    def held_out_prompts(self):
        return {row["input"] for row in self.held_out}

    def means(self):
        """The mean over the sets of prompts, by step."""
        accuracy = {}
        for step, value in self.query("SELECT step, avg(accuracy) FROM evaluations GROUP BY step"):
            accuracy[step] = value
        return accuracy


@pytest.fixture(scope="module")
def trained(lane, tmp_path_factory):
    """Four evaluations in a training of 6 steps, before it and after steps 2, 4 and 6: 24 held-out prompts, and a
    benchmark of 8 others, which the reward function never sees."""
    from openrlhf_dbb import tiny

    folder = tmp_path_factory.mktemp("trained")
    lines = tiny.prepare(tiny.default_folder()).heldout.read_text().splitlines()[:32]
    (folder / "benchmark.jsonl").write_text("\n".join(lines[24:]))
    held_out = [json.loads(line) for line in lines[:24]]
    for row in held_out:
        row["datasource"] = "sorting" if row["input"].startswith("s") else "sums"
    (folder / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held_out))
    (folder / "noting.py").write_text(NOTING)
    result = lane.train(
        folder, *trainings.SMALL, "--estimator", "dbb", "--run_name", "run", "--train.num_episodes", "3",
        "--ckpt.save_steps", "-1",
        "--reward.remote_url", str(folder / "noting.py"), "--eval.dataset", str(folder / "eval.jsonl"),
        "--eval.steps", "2", "--eval.n_samples_per_prompt", "4", "--ckpt.best_metric_key", "eval_sums_mean@4",
        "--eval.benchmarks", f"mine={folder}/benchmark.jsonl", "--eval.top_p", "0.95",
        "--logger.wandb.key", "0123" * 10,
    )  # fmt: skip
    assert result.error is None, result.output[-4000:]
    noted = [json.loads(line) for line in (folder / "scores.jsonl").read_text().splitlines()]
    tried = noted[:48]  # the start scores three responses to each of 16 prompts
    assert len({prompt for prompt, _ in tried}) == 16
    benchmark = [json.loads(line) for line in lines[24:]]
    return Trained(folder, result.output, held_out, benchmark, noted[48:])


def test_the_store_has_the_held_out_scores_that_the_verifier_gave(trained):
    by_prompt = trained.query("""SELECT prompt, count(*), sum(samples), sum(verified), sum(successes)
        FROM evaluation_results JOIN prompts USING (prompt_id)
        WHERE name = 'training' AND benchmark <> 'mine' GROUP BY prompt""")
    scores = defaultdict(list)
    for prompt, score in trained.noted:
        scores[prompt].append(score)
    assert {prompt for prompt, *_ in by_prompt} == trained.held_out_prompts()
    all_verified = 0
    for prompt, evaluations, samples, verified, successes in by_prompt:
        # four times in each of four evaluations
        assert (evaluations, samples, len(scores[prompt])) == (4, 16, 16)
        given = [score for score in scores[prompt] if score is not None]
        assert verified == len(given)
        assert successes == sum(given)
        all_verified += len(given)
    assert 0 < all_verified < 24 * 16


def test_a_benchmarks_prompts_are_asked_as_they_are_and_never_shown_to_the_reward_function(trained):
    stored = trained.query("""SELECT step, prompt, label, samples FROM evaluation_results
        JOIN prompts USING (prompt_id) WHERE benchmark = 'mine' ORDER BY step, place""")
    expected = []
    for step in (0, 2, 4, 6):
        for row in trained.benchmark:
            expected.append((step, row["input"], row["label"], 4))
    assert stored == expected
    shown = {prompt for prompt, _ in trained.noted}
    assert shown.isdisjoint(row["input"] for row in trained.benchmark)


def test_steps_count_the_rollouts_of_the_training_alone(trained):
    held_out = trained.held_out_prompts()
    scores = [score for prompt, score in trained.noted if prompt not in held_out]
    assert len(scores) == 768
    steps = trained.query("SELECT step, generated_total FROM steps")
    assert steps == [(1, 128), (2, 256), (3, 384), (4, 512), (5, 640), (6, 768)]
    verified = [score for score in scores if score is not None]
    assert trained.query("SELECT sum(rollouts), sum(successes) FROM steps") == [
        (len(verified), sum(verified))
    ]
    assert re.search("rollouts +768 generated, 768 trained on", trained.output)


def test_evaluations_are_logged_as_they_are_stored(trained):
    measures = trained.query(
        "SELECT step, benchmark, prompts, accuracy, best, missing, majority, generated_total FROM evaluations"
    )
    sizes = Counter(row["datasource"] for row in trained.held_out)
    sizes["mine"] = 8
    logged = trainings.logged(trained.run / "tensorboard/run")
    stored = []
    for step, source, prompts, accuracy, best, missing, majority, generated in measures:
        stored.append((step, source))
        assert prompts == sizes[source]
        assert generated == 128 * step
        assert logged[f"eval/eval_{source}_mean@4"][step] == pytest.approx(accuracy, rel=1e-6)
        assert logged[f"eval/eval_{source}_best@4"][step] == pytest.approx(best, rel=1e-6)
        assert logged[f"eval/eval_{source}_missing"][step] == pytest.approx(missing, rel=1e-6)
        assert (majority is None) == (source != "mine")
    assert stored == list(itertools.product((0, 2, 4, 6), ("mine", "sorting", "sums")))


def test_the_mean_of_the_evaluations_is_logged_beside_the_training(trained):
    logged = trainings.logged(trained.run / "tensorboard/run")
    assert set(logged["train/entropy_loss"]) == {1, 2, 3, 4, 5, 6}
    assert logged["eval/eval_mean@4"] == pytest.approx(trained.means(), rel=1e-6)


def test_the_best_model_is_that_of_the_measure_that_was_asked_for(trained):
    means = dict(
        trained.query(
            "SELECT step, accuracy FROM evaluations WHERE benchmark = 'sums' AND step > 0"
        )
    )
    best_step = max(means, key=means.get)
    check_best(trained.run, best_step, means[best_step], trained.output)
    check_card(trained.folder, "best", best_step)
    check_card(trained.folder, "model", 6)


def test_the_summary_and_the_tables_show_the_accuracy_before_and_after(trained, lane):
    check_tables(lane.folder / "wandb/latest-run/files/media/table/train", trained.folder)
    before, after = re.search(
        r"accuracy +([\d.]+)% before, ([\d.]+)% after", trained.output
    ).groups()
    means = trained.means()
    assert float(before) / 100 == pytest.approx(means[0], abs=0.0006)
    assert float(after) / 100 == pytest.approx(means[6], abs=0.0006)


def check_best(folder, step, value, output):
    """The best model is that of its step, with a tokenizer, and no other one is left."""
    said = json.loads((folder / "best/best.json").read_text())
    assert (said["step"], said["measure"]) == (step, "eval_sums_mean@4")
    assert said["value"] == pytest.approx(value, rel=1e-12)
    assert len(list((folder / "best_models").iterdir())) == 1
    # None was asked for, and the best is none
    assert not list((folder / "checkpoints").glob("_actor/*"))
    printed = rf"best model +step {step}, eval_sums_mean@4 {value:.3f}: {folder}/best\b"
    assert re.search(printed, output)
    best = AutoModelForCausalLM.from_pretrained(folder / "best").state_dict()
    last = AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()
    assert best.keys() == last.keys()
    same = all(torch.equal(best[name], last[name]) for name in last)
    assert same == (step == 6)
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
    places = [
        tables[0]["columns"].index(name)
        for name in ("prompt", "response", "advantage", "alpha", "beta")
    ]
    sent = [
        Counter(tuple(row[place] for place in places) for row in table["data"]) for table in tables
    ]
    assert sorted(sent, key=repr) == sorted(stored, key=repr) and {
        table.total() for table in sent
    } == {64}

"""The README.md of a saved model."""

from importlib.metadata import version

import pytest
from scipy import stats

huggingface_hub = pytest.importorskip("huggingface_hub", reason="needs the training stack")

from openrlhf_dbb.actors import model_card  # noqa: E402

CONFIG = {
    "algo.advantage.estimator": "dr_grpo", "eval.dataset": "held_out.jsonl", "eval.benchmarks": "mine=b.jsonl",
    "command": "openrlhf-dbb train --estimator dbb",
}  # fmt: skip


def read(*args):
    return huggingface_hub.ModelCard(model_card.text(*args), ignore_metadata_errors=False)


def test_a_card_by_hand(open_new, fill):
    store = open_new("sqlite")
    url = "http://me:hunter2@host/train.jsonl"
    run = fill.run(store, "mine", model="Qwen/Qwen3-0.6B", dataset=url, method="centered", config=CONFIG)
    ids = fill.prompts(store, 4)
    for step, successes in ((0, [0, 1, 2, 1]), (1, [2, 2, 4, 2])):  # of 4 samples
        if step:
            fill.step(run, step, ids, [1, 2, 3, 4])
        run.record_evaluation(step, "training", [fill.evaluation(ids, successes)], model="", config={})
    card = read(store, run.record, 1, "eval_mean@4")
    assert card.data.to_dict() == {
        "library_name": "transformers", "base_model": "Qwen/Qwen3-0.6B", "tags": ["grpo", "rlvr", "openrlhf-dbb"],
    }  # fmt: skip
    cells = []
    for mean, values in ((25.0, [0, 25, 50, 25]), (62.5, [50, 50, 100, 50]), (37.5, [50, 25, 50, 25])):
        low, high = stats.ttest_1samp(values, 0).confidence_interval()
        cells.append(f"{mean} ({low:.1f} to {high:.1f})")
    lines = card.text.splitlines()
    assert f"| {' | '.join(cells)} |" in lines
    assert "Means of 4 prompts x 4 samples, equal weight on each data set; 95 % intervals." in lines
    assert {
        "# mine, step 1",
        "- training data: `http://***@host/train.jsonl`",
        "- held-out data: `held_out.jsonl`, `mine=b.jsonl`",
        "- method: centered",
        "- estimator: dbb (discount = 0.5, prior_alpha = 1.0, prior_beta = 1.0)",
        "- advantage form: dr_grpo, X - p",
        "- reinforcement learning with verifiable rewards: 1 steps, 16 rollouts",
        "openrlhf-dbb train --estimator dbb",
    } <= set(lines)
    assert f"openrlhf {version('openrlhf')}, " in card.text and f"torch {version('torch')}" in card.text
    assert "chosen for its eval_mean@4, the highest" in card.text


def test_a_model_in_a_folder_is_no_hub_name_and_what_was_not_measured_is_not_claimed(open_new, fill, tmp_path):
    store = open_new("sqlite")
    run = fill.run(store, model=str(tmp_path), config=CONFIG | {"eval.dataset": None, "eval.benchmarks": None})
    fill.step(run, 1, fill.prompts(store, 1), [1])
    card = read(store, run.record, 1)
    assert "base_model" not in card.data.to_dict() and "chosen" not in card.text
    assert {"- held-out data: none", "Not measured."} <= set(card.text.splitlines())

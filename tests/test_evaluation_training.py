"""Evaluation during training: measures by data source, the best model by them, and the card of a saved model."""

import math
import re
from importlib.metadata import version
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats

from openrlhf_dbb.platform import cpu

cpu.prepare_driver()

from huggingface_hub import ModelCard  # noqa: E402
from openrlhf.trainer.ppo_utils.experience import Experience  # noqa: E402

from openrlhf_dbb.actors.evaluation import answers, best_measure, collect, logged  # noqa: E402
from openrlhf_dbb.actors.model_card import model_card  # noqa: E402
from openrlhf_dbb.errors import UsageError  # noqa: E402
from openrlhf_dbb.tiny import build_tokenizer  # noqa: E402

NAN = math.nan


def sample(prompt, response, score, truncated=False, reward=None):
    """A response as OpenRLHF's generator returns it: a missing score comes with reward 0."""
    tokens = torch.tensor([[*map(ord, prompt + response), 0]])
    return Experience(
        sequences=tokens,
        action_mask=(torch.arange(1, tokens.shape[1]) >= len(prompt)).long()[None],
        rewards=torch.tensor([0.0 if math.isnan(score) else score if reward is None else reward]),
        scores=torch.tensor([score]),
        response_length=torch.tensor([len(response) + 1]),
        truncated=torch.tensor([truncated]),
        prompts=[prompt],
    )


# Two data sources in turns; the first prompt of "sums" comes twice.
DATA = SimpleNamespace(
    prompts=["1+1=", "sort 21:", "2+2=", "1+1="],
    labels=[2, "12", 4, 2],
    datasources=["sums", "sorting", "sums", "sums"],
)
SAMPLES = [
    sample("1+1=", "2", 1.0), sample("1+1=", "so 2", 1.0), sample("1+1=", "7", 0.0), sample("1+1=", "22", NAN, True),
    sample("sort 21:", "12", 1.0), *[sample("sort 21:", "21", 0.0)] * 3,
    sample("2+2=", "5", 0.0), *[sample("2+2=", "no", 0.0)] * 3,
    *[sample("1+1=", "", NAN, True)] * 4,
]  # fmt: skip


@pytest.fixture
def evaluated():
    return collect(DATA, SAMPLES)


def test_samples_are_sorted_by_data_source(evaluated):
    sums = evaluated["sums"]
    sorting = evaluated["sorting"]
    np.testing.assert_array_equal(sums.scores_R_P_N, [[[1, 1, 0, NAN], [0, 0, 0, 0], [NAN] * 4]])
    assert sums.labels == ["2", "4", "2"]
    assert sums.tokens_R_P_N.tolist() == [[[2, 5, 2, 3], [2, 3, 3, 3], [1] * 4]]
    assert sums.truncated_R_P_N.tolist() == [[[False] * 3 + [True], [False] * 4, [True] * 4]]
    assert sorting.scores_R_P_N.tolist() == [[[1, 0, 0, 0]]]
    assert (sums.prompts, sorting.prompts) == (["1+1=", "2+2=", "1+1="], ["sort 21:"])


def test_missing_samples_are_left_out_of_the_measures(evaluated):
    expected = {
        # 2 of 3, 0 of 4, and a prompt that has none
        "eval_sums_mean@4": (2 / 3 + 0) / 2,
        "eval_sums_best@4": (1 + 0) / 2,
        "eval_sums_missing": 5 / 12,
        "eval_sums_truncated_rate": 5 / 12,
        "eval_sums_response_length_mean": (12 + 11 + 4) / 12,
        "eval_sorting_mean@4": 1 / 4,
        "eval_mean@4": (1 / 3 + 1 / 4) / 2,
        "eval_best@4": (1 / 2 + 1) / 2,
    }
    logs = logged(evaluated)
    assert {name: logs[name] for name in expected} == pytest.approx(expected, rel=1e-12)
    assert len(logs) == 8 + 8 + 2  # each source has the same measures


def test_a_sample_without_any_score_is_refused():
    unscored = sample("1+1=", "2", 1.0)
    unscored.scores = unscored.rewards = None
    data = SimpleNamespace(prompts=["1+1="], labels=["2"], datasources=["sums"])
    with pytest.raises(UsageError, match=r"needs rewards .*; give --reward\.remote_url, or --eval"):
        collect(data, [unscored])


def test_an_answer_is_the_end_of_a_samples_text_without_special_tokens():
    tokenizer = build_tokenizer()
    long = "12+3=" * 100
    both = [sample("4=", response, score) for response, score in (("7", 1.0), (long, NAN))]
    for each, response in zip(both, ("7", long), strict=True):
        each.sequences = torch.tensor(
            [[*tokenizer.encode(f"4={response}"), tokenizer.eos_token_id]]
        )
    short, (text, score) = answers(both, tokenizer)
    assert short == ("7", 1.0)
    assert text == long[-255:] and math.isnan(score)  # 256 tokens with the one that ended it


def test_the_best_model_may_be_chosen_by_any_measure(evaluated):
    chosen = {"": "eval_mean@4", "none": None, "eval_sums_pass@2": "eval_sums_pass@2"}
    assert {key: best_measure(key, logged(evaluated)) for key in chosen} == chosen
    with pytest.raises(
        UsageError,
        match=r"--ckpt.best_metric_key eval_sums_best@8 .*; available: ",
    ):
        best_measure("eval_sums_best@8", logged(evaluated))


CONFIG = {
    "algo.advantage.estimator": "dr_grpo", "eval.dataset": "held_out.jsonl", "eval.benchmarks": "mine=b.jsonl",
    "command": "openrlhf-dbb train --estimator dbb",
}  # fmt: skip


def read_card(*args):
    return ModelCard(model_card(*args), ignore_metadata_errors=False)


@pytest.fixture
def card(open_new, fill):
    """The model card of step 1 of a run with evaluations of four prompts x four samples."""
    store = open_new("sqlite")
    url = "http://me:hunter2@host/train.jsonl"
    run = fill.run(
        store, "mine", model="Qwen/Qwen3-0.6B", dataset=url, method="centered", config=CONFIG
    )
    ids = fill.prompts(store, 4)
    how = {"model": "", "config": {}}
    run.record_evaluation(0, "training", [fill.evaluation(ids, [0, 1, 2, 1])], **how)
    fill.step(run, 1, ids, [1, 2, 3, 4])
    run.record_evaluation(1, "training", [fill.evaluation(ids, [2, 2, 4, 2])], **how)
    return read_card(store, run.record, 1, "eval_mean@4")


def test_the_model_card_has_the_run_s_facts_by_hand(card):
    assert card.data.to_dict() == {
        "library_name": "transformers",
        "base_model": "Qwen/Qwen3-0.6B",
        "tags": ["grpo", "rlvr", "openrlhf-dbb"],
    }
    lines = card.text.splitlines()
    assert "# mine, step 1" in lines
    assert "openrlhf-dbb train --estimator dbb" in lines
    assert "hunter2" not in card.text


@pytest.mark.parametrize(
    ("fact", "pieces"),
    [
        ("training data", ["`http://***@host/train.jsonl`"]),
        ("held-out data", ["`held_out.jsonl`", "`mine=b.jsonl`"]),
        ("method", ["centered"]),
        ("estimator", ["dbb", "discount = 0.5", "prior_alpha = 1.0", "prior_beta = 1.0"]),
        ("advantage form", ["dr_grpo", "X - p"]),
        ("reinforcement learning", ["1 steps", "16 rollouts"]),
    ],
)
def test_the_model_card_lists_a_fact(card, fact, pieces):
    [line] = [line for line in card.text.splitlines() if line.startswith(f"- {fact}")]
    for piece in pieces:
        assert piece in line


def test_the_model_card_has_the_means_with_their_intervals(card):
    cells = []
    for mean, values in (
        (25.0, [0, 25, 50, 25]),
        (62.5, [50, 50, 100, 50]),
        (37.5, [50, 25, 50, 25]),
    ):
        low, high = stats.ttest_1samp(values, 0).confidence_interval()
        cells.append(f"{mean} ({low:.1f} to {high:.1f})")
    assert f"| {' | '.join(cells)} |" in card.text.splitlines()
    assert re.search(r"4 prompts x 4 samples, equal weight.*95 % intervals", card.text)
    assert "chosen for its eval_mean@4, the highest" in card.text


def test_the_model_card_has_the_versions_of_the_packages(card):
    assert f"openrlhf {version('openrlhf')}, " in card.text
    assert f"torch {version('torch')}" in card.text


def test_a_model_in_a_folder_is_no_hub_name_and_what_was_not_measured_is_not_claimed(
    open_new, fill, tmp_path
):
    store = open_new("sqlite")
    run = fill.run(
        store, model=str(tmp_path), config=CONFIG | {"eval.dataset": None, "eval.benchmarks": None}
    )
    fill.step(run, 1, fill.prompts(store, 1), [1])
    card = read_card(store, run.record, 1)
    assert "base_model" not in card.data.to_dict() and "chosen" not in card.text
    assert {"- held-out data: none", "Not measured."} <= set(card.text.splitlines())

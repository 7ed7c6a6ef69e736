"""Gradients at a frozen policy: closed forms for a policy that is one table, and the measurement on a small run."""

import dataclasses
import itertools
import math
import types
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from estimators import Estimate, build, centered
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.lab.recorded import visits
from storage import StepRows, open_store
from study import gradients as study
from study.policy_gradient import cosine, gradients, log_probabilities, sample, weights
from study.tokens import NOTHING, Tokens

END = 3


class Table(torch.nn.Module):
    """A policy whose next token depends only on the last one: row a of the table holds the logits after token a."""

    def __init__(self):
        super().__init__()
        rng = np.random.default_rng(0)
        self.logits = torch.nn.Parameter(torch.tensor(rng.normal(size=(4, 4)), dtype=torch.float32))

    def forward(self, input_ids, use_cache):
        return types.SimpleNamespace(logits=self.logits[input_ids])


# The answer is token 1, then the end, within two tokens.
ONE_PROMPT = Tokens([[0]], torch.tensor([[1, END]]), END)
ALL_RESPONSES = [(END, NOTHING), *itertools.product((0, 1, 2), range(4))]


def probability_of(policy, response, last=0):
    """By hand: the product of the table entries along the response, starting at the prompt's ``last`` token."""
    table = policy.logits.detach().double().softmax(-1).numpy()
    first = table[last, response[0]]
    return first if response[1] == NOTHING else first * table[response[0], response[1]]


def true_gradient(policy):
    """Gradient of p = pi(1 | 0) pi(end | 1): p times d log p, which is (one-hot - pi) in the two rows used."""
    table = policy.logits.detach().double().softmax(-1)
    expected = torch.zeros(4, 4, dtype=torch.float64)
    expected[0] = torch.eye(4)[1] - table[0]
    expected[1] = torch.eye(4)[END] - table[1]
    return (table[0, 1] * table[1, END] * expected).flatten()


def test_log_probabilities_are_those_of_the_table():
    policy = Table()
    found = log_probabilities(policy, ONE_PROMPT, np.zeros(13, dtype=np.int64), torch.tensor(ALL_RESPONSES))
    expected = [probability_of(policy, response) for response in ALL_RESPONSES]
    np.testing.assert_allclose(found.detach().exp(), expected, rtol=1e-5)
    assert sum(expected) == pytest.approx(1)  # these are all possible responses


def test_score_function_gives_the_gradient_of_the_expected_reward_with_any_baseline():
    policy = Table()
    probability = np.array([probability_of(policy, response) for response in ALL_RESPONSES])
    reward = np.array([1.0 * (response == (1, END)) for response in ALL_RESPONSES])
    both = np.stack([probability * reward, probability * (reward - 0.3)])[:, None]
    found = gradients(policy, ONE_PROMPT, torch.tensor(ALL_RESPONSES)[None], both)
    np.testing.assert_allclose(found[0], true_gradient(policy), atol=1e-6)
    np.testing.assert_allclose(found[1], true_gradient(policy), atol=1e-6)


def test_weights_of_equal_responses_add_up_within_a_prompt_only():
    policy = Table()
    two = Tokens([[0], [2]], torch.tensor([[1, END], [1, END]]), END)
    responses = torch.tensor([[[1, END], [1, END]], [[1, END], [2, 2]]])
    found = gradients(policy, two, responses, np.array([[[0.25, 0.5], [-1.0, 2.0]]]))
    logs = log_probabilities(policy, two, np.array([0, 1, 1]), torch.tensor([[1, END], [1, END], [2, 2]]))
    (expected,) = torch.autograd.grad(0.75 * logs[0] - logs[1] + 2 * logs[2], [policy.logits])
    np.testing.assert_allclose(found[0], expected.flatten(), atol=1e-6)


def test_samples_follow_the_policy():
    policy, draws = Table(), 20_000
    # The second prompt ends in another token and is longer.
    two = Tokens([[0], [1, 1, 2]], torch.tensor([[1, END], [1, END]]), END)
    responses = sample(policy, two, draws, torch.Generator().manual_seed(1))
    assert responses.shape == (2, draws, 2)
    for last, found in ((0, responses[0]), (2, responses[1])):
        for response in ALL_RESPONSES:
            expected = probability_of(policy, response, last)
            share = float((found == torch.tensor(response)).all(-1).double().mean())
            assert abs(share - expected) < 5 * math.sqrt(expected * (1 - expected) / draws)


def test_weights():
    responses = torch.tensor([[[1, END, NOTHING, NOTHING], [0, 1, 2, END]]])  # 2 and 4 tokens
    advantages = np.array([[1.0, -2.0]])
    np.testing.assert_allclose(weights(advantages, responses, "group_norm"), [[1 / 2 / 2, -2 / 4 / 2]])
    np.testing.assert_allclose(weights(advantages, responses, "dr_grpo"), [[1 / 2, -2 / 2]])


def test_cosine():
    a, b = torch.tensor([3.0, 4.0]), torch.tensor([4.0, 3.0])
    assert cosine(a, a) == pytest.approx(1)
    assert cosine(a, -2 * a) == pytest.approx(-1)
    assert cosine(a, b) == pytest.approx(24 / 25)
    assert math.isnan(cosine(a, torch.zeros(2)))


def test_the_update_with_the_exact_probability_approaches_the_true_gradient_with_more_rollouts():
    policy = Table()
    truth = true_gradient(policy)
    p = probability_of(policy, (1, END))
    known = Estimate(np.array([p]), np.array([p * (1 - p)]))
    found = []
    for group in (100, 10_000, 100_000):
        responses = sample(policy, ONE_PROMPT, group, torch.Generator().manual_seed(0))
        rewards = (responses == ONE_PROMPT.answers_P_L[:, None]).all(-1).double().numpy()
        of_each = weights(centered(rewards, known), responses, "dr_grpo")[None]
        found.append(cosine(gradients(policy, ONE_PROMPT, responses, of_each)[0], truth))
    assert found[0] < found[1] < found[2]
    assert found[2] > 0.999


def recorded():
    """Prompts 7, 8, 9 with N = 4: S = 4, 1 of 7 and 9 in step 1, 2 of 8 in step 2, 3, 0 of 7 and 9 in step 3."""
    step, prompt = np.array([1, 1, 2, 3, 3]), np.array([7, 9, 8, 7, 9])
    return visits(step, prompt, np.array([4.0, 1.0, 2.0, 3.0, 0.0]), np.full(5, 4))


def test_the_replayed_history_gives_the_posterior_by_hand():
    dbb = build("dbb", discount=0.5)
    state = study.replay(dbb, recorded())
    # 7: Beta(4.5, 0.5), then (2.25 + 3, 0.25 + 1). 8: (0.5 + 2, 0.5 + 2). 9: (1.5, 3.5), then (0.75, 1.75 + 4).
    np.testing.assert_allclose(state["alpha"], [5.25, 2.5, 0.75])
    np.testing.assert_allclose(state["beta"], [1.25, 2.5, 5.75])
    said = study.observe(dbb, state, np.array([2, 0]), np.array([[1.0, 1.0], [0.0, 0.0]]))
    # 9: (0.375 + 2, 2.875); 7: (2.625, 0.625 + 2)
    np.testing.assert_allclose(said.mean, [2.375 / 5.25, 2.625 / 5.25])
    np.testing.assert_allclose(state["alpha"], [5.25, 2.5, 0.75])  # unchanged by the draw


def test_replay_carries_the_run_wide_state():
    state = study.replay(build("auto"), recorded())
    assert state["prompts"] == [3]
    np.testing.assert_allclose(state["successes_1"], [3, 2, 0])
    np.testing.assert_allclose(state["successes_2"], [4, 0, 1])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A recorded run, two visits of 12 prompts with N = 2, and a model folder with random weights; (url, folder)."""
    pytest.importorskip("transformers")
    from openrlhf_dbb.tiny.model import build_model, build_tokenizer
    from openrlhf_dbb.tiny.task import generate

    folder = tmp_path_factory.mktemp("frozen")
    build_model(0).save_pretrained(folder / "model")
    build_tokenizer().save_pretrained(folder / "model")
    url = f"sqlite:///{folder}/store.db"
    prompts = [row["input"] for row in generate("train", 12, 0)]
    with open_store(url) as store:
        ids = store.register_prompts(prompts, ["7"] * len(prompts))
        for name, status in (("frozen", "finished"), ("unfinished", "running")):
            config = {"rollout.n_samples_per_prompt": 2, "rollout.max_new_tokens": 5}
            run = store.create_run(
                name, estimator="point", estimator_version=1, parameters={}, state_fields=(), model="m",
                dataset="d", dataset_digest="0", reward="r", config=config,
            )  # fmt: skip
            for step in (1, 2):
                run.record_step(step, point_rows(ids, step))
            if status == "finished":
                run.finish()
    return url, folder / "model"


def point_rows(ids, step):
    successes = (np.arange(len(ids)) + step) % 3 * 1.0
    nothing = np.empty((len(ids), 0))
    previous = np.full(len(ids), step - 1 if step > 1 else -1)
    mean = successes / 2
    return StepRows(ids, np.full(len(ids), 2), successes, mean, 2 * mean * (1 - mean), nothing, nothing, previous)


def test_history_belongs_to_its_prompt(finished):
    from openrlhf_dbb.tiny.task import generate

    history = study.read_history(finished[0], "frozen")
    assert (history.rollouts, history.max_new_tokens, history.labels) == (2, 5, ["7"] * 12)
    seen = history.visits
    successes = {
        (history.prompts[at], step): s for at, step, s in zip(seen.prompt, seen.step, seen.successes, strict=True)
    }
    for number, row in enumerate(generate("train", 12, 0)):
        assert [successes[row["input"], step] for step in (1, 2)] == [(number + 1) % 3, (number + 2) % 3]


def measured(finished, **changes):
    url, model = finished
    given = {"seed": 1, "batches": 2, "draws": 2, "reference": 100, "batch_size": 6} | changes
    return study.measure(url, "frozen", model, **given)


def test_measure(finished):
    rows = measured(finished)
    names = [*study.ESTIMATORS, *study.ORACLES]
    assert [row.estimator for row in rows] == names * 4
    assert [(row.batch, row.draw) for row in rows[:: len(names)]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert {(row.seed, row.n) for row in rows} == {(1, 2)}
    assert all(math.isnan(row.mse) == (row.estimator in study.ORACLES) for row in rows)
    error = {name: np.mean([row.mse for row in rows if row.estimator == name]) for name in names}
    # Random weights rarely succeed: two failures give 0, which is nearly right, where Laplace's rule gives 1/4.
    assert error["point"] < 0.05 < error["laplace"] < 0.08
    assert error["dr_point"] == error["point"]
    for row in rows:
        assert math.isnan(row.cosine) or -1 <= row.cosine <= 1


def test_measure_is_the_same_for_the_same_seed(finished):
    first, again, other = ([str(row[5:]) for row in measured(finished, reference=50, seed=seed)] for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_oracles_with_many_rollouts_agree_with_their_references(finished, monkeypatch):
    read = study.read_history
    # Twelve prompts of three kinds; the right answer is to end at once.
    tokens = Tokens([[0], [1], [2]] * 4, torch.tensor([[END, NOTHING]] * 12), END)
    monkeypatch.setattr(study, "load", lambda folder, history: (Table(), tokens))
    monkeypatch.setattr(study, "read_history", lambda *names: dataclasses.replace(read(*names), rollouts=20_000))
    rows = measured(finished, batches=1, draws=1, reference=20_000, batch_size=12)  # each kind equally often
    found = {row.estimator: row for row in rows}
    assert found["exact"].cosine > 0.999
    assert found["exact_sigma"].cosine_normalised > 0.999
    # With such an N the group's own mean is nearly exact.
    assert found["dr_point"].cosine == pytest.approx(found["exact"].cosine, abs=1e-3)
    assert found["point"].cosine_normalised == pytest.approx(found["exact_sigma"].cosine_normalised, abs=1e-3)
    # The angle between the two objectives, from all responses weighted by their probabilities.
    policy = Table()
    chance = np.array([[probability_of(policy, response, last) for response in ALL_RESPONSES] for last in range(3)])
    p = chance[:, :1]
    centred = chance * ((np.arange(13) == 0) - p)
    length = np.array([1] + [2] * 12)
    two = np.stack([centred, centred / np.sqrt(p * (1 - p)) / length])
    true, normalised = gradients(policy, tokens.batch(np.arange(3)), torch.tensor([ALL_RESPONSES] * 3), two)
    assert found["exact"].cosine_normalised == pytest.approx(cosine(true, normalised), abs=1e-3)
    assert found["exact_sigma"].cosine == pytest.approx(cosine(true, normalised), abs=1e-3)


def test_padding_does_not_change_probabilities(finished):
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(finished[1], dtype=torch.float32).requires_grad_(False)
    prompts, response = [[1, 10, 2, 13], [12, 5, 4, 3, 2, 1, 13]], torch.tensor([[4, 2, 14, NOTHING, NOTHING]])
    together = log_probabilities(
        policy, Tokens(prompts, torch.empty(2, 5), 14), np.array([0, 1]), response.repeat(2, 1)
    )
    for prompt, found in zip(prompts, together, strict=True):
        logs = policy(input_ids=torch.tensor([[*prompt, 4, 2]])).logits[0].log_softmax(-1)
        at = len(prompt) - 1
        assert float(found) == pytest.approx(float(logs[at, 4] + logs[at + 1, 2] + logs[at + 2, 14]), rel=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batches": 3}, r"'frozen' has 12 prompts, fewer than 3 batches of 6; measure fewer"),
        ({"draws": 0}, r"draws must be at least 1, got 0"),
        ({"reference": 1}, r"reference must be at least 2, got 1"),
    ],
)
def test_requests_that_cannot_be_measured(finished, changes, message):
    with pytest.raises(UsageError, match=message):
        measured(finished, **changes)


def test_unfinished_run_and_missing_model(finished, tmp_path):
    url, model = finished
    with pytest.raises(UsageError, match=r"'unfinished' is running, .*finish it with --resume"):
        study.measure(url, "unfinished", model, seed=1)
    with pytest.raises(UsageError, match=r"holds no model"):
        study.measure(url, "frozen", Path(tmp_path), seed=1, batches=1, batch_size=6)


def test_label_longer_than_any_response(finished):
    history = study.read_history(finished[0], "frozen")
    history.labels[0] = "12345"
    with pytest.raises(UsageError, match=r"'12345' has 6 tokens with its end, a response at most 5"):
        study.load(finished[1], history)

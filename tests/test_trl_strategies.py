"""TRL's trainer with strategies that judge groups, and with replay: what is generated, trained on and stored."""

# ruff: noqa: E402
import json
import sys
from collections import Counter, defaultdict

import numpy as np
import pandas
import pytest
import torch

without_vllm = pytest.MonkeyPatch()
without_vllm.setitem(sys.modules, "vllm", None)  # as where it is not installed; TRL would load it
pytest.importorskip("trl", reason="needs TRL")

from datasets import Dataset
from trainings import rows
from transformers import TrainerCallback

from openrlhf_dbb.errors import RunError
from openrlhf_dbb.integrations.trl import PosteriorGRPOConfig, PosteriorGRPOTrainer
from openrlhf_dbb.integrations.trl_rows import StepMetrics, cut, items, join
from openrlhf_dbb.tiny import build_model, build_tokenizer

without_vllm.undo()

ROLLOUTS = 4
GROUPS = 2
EASY = "easy"
HARD = "hard"
MIXED = "mixed"
KINDS = [EASY, MIXED, HARD, MIXED, EASY, MIXED]
TEXTS = [f"{number}+{number}=" for number in range(len(KINDS))]
JUDGING = ["dynamic", "greso", "two_stage"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a model that has learnt nothing."""
    torch.set_num_threads(1)  # with a model of this size a second one mostly waits
    folder = tmp_path_factory.mktemp("model")
    build_model(0).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return str(folder)


class Reward:
    """Always 1 for an easy prompt, 0 for a hard one, else 0 or 1 by the first character; remembers the calls."""

    __name__ = "correct"

    def __init__(self):
        self.calls = []

    def __call__(self, prompts, completions, kind, **columns):
        rewards = []
        for text, of_prompt in zip(completions, kind, strict=True):
            parity = float(ord(text[0]) % 2) if text else 0.0
            rewards.append({EASY: 1.0, HARD: 0.0}.get(of_prompt, parity))
        self.calls.append(list(zip(prompts, completions, rewards, strict=True)))
        return rewards


class Watched(PosteriorGRPOTrainer):
    """Remembers the batch of each step, and how many calls of the reward function there were."""

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        if self.model.training:
            self.batches.append((len(self.reward_funcs[0].calls), output))
            self.own_log_probs.append(self.log_probs(output))
        return output

    def log_probs(self, output):
        ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
        mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
        with torch.no_grad():
            return self._get_per_token_logps_and_entropies(
                self.model, ids, mask, output["completion_ids"].shape[1]
            )[0]


def trainer(model, folder, strategy, *, kinds=KINDS, ours=None, **changed):
    """Two groups of four a step, in fp32."""
    values = {
        "output_dir": str(folder / "out"), "max_steps": 3, "per_device_train_batch_size": GROUPS * ROLLOUTS,
        "num_generations": ROLLOUTS, "max_completion_length": 6, "beta": 0.0, "learning_rate": 1e-3, "seed": 3,
        "gradient_checkpointing": False, "report_to": "none", "use_cpu": True, "bf16": False, "save_strategy": "no",
        "logging_strategy": "no", "disable_tqdm": True,
    } | changed  # fmt: skip
    made = Watched(
        model=model,
        reward_funcs=Reward(),
        args=PosteriorGRPOConfig(**values),
        train_dataset=Dataset.from_dict({"prompt": TEXTS[: len(kinds)], "kind": kinds}),
        strategy=strategy,
        **{"store": f"sqlite:///{folder}/openrlhf_dbb.db", "run_name": "run", "estimator": "point"}
        | (ours or {}),
    )
    made.batches = []
    made.own_log_probs = []
    return made


def generated(made):
    """Of each step what was generated: the triples of prompt, completion and reward of each call."""
    ends = [end for end, _ in made.batches]
    starts = [0, *ends[:-1]]
    return [made.reward_funcs[0].calls[start:end] for start, end in zip(starts, ends, strict=True)]


def texts(made, output):
    """Prompt and completion of each row of a batch."""
    found = []
    for row in range(len(output["advantages"])):
        prompt = output["prompt_ids"][row][output["prompt_mask"][row].bool()]
        completion = output["completion_ids"][row][output["completion_mask"][row].bool()]
        decoded = made.processing_class.batch_decode([prompt, completion], skip_special_tokens=True)
        found.append(tuple(decoded))
    return found


@pytest.fixture(scope="module", params=JUDGING)
def judged(request, model, tmp_path_factory):
    """A training of three steps with a strategy that needs scores, and its folder."""
    folder = tmp_path_factory.mktemp("judged")
    made = trainer(model, folder, request.param)
    made.train()
    assert len(made.batches) == 3
    return made, folder


def steps_of(made):
    """Of each step the triples of prompt, completion and reward, and the batch."""
    for calls, (_, output) in zip(generated(made), made.batches, strict=True):
        yield [triple for call in calls for triple in call], output


def test_all_groups_that_were_generated_are_observed(judged):
    made, folder = judged
    observed = rows(
        folder,
        "SELECT step, prompt, rollouts, successes FROM posterior_history JOIN prompts USING (prompt_id)",
    )
    usage = rows(folder, "SELECT step, generated, trained FROM steps ORDER BY step")
    for step, (triples, _) in enumerate(steps_of(made), start=1):
        rewards = defaultdict(list)
        for prompt, _, reward in triples:
            rewards[prompt].append(reward)
        expected = {(step, prompt, len(given), sum(given)) for prompt, given in rewards.items()}
        assert {row for row in observed if row[0] == step} == expected
        assert usage[step - 1] == (step, len(triples), GROUPS * ROLLOUTS)


def test_only_groups_of_mixed_rewards_are_trained_on(judged):
    made, _ = judged
    for triples, output in steps_of(made):
        reward_of = {(prompt, completion): reward for prompt, completion, reward in triples}
        pairs = texts(made, output)
        rewards = np.array([reward_of[pair] for pair in pairs]).reshape(GROUPS, ROLLOUTS)
        assert (rewards.min(axis=1) < rewards.max(axis=1)).all()
        prompts = np.array([prompt for prompt, _ in pairs]).reshape(GROUPS, ROLLOUTS)
        assert (prompts == prompts[:, :1]).all()
        assert output["num_items_in_batch"] == output["completion_mask"].sum()
    assert all(torch.isfinite(values).all() for values in made.own_log_probs)


def test_all_rollouts_of_a_prompt_in_a_step_are_one_group_also_those_that_were_filtered(judged):
    made, _ = judged
    for triples, output in steps_of(made):
        reward_of = {(prompt, completion): reward for prompt, completion, reward in triples}
        expected = []
        for prompt, completion in texts(made, output):
            group = [reward for other, _, reward in triples if other == prompt]
            expected.append(
                (reward_of[prompt, completion] - np.mean(group)) / np.std(group, ddof=1)
            )
        np.testing.assert_allclose(output["advantages"].numpy(), expected, rtol=1e-5)


def differing_pairs(calls):
    """By prompt, of each pair of rollouts that was generated for it, whether their rewards differ."""
    pairs = defaultdict(list)
    for call in calls:
        for (prompt, _, reward), (twin, _, other) in zip(call[::2], call[1::2], strict=True):
            assert prompt == twin
            pairs[prompt].append(reward != other)
    return pairs


def counted_groups(differs):
    """How many groups of one prompt differ, and how many do not; the rest of a group follows a first pair that does."""
    groups = Counter()
    place = 0
    while place < len(differs):
        groups[differs[place]] += 1
        place += 2 if differs[place] else 1
    assert place == len(differs)
    return groups


def test_two_stages_generate_two_of_each_prompt_and_the_other_two_where_they_differ(
    model, tmp_path
):
    made = trainer(model, tmp_path, "two_stage", logging_strategy="steps", logging_steps=1)
    made.train()
    passed = []
    for calls in generated(made):
        groups = Counter()
        for differs in differing_pairs(calls).values():
            groups += counted_groups(differs)
        assert groups[True] == GROUPS
        passed.append(GROUPS / groups.total())
    stored = rows(tmp_path, "SELECT metrics FROM steps ORDER BY step")
    assert min(passed) < 1
    logged = [json.loads(metrics)["two_stage/passed"] for (metrics,) in stored]
    assert logged == pytest.approx(passed)


def test_groups_of_unequal_size_are_trained_on_with_their_weights(model, tmp_path):
    """Each prompt of a batch of eight rollouts has its own number n, and X - mean times 4 / n."""
    ours = {"estimator": "dbb", "form": "dr_grpo"}
    made = trainer(model, tmp_path, "allocate", ours=ours, scale_rewards="group", max_steps=6)
    made.train()
    sql = """SELECT step, prompt, mean, rollouts FROM posterior_history JOIN prompts USING (prompt_id)"""
    stored = {(step, prompt): values for step, prompt, *values in rows(tmp_path, sql)}
    sizes = set()
    for step, (calls, (_, output)) in enumerate(
        zip(generated(made), made.batches, strict=True), start=1
    ):
        rewards = defaultdict(list)
        for prompt, completion, reward in [row for call in calls for row in call]:
            rewards[prompt].append((completion, reward))
        expected = []
        for prompt, answers in rewards.items():
            mean, rollouts = stored[step, prompt]
            assert len(answers) == rollouts
            sizes.add(rollouts)
            for completion, reward in answers:
                expected.append((prompt, completion, (reward - mean) * 4 / rollouts))
        assert len(expected) == GROUPS * ROLLOUTS
        found = [
            (*text, advantage)
            for text, advantage in zip(
                texts(made, output), output["advantages"].tolist(), strict=True
            )
        ]
        for one, other in zip(sorted(found), sorted(expected), strict=True):
            assert one[:2] == other[:2]
            assert one[2] == pytest.approx(other[2], rel=1e-5, abs=1e-6)
    assert len(sizes) > 2


@pytest.mark.parametrize("strategy", ["dynamic", "two_stage"])
def test_old_log_probs_and_the_table_fit_the_rows_of_several_generations(model, tmp_path, strategy):
    made = trainer(
        model, tmp_path, strategy, num_iterations=2, max_steps=4, beta=0.1, log_completions=True,
        logging_strategy="steps", logging_steps=2,
    )  # fmt: skip
    made.train()
    assert len(made.batches) == 2
    for (_, output), own in zip(made.batches, made.own_log_probs, strict=True):
        mask = output["completion_mask"].bool()
        old = output["old_per_token_logps"]
        torch.testing.assert_close(old[mask], own[mask], rtol=1e-3, atol=1e-4)
    check_logged_rewards(made)
    table = pandas.read_parquet(tmp_path / "out/completions/completions_00004.parquet")
    assert len(table) == GROUPS * ROLLOUTS
    assert table["posterior_mean"].notna().all()


def check_logged_rewards(made):
    """What TRL logs is finite, and its mean reward is of all that was generated."""
    logged = [entry for entry in made.state.log_history if "loss" in entry]
    for calls, entry in zip(generated(made), logged, strict=True):
        assert np.isfinite(entry["loss"])
        assert np.isfinite(entry["kl"])
        rewards = [reward for call in calls for *_, reward in call]
        assert entry["rewards/correct/mean"] == pytest.approx(np.mean(rewards), abs=1e-6)


def rows_of_one(prompt, completion, value, ratio=1):
    """The rows of a batch of one row. ``ratio`` is the width of vLLM's ratio: one a row, or one a token."""
    width = len(completion)
    output = {
        "prompt_ids": torch.tensor([prompt]),
        "prompt_mask": torch.tensor([[int(token > 0) for token in prompt]]),
        "completion_ids": torch.tensor([completion]),
        "completion_mask": torch.ones(1, width, dtype=torch.int64),
        "tool_mask": torch.ones(1, width, dtype=torch.int64),
        "old_per_token_logps": torch.full((1, width), -value),
        "ref_per_token_logps": torch.full((1, width), -value),
        "importance_sampling_ratio": torch.full((1, ratio), value),
        "advantages": torch.tensor([value]),
        "num_items_in_batch": torch.tensor(9),
    }
    return cut(output, [width])


@pytest.mark.parametrize(
    ("ratio", "expected"), [(1, [[1.5], [2.5]]), (3, [[1.5, 1, 1], [2.5, 2.5, 2.5]])]
)
def test_rows_of_two_batches_keep_vllm_s_ratios_in_one(ratio, expected):
    rows = rows_of_one([0, 5, 6], [7], 1.5) + rows_of_one([4], [8, 9, 1], 2.5, ratio)
    assert join(rows, 0, None, "cpu")["importance_sampling_ratio"].tolist() == expected


def test_rows_of_two_batches_keep_their_values_in_one():
    """Prompts of 2 and 1 tokens with completions of 1 and 3."""
    rows = rows_of_one([0, 5, 6], [7], 1.5) + rows_of_one([4], [8, 9, 1], 2.5)
    joined = join(rows, 0, None, "cpu")
    assert joined["prompt_ids"].tolist() == [[5, 6], [0, 4]]
    assert joined["prompt_mask"].tolist() == [[1, 1], [0, 1]]
    assert joined["completion_ids"].tolist() == [[7, 0, 0], [8, 9, 1]]
    assert joined["completion_mask"].tolist() == [[1, 0, 0], [1, 1, 1]]
    assert joined["tool_mask"].tolist() == [[1, 1, 1], [1, 1, 1]]
    assert joined["old_per_token_logps"].tolist() == [[-1.5, 0, 0], [-2.5, -2.5, -2.5]]
    ratios = torch.exp(joined["ref_per_token_logps"] + 100)  # of a token of log-prob -100
    assert torch.isfinite(ratios[0, 1:]).all()
    assert joined["advantages"].tolist() == [1.5, 2.5]
    assert items(joined) == 4


def test_rows_with_images_cannot_be_joined():
    output = {"completion_ids": torch.tensor([[8]]), "pixel_values": torch.zeros(1, 2)}
    with pytest.raises(ValueError, match="rows with images"):
        cut(output, [1])


def test_metrics_of_a_step_are_means_over_its_rollouts():
    metrics = {"reward": [9.0], "num_tokens": [5.0]}
    step = StepMetrics(metrics)
    step.rollouts = [6, 2]
    metrics["reward"] += [1.0, 0.0]
    metrics["rewards/other"] = [np.nan, 0.5]
    metrics["completions/min_length"] = [3.0, 2.0]
    metrics["completions/max_length"] = [3.0, 2.0]
    metrics["num_tokens"] = [8.0]  # TRL replaces this list
    metrics["own"] = [1.0, 2.0, 6.0]
    step.join()
    assert metrics == {
        "reward": [9.0, 0.75],
        "num_tokens": [8.0],
        "rewards/other": [0.5],
        "completions/min_length": [2.0],
        "completions/max_length": [3.0],
        "own": [3.0],
    }


def test_a_budget_of_rollouts_ends_the_training(model, tmp_path):
    made = trainer(
        model, tmp_path, "two_stage", max_steps=50, ours={"max_rollouts": 60}, log_completions=True,
        logging_strategy="steps", logging_steps=1, save_strategy="steps", save_steps=50,
    )  # fmt: skip
    weights = []

    class Weights(TrainerCallback):
        def on_step_end(self, *args, model, **kwargs):
            weights.append(torch.cat([values.flatten() for values in model.parameters()]).detach())

    made.add_callback(Weights())
    made.train()
    calls = made.reward_funcs[0].calls
    assert 60 - 2 * GROUPS * ROLLOUTS < sum(map(len, calls)) <= 60
    steps = len(made.batches)
    assert rows(tmp_path, "SELECT status, last_step FROM dbb_run") == [("finished", steps)]
    assert 1 < steps < 8
    assert len(weights) == steps + 1  # the step in which it is spent trains on nothing
    assert torch.equal(weights[-1], weights[-2]) and not torch.equal(weights[-2], weights[-3])


class StopAt(TrainerCallback):
    """Ends the training early."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.step


def run_to(model, folder, step, resume_from=None, *, strategy, **ours):
    """A run of four steps with a checkpoint after two, stopped after ``step``; what it has observed."""
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    made = trainer(model, folder, strategy, ours=ours, **options)
    made.add_callback(StopAt(step))
    made.train(resume_from_checkpoint=resume_from)
    made.posteriors.close()
    return rows(
        folder,
        "SELECT step, prompt_id, rollouts, successes, inclusion FROM posterior_history ORDER BY 1, 2",
    )


FORECAST = {"estimator": "dbb"}
DRAWN = FORECAST | {"strategy_parameters": {"draw": "posterior"}}


@pytest.mark.parametrize(
    ("strategy", "ours"),
    [
        ("dynamic", {}),
        ("greso", {}),
        ("two_stage", {}),
        ("two_stage", DRAWN),
        ("allocate", FORECAST),
    ],
    ids=["dynamic", "greso", "two_stage", "two_stage, drawn", "allocate"],
)
def test_a_resume_fills_the_same_batches_bit_for_bit(model, tmp_path, strategy, ours):
    whole = run_to(model, tmp_path / "whole", 4, strategy=strategy, **ours)
    run_to(model, tmp_path / "cut", 3, strategy=strategy, **ours)
    resumed = run_to(model, tmp_path / "cut", 4, True, strategy=strategy, resume=True, **ours)
    assert resumed == whole
    assert {step for step, *_ in whole} == {1, 2, 3, 4}
    if ours:
        assert all(0 < inclusion <= 1 for *_, inclusion in whole)


def test_a_checkpoint_of_an_earlier_release_goes_on(model, tmp_path):
    """It has the sampler's state and the draws left of the pass beside run and step."""
    whole = run_to(model, tmp_path / "whole", 4, strategy="posterior", estimator="dbb")
    run_to(model, tmp_path / "cut", 3, strategy="posterior", estimator="dbb")
    folder = tmp_path / "cut/out/checkpoint-2"
    saved = json.loads((folder / "posteriors.json").read_text())
    draws = json.loads((folder / "draws.json").read_text())
    saved["strategy"] = draws["sampling"]
    saved["left"] = len(TEXTS) - draws["place"]["place"]
    (folder / "posteriors.json").write_text(json.dumps(saved))
    (folder / "draws.json").unlink()
    resumed = run_to(
        model, tmp_path / "cut", 4, True, strategy="posterior", estimator="dbb", resume=True
    )
    assert resumed == whole


def test_a_strategy_that_keeps_no_group_is_given_up_in_one_line(model, tmp_path):
    made = trainer(model, tmp_path, "dynamic", kinds=[EASY, HARD], max_completion_length=1)
    with pytest.raises(
        RunError, match=r"'dynamic' has kept no group in 21 passes over the data; use"
    ):
        made.train()


@pytest.mark.parametrize(
    ("strategy", "ours", "changed", "message"),
    [
        (
            "two_stage",
            {},
            {"num_generations": 2},
            "two_stage.* with num_generations=2: .* give 3 or more",
        ),
        (
            "plain",
            {"max_rollouts": 60},
            {},
            "'plain' generates as many rollouts in each step; leave out max_roll",
        ),
        (
            "dynamic",
            {"max_rollouts": 7},
            {},
            "max_rollouts = 7 is less than one step of 8 rollouts; give more",
        ),
        (
            "dynamic",
            {},
            {"shuffle_dataset": False},
            "'dynamic' shuffles the data; leave out shuffle_dataset=False",
        ),
    ],
)
def test_what_does_not_fit_a_strategy_is_refused(model, tmp_path, strategy, ours, changed, message):
    with pytest.raises(ValueError, match=message):
        trainer(model, tmp_path, strategy, ours=ours, **changed)
    assert not (tmp_path / "openrlhf_dbb.db").exists()


def replaying(model, folder, strategy="plain", samples=2, cache=4, **changed):
    """Two steps a pass of all four prompts; each rollout of a prompt fills its cache."""
    ours = {"replay": {"samples": samples, "cache": cache}, **changed.pop("ours", {})}
    return trainer(model, folder, strategy, kinds=KINDS[:4], ours=ours, **changed)


@pytest.fixture(scope="module")
def replayed(model, tmp_path_factory):
    """A training of four steps with replay, and its folder."""
    folder = tmp_path_factory.mktemp("replayed")
    made = replaying(model, folder, max_steps=4, logging_strategy="steps", logging_steps=1)
    made.train()
    return made, folder


OWN = GROUPS * ROLLOUTS  # rows of a batch that are not replayed


def test_a_prompt_s_rows_are_replayed_from_its_second_visit_on(replayed):
    made, folder = replayed
    assert [len(output["advantages"]) for _, output in made.batches] == [8, 8, 12, 12]
    stored = [
        json.loads(metrics)
        for (metrics,) in rows(folder, "SELECT metrics FROM steps ORDER BY step")
    ]
    assert [metrics["replay/cached"] for metrics in stored] == [8, 16, 16, 16]
    assert rows(folder, "SELECT sum(rollouts) FROM posterior_history") == [(4 * OWN,)]
    for _, output in made.batches:
        assert output["num_items_in_batch"] == output["completion_mask"].sum()


def best_two(rollouts):
    """The two rollouts of the highest rewards, the older of equal ones, oldest first."""
    places = np.argsort([-reward for _, _, reward, _ in rollouts], kind="stable")[:2]
    return [rollouts[place] for place in sorted(places)]


def check_replayed_advantages(output, rewards):
    """Two replayed rollouts a prompt: both the same, or one right."""
    advantages = output["advantages"][OWN:].tolist()
    for place in range(0, len(rewards), 2):
        half = 0.5**0.5 * (rewards[place] - rewards[place + 1])
        assert advantages[place : place + 2] == pytest.approx([half, -half], abs=1e-5)


def log_probs_of(output):
    """Old log-probs of the tokens of each row."""
    mask = output["completion_mask"].bool()
    return [
        values[of_row] for values, of_row in zip(output["old_per_token_logps"], mask, strict=True)
    ]


def test_replayed_rows_are_the_best_of_a_prompts_last_rollouts_with_their_own_log_probs(replayed):
    made, _ = replayed
    last = {}  # by prompt its last rollouts: prompt, text, reward, old log-probs
    for [call], (_, output) in zip(generated(made), made.batches, strict=True):
        pairs = texts(made, output)
        expected = []
        for prompt in dict.fromkeys(prompt for prompt, _ in pairs[:OWN]):
            expected += best_two(last.get(prompt, []))
            last[prompt] = []
        assert pairs[OWN:] == [(prompt, text) for prompt, text, _, _ in expected]
        log_probs = log_probs_of(output)
        for values, (*_, theirs) in zip(log_probs[OWN:], expected, strict=True):
            torch.testing.assert_close(values, theirs, rtol=0, atol=0)
        check_replayed_advantages(output, [reward for _, _, reward, _ in expected])
        for rollout, values in zip(call, log_probs[:OWN], strict=True):
            last[rollout[0]].append((*rollout, values))


def test_rows_fill_the_chunks_that_trl_trains_on(model, tmp_path):
    """Four chunks of two rows and 2 * 3 replayed ones: two rows of 16 train nothing."""
    made = replaying(
        model, tmp_path, samples=3, per_device_train_batch_size=2, gradient_accumulation_steps=4, max_steps=3,
        logging_strategy="steps", logging_steps=1,
    )  # fmt: skip
    made.train()
    _, output = made.batches[2]
    assert len(output["advantages"]) == 16
    trains = output["completion_mask"].any(dim=1)
    assert trains.tolist() == [True] * 14 + [False] * 2
    assert output["advantages"][14:].tolist() == [0, 0]
    assert all(np.isfinite(entry["loss"]) for entry in made.state.log_history if "loss" in entry)


@pytest.mark.parametrize("strategy", ["plain", "two_stage"])
def test_a_resume_replays_the_same_rows_bit_for_bit(model, tmp_path, strategy):
    def run(folder, step, resume=False):
        made = replaying(
            model, tmp_path / folder, strategy, samples=2, cache=2, ours={"resume": resume}, max_steps=4,
            save_strategy="steps", save_steps=2,
        )  # fmt: skip
        made.add_callback(StopAt(step))
        made.train(resume_from_checkpoint=resume)
        made.posteriors.close()
        return [output["old_per_token_logps"] for _, output in made.batches]

    whole = run("whole", 4)
    run("cut", 3)
    resumed = run("cut", 4, True)
    assert len(resumed) == 2 and max(len(values) for values in whole) > GROUPS * ROLLOUTS
    for values, expected in zip(resumed, whole[2:], strict=True):
        assert torch.equal(values, expected)


def test_a_resume_without_replay_is_refused_where_the_run_had_it(model, tmp_path):
    made = replaying(model, tmp_path, max_steps=4, save_strategy="steps", save_steps=2)
    made.add_callback(StopAt(2))
    made.train()
    made.posteriors.close()
    other = trainer(model, tmp_path, "plain", kinds=KINDS[:4], ours={"resume": True}, max_steps=4)
    with pytest.raises(
        ValueError, match="checkpoint-2 is of a run with replay; go on with its replay="
    ):
        other.train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    ("ours", "changed", "message"),
    [
        (
            {"replay": {"sample": 2}},
            {},
            r"replay = \{'sample': 2\}; give a dictionary of samples, cache",
        ),
        ({"replay": 2}, {}, "replay = 2; give a dictionary"),
        ({"replay": {"samples": 17}}, {}, "replay.samples = 17 is more than the 16 rollouts"),
        (
            {"replay": {"samples": 2}, "form": "reinforce_baseline"},
            {},
            "replay=.* with form=.reinforce_baseline.: replayed rows are not whitened; leave",
        ),
        (
            {"replay": {"samples": 2}},
            {"beta": 0.1},
            "replay=.* with beta=0.1: no log-probs of the reference .*; leave",
        ),
    ],
)
def test_what_does_not_fit_replay_is_refused(model, tmp_path, ours, changed, message):
    with pytest.raises(ValueError, match=message):
        trainer(model, tmp_path, "plain", ours=ours, **changed)
    assert not (tmp_path / "openrlhf_dbb.db").exists()

"""TRL's trainer with our advantages: against TRL's own, and by hand. Everything runs in this process."""

# ruff: noqa: E402
import json
import sys
from collections import Counter

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
from trl import GRPOTrainer

from openrlhf_dbb import Posteriors
from openrlhf_dbb.core.step import StepExtras
from openrlhf_dbb.core.strategies import RunFacts
from openrlhf_dbb.estimators import FORMS
from openrlhf_dbb.integrations import shared
from openrlhf_dbb.integrations.trl import PosteriorGRPOConfig, PosteriorGRPOTrainer, remember
from openrlhf_dbb.integrations.trl_memory import by_task, combine
from openrlhf_dbb.tiny import build_model, build_tokenizer

without_vllm.undo()

PROMPTS = 6
ROLLOUTS = 4
TWO_OF_TWO = {
    "num_iterations": 2,
    "per_device_train_batch_size": 2 * ROLLOUTS,
    "gradient_accumulation_steps": 2,
}
EPSILON = 1e-4  # what TRL adds to a standard deviation
TEMPLATE = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}{% if add_generation_prompt %}={% endif %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a model that has learnt nothing."""
    torch.set_num_threads(1)  # with a model of this size a second one mostly waits
    folder = tmp_path_factory.mktemp("model")
    build_model(0).save_pretrained(folder)
    tokenizer = build_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return str(folder)


def prompts(count=PROMPTS):
    texts = [f"{number}+{number}=" for number in range(count)]
    return Dataset.from_dict(
        {"prompt": texts, "answer": [str(2 * number) for number in range(count)]}
    )


class Reward:
    """0 or 1 by the first character, None for one in eight; remembers the calls."""

    __name__ = "correct"

    def __init__(self, missing=True):
        self.calls = []
        self.missing = missing

    def __call__(self, prompts, completions, **columns):
        rewards = [
            self.of(text if isinstance(text, str) else text[0]["content"]) for text in completions
        ]
        self.calls.append((prompts, rewards, columns))
        return rewards

    def of(self, text):
        place = ord(text[0]) if text else 0
        return None if self.missing and place % 8 == 3 else float(place % 2)


def short(prompts, completions, **_):
    return [0.25 * len(completion) for completion in completions]


def arguments(folder, **changed):
    """Four prompts a generation batch, in fp32."""
    values = {
        "output_dir": str(folder / "out"), "max_steps": 2, "per_device_train_batch_size": 4 * ROLLOUTS,
        "num_generations": ROLLOUTS, "max_completion_length": 6, "beta": 0.0, "learning_rate": 1e-3, "seed": 3,
        "gradient_checkpointing": False, "report_to": "none", "use_cpu": True, "bf16": False, "save_strategy": "no",
        "logging_strategy": "no", "disable_tqdm": True,
    } | changed  # fmt: skip
    return PosteriorGRPOConfig(**values)


def trainer(model, folder, reward=None, *, data=None, ours=None, held_out=None, **changed):
    return PosteriorGRPOTrainer(
        model=model,
        reward_funcs=reward or Reward(),
        args=arguments(folder, **changed),
        train_dataset=prompts() if data is None else data,
        eval_dataset=held_out,
        **{"store": f"sqlite:///{folder}/openrlhf_dbb.db", "run_name": "run", "estimator": "dbb"}
        | (ours or {}),
    )


@pytest.fixture
def watched(monkeypatch):
    """Every generation batch in training: TRL's rewards and advantages, and ours."""
    seen = []
    theirs = GRPOTrainer._generate_and_score_completions
    ours = PosteriorGRPOTrainer._generate_and_score_completions

    def their_own(self, inputs):
        output = theirs(self, inputs)
        if self.model.training:
            rewards = self._dbb.scored[0].double().numpy()
            seen.append({"rewards": rewards, "theirs": output["advantages"].double().numpy()})
        return output

    def then_ours(self, inputs):
        output = ours(self, inputs)
        if self.model.training:
            seen[-1]["ours"] = output["advantages"].double().numpy()
            seen[-1]["logged"] = np.array(list(self._logs["advantages"]))
        return output

    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", their_own)
    monkeypatch.setattr(PosteriorGRPOTrainer, "_generate_and_score_completions", then_ours)
    return seen


def test_another_release_of_trl_is_refused(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.17.0")
    with pytest.raises(ImportError, match=r"trl 1.17.0 is installed"):
        shared.check_release("trl")


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"scale_rewards": "none"},
        {"scale_rewards": "batch"},
        {"reward": [Reward(), short], "reward_weights": [2.0, 0.5], "scale_rewards": "none"},
    ],
    ids=lambda changed: ",".join(changed) or "defaults",
)
def test_with_point_the_advantages_are_trl_s(model, tmp_path, watched, changed):
    changed = dict(changed)
    made = trainer(
        model, tmp_path, changed.pop("reward", None), ours={"estimator": "point"}, **changed
    )
    made.train()
    assert len(watched) == 2
    for batch in watched:
        weights = np.array(changed.get("reward_weights", [1.0] * batch["rewards"].shape[1]))
        missing = np.isnan(batch["rewards"]).all(axis=1)
        rewards = np.where(missing, np.nan, np.nansum(batch["rewards"] * weights, axis=1))
        spread = np.nanstd(rewards.reshape(-1, ROLLOUTS), axis=1, ddof=1).repeat(ROLLOUTS)
        if changed.get("scale_rewards") == "batch":
            spread = np.full_like(spread, np.nanstd(rewards, ddof=1))
        shrunk = 1.0 if changed.get("scale_rewards") == "none" else spread / (spread + EPSILON)
        np.testing.assert_allclose(batch["theirs"], batch["ours"] * shrunk, rtol=2e-6, atol=2e-6)
        assert np.abs(batch["ours"]).max() > 0.1
    assert any(np.isnan(batch["rewards"]).any() for batch in watched)


DRAWN = {"strategy": "posterior", "strategy_parameters": {"floor": 0.2}, "form": "dr_grpo"}
ALONE = {"num_generations": 1, "per_device_train_batch_size": 4, "scale_rewards": "none"}


def check_batches(calls, watched, loop, draws):
    """Each generation batch of a trainer has the prompts and the advantages of one's own loop."""
    for (texts, scores, columns), batch in zip(calls, watched, strict=True):
        keys_of_step = list(zip(texts, columns["answer"], strict=True))
        if draws:
            drawn = np.repeat(loop.draw(), len(scores) // 4)
            assert keys_of_step == [loop.keys[row] for row in drawn]
        rewards = np.array(scores, dtype=float)
        expected = loop.observe(keys_of_step, rewards, rewards).advantages
        np.testing.assert_allclose(batch["ours"], expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(batch["logged"], batch["ours"], rtol=1e-6)


class OwnLoop:
    """One's own loop of the same settings as a trainer's, whose rollouts have one token each."""

    def __init__(self, folder, made, data, ours, form):
        folder.mkdir()
        settings = shared.Settings("dbb", store=f"sqlite:///{folder}/openrlhf_dbb.db", **ours)
        self.keys = list(zip(data["prompt"], data["answer"], strict=True))
        self.form = form
        rollouts = made.num_generations
        self.extras = StepExtras(tokens=[1] * 4 * rollouts, trained=[1] * 4 * rollouts)
        self.steps = shared.Steps(settings, "run", False, self.keys, RunFacts(4, rollouts, 3))
        self.draw = self.steps.draw

    def observe(self, keys, rewards, scores):
        return self.steps.observe(keys, rewards, scores, self.form, self.extras)


@pytest.mark.parametrize(
    ("ours", "changed", "form", "steps"),
    [
        ({}, {}, "group_norm", 5),
        (DRAWN, {}, "dr_grpo", 5),  # TRL's data loader fetches ahead of the steps
        (DRAWN, TWO_OF_TWO, "dr_grpo", 10),
        ({}, ALONE, "batch_centered", 5),
    ],
    ids=["dbb", "drawn", "drawn, four updates", "one rollout"],
)
def test_a_run_is_what_ones_own_loop_makes_of_its_rewards(
    model, tmp_path, watched, ours, changed, form, steps
):
    """Five steps of four prompts; three are a pass."""
    reward = Reward(missing=not ours and not changed)
    data = prompts(12)
    made = trainer(
        model, tmp_path, reward, data=data, held_out=prompts(2), ours=ours | {"label_column": "answer"},
        max_steps=steps, **changed,
    )  # fmt: skip
    made.train()
    assert len(watched) == 5
    loop = OwnLoop(tmp_path / "other", made, data, ours, form)
    check_batches(reward.calls, watched, loop, draws=bool(ours))
    loop.steps.posteriors.close()
    assert history(tmp_path) == history(tmp_path / "other")
    if ours:
        inclusions = {inclusion for *_, inclusion in history(tmp_path)}
        assert len(inclusions) > 1  # not even
    if changed is ALONE:  # the group's own mean is the reward itself
        assert not any(batch["theirs"].any() for batch in watched)
    check_stored_run(tmp_path, made.num_generations, form)
    assert 0 <= made.evaluate()["eval_reward"] <= 1


def check_stored_run(folder, rollouts, form):
    """A finished run of five steps is stored with TRL's settings and the form."""
    [(status, last_step, config)] = rows(folder, "SELECT status, last_step, config FROM dbb_run")
    assert (status, last_step) == ("finished", 5)
    assert json.loads(config)["num_generations"] == rollouts
    assert rows(folder, "SELECT DISTINCT form FROM dbb_step") == [(form,)]


@pytest.mark.parametrize("form", FORMS.available())
def test_every_form_gives_what_it_gives_in_ones_own_loop(tmp_path, form):
    """Through what TRL's and verl's trainers call: three groups of four, one rollout missing, one masked."""
    keys = [(text, "") for text in "abc" for _ in range(4)]
    rewards = np.array([1, 0, 0, 1, 0, 0, np.nan, 0, 1, 1, 1, 0])
    extras = StepExtras(tokens=np.arange(1, 13), trained=np.arange(12) != 11)
    store = f"sqlite:///{tmp_path}/runs.db"
    parameters = {"discount": 0.3}
    settings = shared.Settings("dbb", parameters, store=store)
    steps = shared.Steps(settings, "ours", False, keys, RunFacts(3, 4))
    ours = steps.observe(keys, rewards, rewards, form, extras)
    with Posteriors.create(
        store, "loop", *zip(*keys, strict=True), estimator="dbb", parameters=parameters
    ) as loop:
        assert loop.estimator == steps.posteriors.estimator
        expected = loop.observe(
            1, *zip(*keys, strict=True), rewards, form=form, extras=extras
        ).advantages
    if FORMS.get(form).whitened:
        counted = np.isfinite(rewards) & extras.trained
        tokens = np.repeat(expected[counted], extras.tokens[counted])
        expected = np.where(counted, (expected - tokens.mean()) / tokens.std(), expected)
    np.testing.assert_allclose(ours.advantages, expected, rtol=1e-12)


def test_remember_changes_the_store_alone(model, tmp_path):
    Mine = type("Mine", (GRPOTrainer,), {})  # a trainer of the user's
    rewards = [Reward(missing=False), Reward(missing=False)]

    def trained(reward, folder, **ours):
        made = Mine(model, [short, reward], arguments(tmp_path / folder), prompts())
        if ours:
            remember(made, store=f"sqlite:///{tmp_path}/openrlhf_dbb.db", run_name="run", **ours)
        made.train()
        return (
            made,
            torch.cat([values.flatten() for values in made.model.parameters()]),
            made._logs["advantages"],
        )

    _, weights, advantages = trained(rewards[0], "alone")
    made, *found = trained(rewards[1], "kept", verifier="correct", label_column="answer")
    assert torch.equal(found[0], weights) and found[1] == advantages
    assert isinstance(made, Mine) and Mine.__bases__ == (GRPOTrainer,)
    assert rows(tmp_path, "SELECT estimator, status, last_step FROM dbb_run") == [
        ("point", "finished", 2)
    ]
    successes = [
        value
        for (value,) in rows(tmp_path, "SELECT sum(successes) FROM posterior_history GROUP BY step")
    ]
    assert successes == [sum(scores) for _, scores, _ in rewards[1].calls]
    warm = trainer(
        model, tmp_path, ours={"run_name": "warm", "warm_start": "run", "label_column": "answer"}
    )
    assert warm.posteriors.warm_start.matched > 4


@pytest.fixture
def logging(model, tmp_path):
    """Four optimizer steps on two generation batches of 16, with tables of completions; ten rollouts are kept."""
    made = trainer(
        model, tmp_path, Reward(), max_steps=4, per_device_train_batch_size=2 * ROLLOUTS, steps_per_generation=2,
        logging_strategy="steps", logging_steps=1, log_completions=True, ours={"keep_rollouts": 10},
    )  # fmt: skip
    made.train()
    return made


def test_what_was_written_is_stored_with_each_step(logging, tmp_path):
    [reward] = logging.reward_funcs
    kept = rows(
        tmp_path,
        "SELECT step, text, score, truncated, length FROM rollouts ORDER BY step, prompt_id, sample",
    )
    assert [step for step, *_ in kept] == [1] * 10 + [2] * 10
    for _, text, score, truncated, length in kept:
        assert score == reward.of(text)
        assert truncated == 0 or (truncated == 1 and length == 6)


def test_trl_s_tables_of_completions_have_the_posterior_s_mean(logging, tmp_path):
    query = (
        "SELECT prompt, mean FROM posterior_history JOIN prompts USING (prompt_id) WHERE step = {}"
    )
    for step, table in ((1, "completions_00002"), (2, "completions_00004")):
        completions = pandas.read_parquet(tmp_path / f"out/completions/{table}.parquet")
        means = dict(zip(completions["prompt"], completions["posterior_mean"], strict=True))
        assert means == dict(rows(tmp_path, query.format(step)))


def test_what_trl_logged_is_stored_with_each_step(logging, tmp_path):
    stored = [
        json.loads(metrics)
        for (metrics,) in rows(tmp_path, "SELECT metrics FROM steps ORDER BY step")
    ]
    history = [entry for entry in logging.state.log_history if "loss" in entry]
    assert history[0].keys() >= {
        "estimator/mean",
        "estimator/zero_variance",
        "estimator/rescued",
        "estimator/missing",
    }
    # Of the two optimizer steps on a batch, the second one's; the summary at the end is beside it.
    losses = [metrics["loss"] for metrics in stored]
    assert losses == pytest.approx([history[1]["loss"], history[3]["loss"]], abs=1e-6)
    assert [metrics["plan/steps"] for metrics in stored] == [2, 2]
    assert stored[1]["train_runtime"] > 0


def verified(scores):
    return [score for score in scores if score is not None]


def test_an_evaluation_changes_no_posterior_and_is_stored(model, tmp_path):
    reward = Reward()
    held_out = {"sums": prompts().select(range(3)), "more": prompts().select(range(3, 5))}
    made = trainer(
        model, tmp_path, reward, held_out=held_out, eval_strategy="steps", eval_steps=2, eval_on_start=True,
        per_device_eval_batch_size=ROLLOUTS, ours={"label_column": "answer"}, max_steps=2, log_completions=True,
    )  # fmt: skip
    made.train()
    made.evaluate()  # once more, after the run has finished
    in_training = [scores for texts, scores, _ in reward.calls if len(texts) == 16]
    scored = sum(len(verified(scores)) for scores in in_training)
    assert rows(tmp_path, "SELECT max(step), sum(rollouts) FROM posterior_history") == [(2, scored)]
    # five prompts are evaluated one after the other at the start and at the end
    expected = []
    for step, of_step in ((0, reward.calls[:5]), (2, reward.calls[-5:])):
        for texts, scores, _ in of_step:
            seen = verified(scores)
            name = "sums" if int(texts[0].split("+")[0]) < 3 else "more"
            expected.append((step, name, texts[0], ROLLOUTS, len(seen), sum(seen)))
    query = """SELECT step, benchmark, prompt, samples, verified, successes FROM evaluation_results
               JOIN prompts USING (prompt_id)"""
    assert sorted(rows(tmp_path, query)) == sorted(expected)


def test_masked_responses_are_observed_but_not_counted_as_trained(model, tmp_path):
    reward = Reward(missing=False)
    made = trainer(model, tmp_path, reward, mask_truncated_completions=True, max_steps=2)
    made.train()
    end = {made.processing_class.eos_token_id, made.processing_class.pad_token_id}
    ended = sum(ids[-1] in end for *_, columns in reward.calls for ids in columns["completion_ids"])
    assert 0 < ended < 2 * 4 * ROLLOUTS
    assert rows(tmp_path, "SELECT sum(generated), sum(trained) FROM steps") == [
        (2 * 4 * ROLLOUTS, ended)
    ]
    assert rows(tmp_path, "SELECT sum(rollouts) FROM posterior_history") == [(2 * 4 * ROLLOUTS,)]


def test_several_reward_functions_by_hand():
    """Two groups of two, weights 2 and 0.5: the other, weighted and centred by its group, is (1, -1) and (0, 0)."""
    rewards = np.array([[1.0, 4.0], [0.0, 0.0], [np.nan, 1.0], [1.0, 1.0]])
    total, scores, scale = combine(rewards, np.array([2.0, 0.5]), 0, 2)
    np.testing.assert_allclose(total, [1 + 1.0 / 2, 0 - 1.0 / 2, np.nan, 1.0])
    np.testing.assert_array_equal(scores, [1.0, 0.0, np.nan, 1.0])
    assert scale == 2.0
    total, scores, scale = combine(rewards, np.array([2.0, 0.5]), None, 2)
    np.testing.assert_allclose(total, [4.0, 0.0, 0.5, 2.5])
    assert (scores is total, scale) == (True, 1.0)
    assert np.isnan(combine(np.array([[np.nan, np.nan]]), np.array([1.0, 1.0]), None, 1)[0]).all()


def test_the_score_of_a_task_is_that_of_its_function():
    rewards = np.array([[1.0, np.nan], [np.nan, 0.0], [np.nan, np.nan], [0.0, np.nan]])
    np.testing.assert_array_equal(by_task(rewards, ["a", "b"]), [1.0, 0.0, np.nan, 0.0])
    rewards[3, 1] = 1.0
    with pytest.raises(
        ValueError, match=r"a, b score the same response.*verifier, one of a, b, or"
    ):
        by_task(rewards, ["a", "b"])


class OfTask(Reward):
    """Scores the prompts of one task, and returns None for the others."""

    def __init__(self, task):
        super().__init__(missing=False)
        self.task, self.__name__ = task, task

    def __call__(self, prompts, completions, task, **columns):
        rewards = super().__call__(prompts, completions)
        return [
            reward if of_row == self.task else None
            for reward, of_row in zip(rewards, task, strict=True)
        ]


@pytest.mark.parametrize("estimator", ["dbb", "auto"])
@pytest.mark.parametrize("scale", ["group", "none"])
def test_functions_that_are_none_outside_their_task_give_one_verdict(
    model, tmp_path, watched, estimator, scale
):
    """A prompt is of one of two tasks; the weights, equal ones, are TRL's scale of X - p."""
    rewards, tasks = [OfTask("math"), OfTask("code")], ["math", "code"] * 6
    data = prompts(12).add_column("task", tasks)
    made = trainer(
        model, tmp_path, rewards, data=data, scale_rewards=scale, reward_weights=[2.0, 2.0],
        logging_strategy="steps", logging_steps=1,
        ours={"estimator": estimator, "source_column": "task", "label_column": "answer"},
    )  # fmt: skip
    made.train()
    right = 0.0
    for number, batch in enumerate(watched):
        counts = (~np.isnan(batch["rewards"])).sum(axis=1)
        assert (counts == 1).all()
        scores = np.nansum(batch["rewards"], axis=1)
        right += scores.sum()
        texts = rewards[0].calls[number][0]
        means = dict(
            rows(
                tmp_path,
                "SELECT prompt, mean FROM posterior_history JOIN prompts USING (prompt_id) "
                f"WHERE step = {number + 1}",
            )
        )
        centred = scores - np.array([means[text] for text in texts])
        if scale == "none":
            centred = 2.0 * (centred - centred.mean())
            np.testing.assert_allclose(batch["ours"], centred, rtol=1e-4, atol=1e-5)
        else:
            assert np.sign(batch["ours"]).tolist() == np.sign(centred).tolist()
    stored = rows(tmp_path, "SELECT sum(rollouts), sum(successes) FROM posterior_history")
    assert stored == [(2 * 4 * ROLLOUTS, right)]
    metrics = [json.loads(found) for (found,) in rows(tmp_path, "SELECT metrics FROM steps")]
    assert (
        sum(m.get("source/math/groups", 0) + m.get("source/code/groups", 0) for m in metrics) == 8
    )


def test_two_functions_that_score_a_response_are_refused_before_anything_is_trained(
    model, tmp_path
):
    made = trainer(model, tmp_path, [Reward(missing=False), short], max_steps=1)
    with pytest.raises(ValueError, match=r"correct, short score the same response.*verifier"):
        made.train()
    assert made.state.global_step == 0


def history(folder):
    return rows(
        folder,
        "SELECT step, prompt_id, alpha, beta, inclusion FROM posterior_history ORDER BY 1, 2",
    )


class StopAt(TrainerCallback):
    """Ends the training early."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.step


def run_to(model, folder, step, resume_from=None, *, data=None, changed=None, **ours):
    """A run of six steps with a checkpoint every second one, stopped after ``step``."""
    steps = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2}
    made = trainer(model, folder, data=data, ours=ours, **steps | (changed or {}))
    made.add_callback(StopAt(step))
    made.train(resume_from_checkpoint=resume_from)
    return made


@pytest.mark.parametrize(
    "changed", [{}, {"num_iterations": 2, "max_steps": 12}], ids=["one update", "two updates"]
)
@pytest.mark.parametrize("strategy", ["plain", "posterior"])
def test_a_resume_in_a_later_pass_is_as_the_unbroken_run_bit_for_bit(
    model, tmp_path, strategy, changed
):
    whole = tmp_path / "whole"
    cut = tmp_path / "cut"
    # Three steps a pass; the checkpoint is one step into the second.
    options = {"data": prompts(12), "changed": changed, "strategy": strategy}
    last = changed.get("max_steps", 6)
    run_to(model, whole, last, **options).posteriors.close()
    run_to(model, cut, last * 2 // 3, **options).posteriors.close()
    run_to(model, cut, last, True, resume=True, **options).posteriors.close()
    found = [history(folder) for folder in (whole, cut)]
    assert found[0] == found[1] and len(found[1]) == 24
    if strategy == "plain":
        assert Counter(row[1] for row in found[1]) == Counter(
            {number: 2 for number in range(1, 13)}
        )


def test_a_resume_takes_the_newest_checkpoint_that_is_there_and_whole_and_not_undone(
    model, tmp_path, caplog
):
    run_to(model, tmp_path, 5).posteriors.close()
    out = tmp_path / "out"
    moved = tmp_path / "moved"
    out.rename(moved)
    again = trainer(model, tmp_path, max_steps=6, ours={"resume": True})

    def refused(message, checkpoint):
        step = again.posteriors.step
        with pytest.raises(ValueError, match=message):
            again.train(resume_from_checkpoint=checkpoint)
        assert again.posteriors.step == step

    def resumed(checkpoint, stop):
        again.add_callback(StopAt(stop))
        again.train(resume_from_checkpoint=checkpoint)
        assert again.posteriors.step == stop

    refused(r"run 'run' has recorded checkpoint-2, checkpoint-4, and no checkpoint", True)
    resumed(str(moved / "checkpoint-4"), 5)
    moved.rename(out)
    state = out / "checkpoint-4/trainer_state.json"
    whole = state.read_text()
    state.write_text(whole[:100])
    refused(
        r"checkpoint .*checkpoint-4 is not whole: trainer_state.json.*use an older one",
        str(out / "checkpoint-4"),
    )
    resumed(True, 4)  # from checkpoint-2, and without saving: checkpoint-4 is now of another past
    assert "passed over: checkpoint" in caplog.text
    state.write_text(whole)
    refused(
        r"checkpoint-4 is of steps that run 'run' has undone; use an older one",
        str(out / "checkpoint-4"),
    )
    resumed(True, 3)


def test_a_job_may_be_started_by_the_same_command_again_and_again(model, tmp_path):
    for stop in (1, 3, 6):  # the first one ends before its first checkpoint
        run_to(model, tmp_path, stop, True, resume="auto").posteriors.close()
    assert rows(tmp_path, "SELECT status, last_step FROM dbb_run") == [("finished", 6)]
    assert Counter(step for step, *_ in history(tmp_path)) == Counter(
        {step: 4 for step in range(1, 7)}
    )


def test_misuse_of_a_resume_is_refused(model, tmp_path):
    stopped = run_to(model, tmp_path, 3)
    with pytest.raises(ValueError, match=r"run 'run' has steps: call train\(resume_"):
        stopped.train()
    stopped.posteriors.close()
    with pytest.raises(
        ValueError, match=r"run 'run' was begun with Discounted.*not PointEstimator"
    ):
        trainer(model, tmp_path, ours={"resume": True, "estimator": "point"})
    other = trainer(model, tmp_path, ours={"run_name": "other"})
    with pytest.raises(ValueError, match=r"checkpoint-2 belongs to run \w+, not to 'other'"):
        other.train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-2"))


WITH_IMAGES = Dataset.from_dict({"prompt": ["1", "2", "3", "4"], "image": [None] * 4})


@pytest.mark.parametrize(
    ("ours", "changed", "message"),
    [
        ({"verifier": "corect"}, {}, "verifier 'corect' is none of correct, did you mean correct"),
        ({}, {"reward": [Reward(), short], "reward_weights": [1.0, 0.5]},
         "needs one score of 0 or 1: give verifier, one of correct, short, or equal reward_weights"),
        ({"form": "rloo"}, {"scale_rewards": "none"}, "form 'rloo' is given; leave out scale_rewards='none'"),
        ({"label_column": "answer"}, {"remove_unused_columns": True}, "would be removed; use remove_unused_columns=Fa"),
        ({"estimator": "point"}, {"num_generations": 1}, "'point' with num_generations=1: it needs 2 .*'auto'"),
        ({}, {"multi_objective_aggregation": "normalize_then_sum"}, "use 'sum_then_normalize'"),
        ({}, {"data": prompts().to_iterable_dataset()}, "is a IterableDataset; pass a datasets.Dataset"),
        ({}, {"data": Dataset.from_dict({"prompt": ["1"] * 4, "image": [None] * 4})}, "their images may differ"),
        ({"strategy": "dynamic"}, {"data": WITH_IMAGES}, "strategy 'dynamic' does not go with images"),
        ({"replay": {"samples": 1}}, {"data": WITH_IMAGES}, "replay does not go with images; train without it"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line(model, tmp_path, ours, changed, message):
    changed = dict(changed)
    with pytest.raises(ValueError, match=message) as refused:
        trainer(model, tmp_path, changed.pop("reward", None), ours=ours, **changed)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "openrlhf_dbb.db").exists()

"""``remember`` is passive: whatever happens to the memory, TRL trains as it would alone."""

# ruff: noqa: E402
import logging
import random
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

without_vllm = pytest.MonkeyPatch()
without_vllm.setitem(sys.modules, "vllm", None)  # as where it is not installed; TRL would load it
pytest.importorskip("trl", reason="needs TRL")

from datasets import Dataset
from trainings import rows
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from openrlhf_dbb import storage
from openrlhf_dbb.integrations import trl_passive
from openrlhf_dbb.integrations.trl import PosteriorGRPOTrainer, remember
from openrlhf_dbb.tiny import build_model, build_tokenizer

without_vllm.undo()

ROLLOUTS = 2
STEPS = 4
TEXTS = [f"{number}+{number}=" for number in range(6)]
DATA = Dataset.from_dict({"prompt": TEXTS, "answer": [str(2 * number) for number in range(6)]})


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a model that has learnt nothing."""
    folder = tmp_path_factory.mktemp("model")
    build_model(0).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    torch.set_num_threads(1)
    return str(folder)


def correct(completions, **_):
    """0 or 1 by the first character."""
    return [float(ord(text[0]) % 2) if text else 0.0 for text in completions]


def short(completions, **_):
    return [0.25 * len(text) for text in completions]


class Sometimes:
    """``correct``, with something else at one of its calls; the calls of an evaluation count too."""

    __name__ = "correct"

    def __init__(self, call, instead):
        self.call = call
        self.instead = instead
        self.calls = 0

    def __call__(self, completions, **columns):
        self.calls += 1
        if self.calls == self.call:
            return self.instead(completions)
        return correct(completions)


def arguments(folder, **changed):
    """Two prompts a generation batch; a checkpoint and an evaluation at every second step."""
    values = {
        "output_dir": str(folder / "out"), "max_steps": STEPS, "per_device_train_batch_size": 2 * ROLLOUTS,
        "num_generations": ROLLOUTS, "max_completion_length": 4, "beta": 0.0, "learning_rate": 1e-3, "seed": 3,
        "gradient_checkpointing": False, "report_to": "none", "use_cpu": True, "bf16": False,
        "save_strategy": "steps", "save_steps": 2, "save_only_model": True, "eval_strategy": "steps", "eval_steps": 2,
        "per_device_eval_batch_size": ROLLOUTS, "logging_steps": 1, "log_completions": True, "disable_tqdm": True,
    } | changed  # fmt: skip
    return GRPOConfig(**values)


def trainer(model, folder, reward=correct, *, data=DATA, cls=GRPOTrainer, **changed):
    return cls(model, reward, arguments(folder, **changed), data, eval_dataset=DATA.select([5]))


def numbers(made):
    """What a training has made: its losses and rewards, the weights, and the state of each random generator."""
    kept = ("loss", "reward", "grad_norm", "eval_loss", "eval_reward", "completions/mean_length")
    logged = [
        {name: entry[name] for name in kept if name in entry} for entry in made.state.log_history
    ]
    weights = torch.cat([values.flatten() for values in made.model.parameters()])
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()
    return repr((logged, made._logs["advantages"])), weights, state


def assert_same(one, other):
    assert one[0] == other[0]
    assert torch.equal(one[1], other[1])
    assert torch.equal(one[2][0], other[2][0]) and repr(one[2][1:]) == repr(other[2][1:])


@pytest.fixture(scope="module")
def alone(model, tmp_path_factory):
    """The numbers of a training by TRL alone, by what is changed in it; each is trained once."""
    made = {}

    def numbers_of(reward=correct, key="", **changed):
        if key not in made:
            plain = trainer(model, tmp_path_factory.mktemp("alone"), reward, **changed)
            plain.train()
            made[key] = numbers(plain)
        return made[key]

    return numbers_of


@pytest.fixture
def warnings(caplog):
    """The lines of the integration so far."""
    caplog.set_level(logging.INFO)

    def lines():
        names = [
            f"openrlhf_dbb.integrations.{name}"
            for name in ("trl", "trl_memory", "trl_passive", "shared")
        ]
        return [record.getMessage() for record in caplog.records if record.name in names]

    return lines


def store_of(folder):
    return f"sqlite:///{folder}/openrlhf_dbb.db"


def remembered(made, folder, **ours):
    remember(
        made, **{"store": store_of(folder), "run_name": "run", "label_column": "answer"} | ours
    )
    return made


def runs(folder):
    return rows(folder, "SELECT name, status, last_step FROM dbb_run ORDER BY run_id")


def test_remember_changes_no_number_and_no_random_state(model, tmp_path, alone, warnings):
    made = remembered(trainer(model, tmp_path), tmp_path)
    made.train()
    assert_same(numbers(made), alone())
    assert runs(tmp_path) == [("run", "finished", STEPS)]
    assert warnings() == []
    saved = {path.name for path in (tmp_path / "out/checkpoint-2").iterdir()}
    assert "trainer_state.json" in saved and "posteriors.json" in saved


def test_the_stored_advantages_are_trl_s(model, tmp_path):
    """Also where a prompt stands twice in a batch, and whatever TRL divides by."""
    data = Dataset.from_dict({"prompt": [TEXTS[0]] * 4, "answer": ["0"] * 4})

    def every_third(completions, **_):
        return [float(place % 3 == 0) for place in range(len(completions))]

    plain = trainer(model, tmp_path, every_third, data=data, max_steps=1, scale_rewards="batch")
    made = remembered(plain, tmp_path)
    theirs = []
    generated = GRPOTrainer._generate_and_score_completions

    def watched(self, inputs):
        output = generated(self, inputs)
        theirs.extend(output["advantages"].tolist() if self.model.training else [])
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GRPOTrainer, "_generate_and_score_completions", watched)
        made.train()
    stored = rows(tmp_path, "SELECT advantage FROM rollouts ORDER BY sample")
    assert len(theirs) == 2 * ROLLOUTS and any(theirs)
    assert sorted(value for (value,) in stored) == pytest.approx(sorted(theirs))
    assert rows(tmp_path, "SELECT form, trained FROM dbb_step") == [(None, 2 * ROLLOUTS)]


def remove_the_file(folder, monkeypatch):
    for file in Path(folder).glob("openrlhf_dbb.db*"):
        file.unlink()


def fails(name, error):
    def break_it(folder, monkeypatch):
        def broken(*_, **__):
            raise error

        owner = storage.PosteriorStore if name == "record_evaluation" else storage.Run
        monkeypatch.setattr(owner, name, broken)

    return break_it


@pytest.mark.parametrize(
    ("what", "last"),
    [
        (remove_the_file, None),
        (fails("record_step", storage.StoreError("the disk is full")), 1),
        (fails("record_metrics", storage.StoreError("the connection is lost")), 2),
        (fails("record_metrics", KeyError("a fault of ours")), 2),
        (fails("record_checkpoint", OSError("no space")), 2),
        (fails("record_evaluation", MemoryError()), 2),
        (fails("finish", storage.StoreError("the run is another's")), STEPS),
    ],
    ids=["removed", "full", "metrics", "fault", "checkpoint", "evaluation", "finish"],
)
def test_a_store_that_fails_ends_the_memory_alone(
    model, tmp_path, alone, warnings, monkeypatch, what, last
):
    """It fails from the second batch on."""

    def break_it(completions):
        what(tmp_path, monkeypatch)
        return correct(completions)

    made = remembered(trainer(model, tmp_path, Sometimes(2, break_it)), tmp_path)
    made.train()
    assert_same(numbers(made), alone())
    [line] = warnings()
    assert line.startswith("remembering has ended: ") and "of run 'run' is remembered" in line
    assert made.posteriors is None
    made.evaluate()
    monkeypatch.undo()
    if last is not None:
        assert [step for *_, step in runs(tmp_path)] == [last]
        again = remembered(trainer(model, tmp_path), tmp_path, resume=True)
        assert again.posteriors.step == last


@pytest.mark.parametrize(
    "name", ["_key", "_score", "_is_cut", "sample", "save", "record_held_out", "follow"]
)
def test_no_fault_of_the_memory_reaches_the_training(
    model, tmp_path, alone, warnings, monkeypatch, name
):
    made = remembered(trainer(model, tmp_path), tmp_path)

    def broken(*_, **__):
        raise ZeroDivisionError

    monkeypatch.setattr(trl_passive.PassiveMemory, name, broken)
    made.train()
    assert_same(numbers(made), alone())
    [line] = warnings()
    assert "ZeroDivisionError" in line
    assert [status for _, status, _ in runs(tmp_path)] == ["stale"]  # any process may go on with it


def test_a_batch_without_any_reward_is_no_end(model, tmp_path, alone, warnings):
    def nothing(completions):
        return [None] * len(completions)

    made = remembered(trainer(model, tmp_path, Sometimes(2, nothing)), tmp_path)
    made.train()
    assert_same(numbers(made), alone(Sometimes(2, nothing), key="none"))
    [(_, status, last_step)] = runs(tmp_path)
    assert status == "finished" and last_step >= STEPS - 1
    assert rows(tmp_path, "SELECT count(DISTINCT step) FROM dbb_history") == [(STEPS - 1,)]
    assert not any("has ended" in line for line in warnings())


class Curriculum(GRPOTrainer):
    """TRL's advice for a curriculum: another sampler."""

    def _get_train_sampler(self, dataset=None):
        inner = super()._get_train_sampler(dataset)

        class Reversed(torch.utils.data.Sampler):
            def __iter__(self):
                return iter(list(inner)[::-1])

            def __len__(self):
                return len(inner)

        return Reversed()


class TheirNames(GRPOTrainer):
    """A subclass whose attributes have the names of ours."""

    settings = steps = run = _settings = _samples = _opened = "theirs"

    def _key(self):
        return "theirs"

    def evaluate(self, *, benchmark="all", **options):
        return super().evaluate(**options)


@pytest.mark.parametrize("cls", [Curriculum, TheirNames])
def test_a_subclass_trains_as_it_does_alone(model, tmp_path, alone, warnings, cls):
    made = remembered(trainer(model, tmp_path, cls=cls), tmp_path)
    made.train()
    assert_same(numbers(made), alone(key=cls.__name__, cls=cls))
    assert isinstance(made, cls) and runs(tmp_path) == [("run", "finished", STEPS)]
    assert warnings() == []
    if cls is TheirNames:
        assert made.evaluate(benchmark="one")["eval_reward"] >= 0


def test_an_infinite_reward_ends_the_memory_alone(model, tmp_path, warnings):
    class Infinite(GRPOTrainer):
        def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
            return float("inf") + super()._calculate_rewards(
                inputs, prompts, completions, completion_ids_list
            )

    made = remembered(trainer(model, tmp_path, cls=Infinite, max_steps=1), tmp_path)
    made.train()
    [line] = warnings()
    assert "remembering has ended: observing a batch failed" in line


@pytest.mark.parametrize(
    "changed",
    [{"max_grad_norm": float("inf")}, {"epsilon_high": float("nan")}],
    ids=["infinite", "nan"],
)
def test_a_configuration_that_json_does_not_have_is_remembered(model, tmp_path, changed):
    made = remembered(trainer(model, tmp_path, max_steps=1, **changed), tmp_path)
    made.train()
    assert runs(tmp_path) == [("run", "finished", 1)]


def messages_with_image():
    content = [{"type": "image", "image": b"12"}, {"type": "text", "text": "?"}]
    return [{"prompt": [{"role": "user", "content": content}], "answer": "1"}] * 4


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (DATA.to_iterable_dataset, r"pass a datasets\.Dataset"),
        (messages_with_image, "no text, by which posteriors tell prompts apart"),
        (lambda: [{"prompt": "1", "answer": b"\xff"}] * 4, "not UTF-8"),
        (lambda: [{"prompt": "1", "answer": "1", "image": None}] * 4, "their images may differ"),
        (lambda: [{"question": "1", "answer": "1"}] * 4, "prompt"),
    ],
    ids=["stream", "image", "bytes", "images", "no prompt"],
)
def test_data_that_cannot_be_remembered_are_a_warning(model, tmp_path, warnings, data, line):
    read = data()
    if isinstance(read, list):
        read = Dataset.from_list(read)
    made = remembered(trainer(model, tmp_path, data=read), tmp_path)
    [said] = warnings()
    assert re.match(f"this training is not remembered: .*{line}", said)
    assert type(made) is GRPOTrainer


def test_a_prompt_with_two_labels_is_remembered_once_a_label(model, tmp_path, warnings):
    data = Dataset.from_dict({"prompt": TEXTS[:2] * 2, "answer": ["0", "2", "0", "9"]})
    made = remembered(trainer(model, tmp_path, data=data), tmp_path)
    [said] = warnings()
    assert "row 4" in said and "'9'" in said and "'2'" in said
    assert len(made.posteriors.prompt_ids) == 3


def test_rows_of_one_prompt_that_differ_are_named(model, tmp_path, warnings):
    columns = {"prompt": TEXTS[:2] * 2, "answer": ["0", "2", "0", "9"], "level": [1, 2, 1, 2]}
    made = remembered(
        trainer(model, tmp_path, data=Dataset.from_dict(columns)), tmp_path, label_column=None
    )
    [said] = warnings()
    assert "they differ in answer;" in said and "label_column=" in said
    assert len(made.posteriors.prompt_ids) == 2


def test_several_rewards_are_remembered_as_real_ones(model, tmp_path, warnings):
    made = remembered(trainer(model, tmp_path, [correct, short], max_steps=2), tmp_path)
    [said] = warnings()
    assert "correct, short" in said and "verifier=" in said
    made.train()
    [(parameters,)] = rows(tmp_path, "SELECT parameters FROM dbb_run")
    assert '"memory": "gaussian"' in parameters
    again = remembered(
        trainer(model, tmp_path, [correct, short]), tmp_path, run_name="other", verifier="correct"
    )
    assert again.posteriors.estimator.memory == "auto"


@pytest.mark.parametrize("call", [1, 3])
def test_a_reward_that_is_neither_0_nor_1(model, tmp_path, warnings, call):
    """In the first step the memory becomes one of real rewards; later it ends. No number changes."""
    changed = (
        {"eval_on_start": call == 1, "eval_strategy": "no"}
        if call == 3
        else {"eval_strategy": "no"}
    )

    def half(completions):
        return [0.5, *correct(completions)[1:]]

    made = remembered(trainer(model, tmp_path, Sometimes(call, half), **changed), tmp_path)
    made.train()
    [said] = warnings()
    assert "0.5" in said
    [(parameters, status, last_step)] = rows(
        tmp_path, "SELECT parameters, status, last_step FROM dbb_run"
    )
    if call == 1:
        assert said.startswith("the memory is of real rewards, since ")
        assert ('"memory": "gaussian"' in parameters, status, last_step) == (
            True,
            "finished",
            STEPS,
        )
        again = trainer(model, tmp_path, short, max_steps=1)
        remembered(
            again, tmp_path, run_name="y", warm_start="run", parameters={"memory": "gaussian"}
        ).train()
    else:
        assert said.startswith("remembering has ended: ")
        assert ('"memory": "gaussian"' in parameters, status, last_step) == (False, "stale", 2)


def test_a_verifier_with_other_scores_is_remembered_by_these(model, tmp_path):
    """Of several functions the memory sees the one that was named, and not the others."""

    def graded(completions, **_):
        return [0.25 * (place % 4) for place in range(len(completions))]

    made = remembered(
        trainer(model, tmp_path, [graded, short], max_steps=1), tmp_path, verifier="graded"
    )
    made.train()
    means = [mean for (mean,) in rows(tmp_path, "SELECT mean FROM dbb_history ORDER BY mean")]
    assert means == pytest.approx([0.125, 0.625])  # of 0 and 0.25, and of 0.5 and 0.75


def test_a_memory_that_was_chosen_is_not_replaced(model, tmp_path, warnings):
    made = remembered(
        trainer(model, tmp_path, short, max_steps=1), tmp_path, parameters={"memory": "dbb"}
    )
    made.train()
    [said] = warnings()
    assert said.startswith("remembering has ended: ")


def test_an_evaluation_before_the_first_step_stays_when_the_memory_begins_again(model, tmp_path):
    made = remembered(trainer(model, tmp_path, short, eval_on_start=True, max_steps=1), tmp_path)
    made.train()
    evaluated = rows(tmp_path, "SELECT step, samples FROM evaluation_results ORDER BY step")
    assert evaluated == [(0, ROLLOUTS), (1, ROLLOUTS)]  # the second one at the end
    assert runs(tmp_path) == [("run", "finished", 1)]


class Stop(TrainerCallback):
    """Ends a training early."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.step


def stopped(model, folder, step, **ours):
    """A run that was stopped, as by the end of a job."""
    made = remembered(trainer(model, folder, save_only_model=False), folder, **ours)
    made.add_callback(Stop(step))
    made.train()
    made.posteriors.close()


def test_a_second_launch_is_another_run(model, tmp_path, warnings):
    stopped(model, tmp_path, 3)
    made = remembered(trainer(model, tmp_path), tmp_path)
    [said] = warnings()
    assert "'run-2'" in said and "run_name=" in said and "resume='auto'" in said
    made.train()
    made.train()  # as when a cell of a notebook runs again
    assert [name for name, *_ in runs(tmp_path)] == ["run", "run-2", "run-3"]
    with pytest.raises(storage.StoreError, match=r"run named 'run' .*run_name=, or resume='auto'"):
        PosteriorGRPOTrainer(
            model,
            correct,
            arguments(tmp_path, eval_strategy="no"),
            DATA,
            store=store_of(tmp_path),
            run_name="run",
        )


@pytest.mark.parametrize("resume", ["auto", True])
def test_a_run_goes_on_from_its_checkpoint_with_trl_s_numbers(model, tmp_path, warnings, resume):
    whole = tmp_path / "whole"
    cut = tmp_path / "cut"
    plain = trainer(model, whole, save_only_model=False)
    plain.add_callback(Stop(3))
    plain.train()
    plain = trainer(model, whole, save_only_model=False)
    plain.train(resume_from_checkpoint=True)
    cut.mkdir()
    stopped(model, cut, 3)
    made = remembered(trainer(model, cut, save_only_model=False), cut, resume=resume)
    made.train(resume_from_checkpoint=True)
    assert_same(numbers(made), numbers(plain))
    assert runs(cut) == [("run", "finished", STEPS)]
    assert warnings() == []


def test_a_checkpoint_of_another_run_is_followed_by_a_run_that_begins_there(
    model, tmp_path, warnings
):
    stopped(model, tmp_path, 3)
    made = remembered(trainer(model, tmp_path, save_only_model=False), tmp_path, run_name="new")
    made.train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-2"))
    [said] = warnings()
    assert (
        said.startswith("run 'new' begins without what was before: checkpoint ")
        and "'run'" not in said
    )
    assert runs(tmp_path)[1] == ("new", "finished", 2)


def test_with_resume_auto_a_finished_run_is_followed_by_another(model, tmp_path, warnings):
    for _ in range(2):
        remembered(trainer(model, tmp_path, max_steps=1), tmp_path, resume="auto").train()
    assert runs(tmp_path) == [("run", "finished", 1), ("run-2", "finished", 1)]
    assert any("run 'run' is not continued: " in line for line in warnings())


def test_other_data_than_the_run_s_are_a_warning_and_refused_by_the_trainer_that_uses_them(
    model, tmp_path, warnings
):
    stopped(model, tmp_path, 3)
    shuffled = DATA.select([3, 1, 2, 0, 4, 5])
    made = remembered(trainer(model, tmp_path, data=shuffled), tmp_path, resume=True)
    [said] = warnings()
    assert "run 'run' was begun with other prompts" in said
    made.posteriors.close()
    ours = {
        "store": store_of(tmp_path),
        "run_name": "run",
        "label_column": "answer",
        "estimator": "point",
    }
    with pytest.raises(ValueError, match="run 'run' was begun with other prompts"):
        PosteriorGRPOTrainer(
            model, correct, arguments(tmp_path, eval_strategy="no"), shuffled, resume=True, **ours
        )


@pytest.mark.parametrize(
    ("ours", "message"),
    [
        ({"verifier": "corect"}, "verifier 'corect' is none of correct, did you mean correct"),
        ({"verifer": "correct"}, "no setting 'verifer', did you mean verifier"),
        (
            {"label_column": "anser"},
            "label_column='anser' is none of prompt, answer, did you mean answer",
        ),
        ({"estimator": "pont"}, "pont"),
        ({"parameters": {"memory": "x"}}, "memory"),
        ({"parameters": ["memory"]}, r"parameters = \['memory'\] is no dictionary"),
        ({"strategy": "posterior", "estimator": "dbb"}, "use PosteriorGRPOTrainer"),
        ({"replay": {"samples": 2}}, "replay = .* changes a training"),
        ({"form": "grpo"}, "grpo"),
        (
            {"form": "rloo"},
            "form = 'rloo' changes a training, and remember changes none; use PosteriorGRPO",
        ),
        ({"keep_rollouts": -1}, "keep_rollouts is -1; give a whole number"),
        ({"keep_rollouts": 1.5}, "keep_rollouts is 1.5"),
        ({"warm_start_weight": 2}, r"warm_start_weight = 2 is not in \(0, 1\]"),
        ({"warm_start_weight": "1"}, r"warm_start_weight = '1' is not in \(0, 1\]"),
        ({"resume": "True"}, "resume = 'True'; give True, False or 'auto'"),
        ({"take_over": "no"}, "take_over = 'no'; give True or False"),
        ({"run_name": 3}, "run_name = 3 is not a text"),
        ({"store": 3}, "store = 3 is no store"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_wrong_call_is_refused_where_it_is_made(model, tmp_path, ours, message):
    made = trainer(model, tmp_path)
    with pytest.raises(ValueError, match=message) as refused:
        remembered(made, tmp_path, **ours)
    assert "\n" not in str(refused.value)
    assert type(made) is GRPOTrainer and not (tmp_path / "openrlhf_dbb.db").exists()
    training = {"strategy", "form", "replay"} & ours.keys()
    if "verif" not in str(ours) and not training:  # before the model, of which there is none
        with pytest.raises(ValueError, match=message):
            PosteriorGRPOTrainer("/nowhere", correct, arguments(tmp_path), DATA, **ours)


def test_a_name_of_two_functions_is_refused(model, tmp_path):
    functions = [
        lambda completions, **_: [0.0] * len(completions),
        lambda completions, **_: [1.0] * len(completions),
    ]
    made = trainer(model, tmp_path, functions)
    with pytest.raises(
        ValueError, match=r"'<lambda>' is the name of 2 reward functions; .*__name__ ="
    ):
        remembered(made, tmp_path, verifier="<lambda>")


def test_a_trainer_is_remembered_once(model, tmp_path):
    made = remembered(trainer(model, tmp_path), tmp_path)
    with pytest.raises(ValueError, match="has a run already; call remember once"):
        remember(made)
    with pytest.raises(ValueError, match="needs a GRPOTrainer, not Dataset"):
        remember(DATA)


def test_a_run_to_resume_that_is_not_there_is_an_error_and_no_new_store(model, tmp_path):
    made = trainer(model, tmp_path)
    with pytest.raises(storage.StoreError, match="there is no store"):
        remembered(made, tmp_path, resume=True)
    assert type(made) is GRPOTrainer and not (tmp_path / "openrlhf_dbb.db").exists()
    remembered(made, tmp_path, resume="auto")
    assert made.posteriors.step == 0


def test_two_labels_of_one_prompt_are_refused_unless_images_differ(model, tmp_path):
    columns = {"prompt": TEXTS[:1] * 4, "answer": ["0", "2", "4", "6"]}
    ours = {"store": store_of(tmp_path), "label_column": "answer", "estimator": "point"}
    asked = arguments(tmp_path, eval_strategy="no")
    with pytest.raises(ValueError, match=r"row 2: .*'2', .*row 1 has '0'"):
        PosteriorGRPOTrainer(
            model, correct, asked, Dataset.from_dict(columns), run_name="text", **ours
        )
    seen = Dataset.from_dict(columns | {"image": [None] * 4})
    made = PosteriorGRPOTrainer(model, correct, asked, seen, run_name="images", **ours)
    assert len(made.posteriors.prompt_ids) == 4

"""Measured accuracy where many responses are right: which count, the share of a known policy, and what is stored."""

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from openrlhf_dbb.platform import cpu

cpu.prepare_driver()

import storage  # noqa: E402
from openrlhf_dbb.rewards import last_result  # noqa: E402
from study import exact, files, measure, protocol, run, tasks  # noqa: E402
from study.data import PointRow  # noqa: E402
from study.policy_gradient import sample  # noqa: E402
from study.tokens import NOTHING, Tokens  # noqa: E402

END, MARK, LONGEST = 3, 2, 4  # of the tokens 0 to 3


class Uniform(torch.nn.Module):
    """All four tokens are equally likely, always."""

    def forward(self, input_ids, use_cache=False):
        return SimpleNamespace(logits=torch.zeros(*input_ids.shape, END + 1))


def tokens(answers):
    return Tokens(
        [[0]] * len(answers),
        torch.tensor([[*answer, END, *[NOTHING] * (LONGEST - len(answer) - 1)] for answer in answers]),
        END,
    )


def task(answers):
    return exact.Task(Path(), tokens(answers), tokens(answers), MARK)


RESPONSES = {
    (1, END): True,
    (0, MARK, 1, END): True,  # after a step
    (MARK, MARK, 1, END): True,
    (0, 1, END): False,
    (1, MARK, 0, END): False,
    (1, MARK, END): False,
    (MARK, 1, 1, END): False,
    (0, MARK, MARK, 1): False,  # does not end
    (END,): False,
}


def test_a_response_is_right_by_what_follows_its_last_mark():
    padded = torch.tensor([[*response, *[NOTHING] * (LONGEST - len(response))] for response in RESPONSES])
    asked = task([[1]])
    assert asked.right(padded[None], asked.heldout)[0].tolist() == list(RESPONSES.values())
    whole = dataclasses.replace(asked, mark=None)
    assert whole.right(padded[None], whole.heldout)[0].tolist() == [True] + [False] * (len(RESPONSES) - 1)


def test_each_prompt_has_its_own_answer():
    asked = task([[1], [0], [1, 0]])
    right = asked.right(torch.tensor([[[0, MARK, 1, END], [MARK, 1, 0, END]]] * 3), asked.heldout)
    assert right.tolist() == [[True, False], [False, False], [False, True]]


# With tokens at 1/4 each: "1 END", "MARK 1 END", and "x MARK 1 END", where x is any of the three tokens but END.
SHARE = 4**-2 + 4**-3 + 3 * 4**-4


def test_the_share_of_right_responses_is_that_of_the_policy():
    share = task([[1]] * 40).sampled(Uniform(), prompts=40, group=400)
    of_one = math.sqrt(SHARE * (1 - SHARE) / (40 * 400))
    assert share == pytest.approx(SHARE, abs=4 * of_one)


def test_the_share_of_a_policy_that_always_answers_the_same():
    class Certain(torch.nn.Module):
        """Always 1, then the end."""

        def forward(self, input_ids, use_cache=False):
            logits = torch.full((*input_ids.shape, END + 1), -torch.inf)
            logits[..., 1] = torch.where(input_ids == 0, 0.0, -torch.inf)
            logits[..., END] = torch.where(input_ids == 0, -torch.inf, 0.0)
            return SimpleNamespace(logits=logits)

    assert task([[1], [0], [1], [1]]).sampled(Certain()) == 0.75


def test_the_sampling_is_the_same_for_a_seed_and_takes_the_first_prompts():
    asked = task([[1]] * 40 + [[0]] * 40)
    again = [asked.sampled(Uniform(), prompts=40, group=8, seed=seed) for seed in (0, 0, 1)]
    assert again[0] == again[1] != again[2]
    assert again[0] == task([[1]] * 40).sampled(Uniform(), group=8)
    assert asked.accuracy(Uniform()) == asked.sampled(Uniform())


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A study's folder with a small task with steps, whose model has had one step of warm-up."""
    folder = tmp_path_factory.mktemp("study")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("openrlhf_dbb.tiny.model.WARMUP_ROWS", 60)
        patch.setattr(tasks, "PROMPTS", {"train_prompts": 4, "heldout_prompts": 6, "ood_prompts": 2})
        patch.setattr(tasks, "STARTS", {"steps": tasks.STARTS["steps"] | {"warmup_steps": 1}})
        tasks.prepare(run.task_folder(folder, "steps", 1), 1, "steps")
    return folder


def test_the_policies_of_a_finished_run_are_sampled_and_not_taken_for_exact(made, fill):
    each = protocol.PlannedRun("chain-n2-auto-s1", "chain-n2", "auto", 2, 1, "steps", {})
    model = made / "tasks/steps-s1/model"
    (made / "saved").mkdir()
    (made / "saved/global_step1_hf").symlink_to(model)
    with storage.open_store(run.store_url(made)) as store:
        config = {"ckpt.output_dir": str(model), "ckpt.path": str(made / "saved"), "actor.adam.lr": 1e-4}
        stored = fill.run(store, each.name, config=config)
        fill.step(stored, 1, fill.prompts(store, 2), (1, 0), 2)
        stored.finish(0, 0)
    measure.measure_models([each], made)
    assert not (made / "exact.jsonl").exists()
    measure.measure_points([each], made, 1)
    asked = exact.read(made / "tasks/steps-s1", tasks.kind("steps"))
    shown = pytest.approx(asked.sampled(asked.policy()), rel=1e-5)
    points = files.read(made / "points.csv", PointRow)
    assert [(point.step, point.accuracy) for point in points] == [(0, shown), (1, shown)]


def test_what_is_right_in_tokens_is_right_for_the_verifier(made):
    """All responses of an untrained policy, and some that are right."""
    from transformers import AutoTokenizer

    asked = exact.read(made / "tasks/steps-s1", tasks.kind("steps"))
    tokenizer = AutoTokenizer.from_pretrained(asked.model)
    prompts = [tokenizer.decode(prompt) for prompt in asked.heldout.prompts]
    labels = [tokenizer.decode(answer[answer != NOTHING][:-1]) for answer in asked.heldout.answers_P_L]
    drawn_P_G_L = sample(asked.policy(), asked.heldout, 20, torch.Generator().manual_seed(0))
    after_a_step_P_G_L = torch.cat(
        [torch.tensor([[5, asked.mark]] * len(prompts)), asked.heldout.answers_P_L[:, :-2]], dim=1
    )[:, None]
    responses_P_G_L = torch.cat([drawn_P_G_L, after_a_step_P_G_L], dim=1)
    right_P_G = asked.right(responses_P_G_L, asked.heldout)
    assert right_P_G[:, -1].all() and not right_P_G[:, :-1].all()
    for prompt, label, responses_G_L, right_G in zip(prompts, labels, responses_P_G_L, right_P_G, strict=True):
        ended = (responses_G_L == asked.heldout.end).any(-1)  # the verifier does not ask for the end
        queries = [prompt + tokenizer.decode(each[each != NOTHING]) for each in responses_G_L[ended]]
        rewards = last_result.reward_func(queries, [prompt] * len(queries), [label] * len(queries))["rewards"]
        assert rewards == right_G[ended].double().tolist()

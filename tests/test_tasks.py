"""Tasks of reasoning-gym as prompts, labels and rewards."""

import dataclasses
import json
import re

import pytest

pytest.importorskip("reasoning_gym")

from openrlhf_dbb import tasks
from openrlhf_dbb.cli.main import main
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.evaluation import benchmarks, loading
from openrlhf_dbb.rewards.reasoning_gym import reward_func, score

SUMS = "reasoning_gym:chain_sum?size=40&max_terms=2&max_digits=1"


def made(spec):
    """Label and answer of a task's first problem, made in this process: to start one of its own takes seconds."""
    ((_, label), *_) = tasks.reply_to(task=spec)["rows"]
    return label, json.loads(label)["answer"]


@pytest.fixture(scope="module")
def sums():
    return tasks.problems(SUMS, "Now.")


def test_a_repeated_question_keeps_its_label_and_the_instruction_follows_it(sums):
    assert (
        len(sums)
        == 40
        > len({row["prompt"] for row in sums})
        == len({row["label"] for row in sums})
    )
    assert all(row["prompt"].endswith(" =\nNow.") for row in sums)
    assert made("chain_sum?seed=3") == made("chain_sum?seed=3") != made("chain_sum?seed=4")
    benchmark = dataclasses.replace(benchmarks.find(SUMS), instruction="Now.")
    assert loading.load(benchmark).texts == [row["prompt"] for row in sums]


def test_a_spec_gives_the_same_problems_again_in_another_process_and_settings_have_the_types_of_the_task_s_own():
    spec = "reasoning_gym:ransom_note?size=5"  # goes by the hash seed, another one in each process
    assert [tasks.problems(spec), tasks.problems.cache_clear()][0] == tasks.problems(spec)
    label, _ = made("basic_arithmetic?size=1&operators=+&operators=-&allow_negation=false")
    assert '{"seed": 0, "size": 1, "operators": ["+", "-"], "allow_negation": false}' in label


UNUSABLE = {
    "chain_sm": r"unknown task 'chain_sm', did you mean chain_sum\?; openrlhf-dbb tasks lists",
    "chain_sum?max_term=3": r"unknown setting 'max_term', did you mean max_terms\?; known: min_terms, max_terms",
    "chain_sum?max_terms=0": r"refuses \{.*'max_terms': 0\}: max_terms must be >= min_terms; change",
}
ANSWERS = {  # right and wrong ones
    "chain_sum": (
        ["{}", "It is {}.", "<answer>{}</answer>!"],
        ["{} + 1", "{}\nWait", "<answer>x{}</answer>"],
    ),
    "spell_backward": (["{}", "Reversed:\n{}"], ["{}x", "It is {}."]),
    "sudoku": (["{}", "<answer>\n{}\n</answer>"], ["1 2 3"]),
    "propositional_logic": (
        [],
        ["", "P", "<answer>no</answer>"],
    ),  # has partial credit for any formula
    "countdown": (["{}", "So:\n{}"], ["1", "{} + 1"]),
}


def test_a_spec_that_cannot_be_used_says_why_in_one_line():
    for spec, why in UNUSABLE.items():
        assert re.search(why, tasks.reply_to(task=spec)["unverified"])
    with pytest.raises(UsageError, match=r"^reasoning_gym:puzzle24: unknown task 'puzzle24'"):
        tasks.problems("reasoning_gym:puzzle24")


@pytest.mark.parametrize("task", ANSWERS)
def test_only_an_answer_with_full_credit_is_right(task):
    right, wrong = ANSWERS[task]
    label, answer = made(f"{task}?size=1")
    replies = [tasks.reply_to(label=label, answer=text.format(answer)) for text in right + wrong]
    assert [reply["correct"] for reply in replies] == [True] * len(right) + [False] * len(wrong)


def test_the_reward_reads_the_response_behind_the_prompt_and_refuses_another_label(sums):
    row = sums[0]
    answer = json.loads(row["label"])["answer"]
    queries = [f"{row['prompt']} {text}<|im_end|>" for text in (answer, f"{answer}0")]
    assert reward_func(queries, [row["prompt"]] * 2, [row["label"]] * 2)["rewards"] == [1.0, 0.0]
    assert score("2", made("prime_factorization?size=1")[0]) == 0.0
    for label in ("43", row["label"].replace(f'"{answer}"', '"x"')):
        with pytest.raises(ValueError, match="cannot read the label"):
            score("43", label)


def test_the_command_lists_tasks_with_an_example(capsys):
    assert main(["tasks", "--tasks", "chain_sum?max_digits=1,word_sorting"]) == 0
    header, sums, _ = capsys.readouterr().out.splitlines()
    assert header.split() == ["task", "answer", "question"]
    assert sums.startswith("chain_sum?max_digits=1") and "arithmetic" in sums

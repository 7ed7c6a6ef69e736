"""Tasks of reasoning-gym as prompts, labels and rewards."""

import json

import pytest

pytest.importorskip("reasoning_gym")

from openrlhf_dbb import tasks
from openrlhf_dbb.cli.main import main
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.rewards.reasoning_gym import reward_func, score

SUMS = "reasoning_gym:chain_sum?size=40&max_terms=2&max_digits=1"


def test_a_spec_gives_the_same_problems_again_and_a_repeated_question_keeps_its_label():
    first = tasks.problems(f"{SUMS}&seed=3")
    tasks.problems.cache_clear()
    assert tasks.problems(f"{SUMS}&seed=3") == first != tasks.problems(f"{SUMS}&seed=4")
    assert len(first) == 40 > len({row["prompt"] for row in first}) == len({row["label"] for row in first})
    assert tasks.problems(SUMS, "Now.")[0]["prompt"].endswith(" =\nNow.")
    words = "reasoning_gym:ransom_note?size=5"  # goes by the hash seed, another one in each process
    assert [tasks.problems(words), tasks.problems.cache_clear()][0] == tasks.problems(words)


def test_settings_have_the_types_of_the_task_s_own():
    (row,) = tasks.problems("reasoning_gym:basic_arithmetic?size=1&operators=+&operators=-&allow_negation=false")
    assert '{"seed": 0, "size": 1, "operators": ["+", "-"], "allow_negation": false}' in row["label"]


UNUSABLE = {
    "chain_sm": r"task 'chain_sm' is unknown, did you mean chain_sum\?; openrlhf-dbb tasks lists",
    "puzzle24": "'puzzle24' cannot be verified",
    "chain_sum?max_term=3": r"unknown setting 'max_term', did you mean max_terms\?; known: min_terms, max_terms",
    "chain_sum?max_terms=0": r"refuses \{.*'max_terms': 0\}: max_terms must be >= min_terms; change",
}
ANSWERS = {  # right and wrong ones
    "chain_sum": (["{}", "It is {}.", "<answer>{}</answer>!"], ["{} + 1", "{}\nWait", "<answer>x{}</answer>"]),
    "spell_backward": (["{}", "Reversed:\n{}"], ["{}x", "It is {}."]),
    "sudoku": (["{}", "<answer>\n{}\n</answer>"], ["1 2 3"]),
    "propositional_logic": ([], ["", "P", "<answer>no</answer>"]),  # has partial credit for any formula
    "countdown": (["{}", "So:\n{}"], ["1", "{} + 1"]),
}


@pytest.mark.parametrize("spec", UNUSABLE)
def test_a_spec_that_cannot_be_used_is_one_line(spec):
    with pytest.raises(UsageError, match=rf"^reasoning_gym:{spec.partition('?')[0]}.*: .*{UNUSABLE[spec]}"):
        tasks.problems(f"reasoning_gym:{spec}")


@pytest.mark.parametrize("task", ANSWERS)
def test_only_an_answer_with_full_credit_is_right(task):
    right, wrong = ANSWERS[task]
    label = tasks.problems(f"reasoning_gym:{task}?size=1")[0]["label"]
    answer = json.loads(label)["answer"]
    assert [score(text.format(answer), label) for text in right + wrong] == [1.0] * len(right) + [0.0] * len(wrong)


def test_the_reward_reads_the_response_behind_the_prompt_and_refuses_another_label():
    row = tasks.problems(SUMS)[0]
    answer = json.loads(row["label"])["answer"]
    queries = [f"{row['prompt']} {text}<|im_end|>" for text in (answer, f"{answer}0")]
    assert reward_func(queries, [row["prompt"]] * 2, [row["label"]] * 2)["rewards"] == [1.0, 0.0]
    assert score("2", tasks.problems("reasoning_gym:prime_factorization?size=1")[0]["label"]) == 0.0
    for label in ("43", row["label"].replace(f'"{answer}"', '"x"')):
        with pytest.raises(ValueError, match="cannot read the label"):
            score("43", label)


def test_the_command_lists_tasks_with_an_example(capsys):
    assert main(["tasks", "--tasks", "chain_sum?max_digits=1,word_sorting"]) == 0
    header, sums, _ = capsys.readouterr().out.splitlines()
    assert header.split() == ["task", "answer", "question"]
    assert sums.startswith("chain_sum?max_digits=1") and "arithmetic" in sums

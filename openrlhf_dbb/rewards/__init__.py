"""Verifiers that OpenRLHF loads by file path as reward functions.

math_answer      the reward function: 1.0 right, 0.0 wrong, None not verified
exact_match      another one: 1.0 if the response is the label itself, else 0.0
last_result      a third: 1.0 if what follows the last "=" of the response is the label, else 0.0
answers          which part of a text is the answer (no mathematics)
labels           labels that Math-Verify cannot read, found before a training
reward_file      a reward file of the user's, imported before a training
verifier_pool    Math-Verify in processes of its own, with a hard time limit
verifier_worker  the program that each of these processes runs
"""

from pathlib import Path


def math_answer_file() -> Path:
    """Where OpenRLHF finds the reward function ``math_answer``."""
    return Path(__file__).with_name("math_answer.py")

"""Verifiers that OpenRLHF loads by file path as reward functions.

math_answer           the reward function: 1.0 right, 0.0 wrong, None not verified
math_answer_generous  the same with Math-Verify's own reading, which also calculates what the response did not
exact_match           another one: 1.0 if the response is the label itself, else 0.0
last_result           one more: 1.0 if what follows the last "=" of the response is the label, else 0.0
final_answer          the answer that a response states
answers               responses, boxes and labels as texts
latex                 LaTeX and numbers in one notation
labels                labels that Math-Verify cannot read, found before a training
reward_file           a reward file tried before a training: imported, and asked whether it pays for the prompt
verifier_pool         Math-Verify in processes of its own, with a hard time limit
verifier_worker       the program that each of these processes runs
"""

from pathlib import Path

MATH_FILES = tuple(Path(__file__).with_name(name) for name in ("math_answer.py", "math_answer_generous.py"))
"""The files of the reward functions that ask Math-Verify."""

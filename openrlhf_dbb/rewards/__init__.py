"""Verifiers that OpenRLHF loads by file path as reward functions.

math_answer    the reward function for mathematics
exact_match    1.0 if the response is the label itself
reasoning_gym  1.0 if a task of reasoning-gym gives the answer full credit
answers        where a response states its answer
choices        the letter or the words that a response settles on
values         answers and labels as values
tokens         a text in one notation, taken apart
units          units after a number
verifier_pool  verifiers in processes with a hard time limit
reward_file    a reward file tried before a training
"""

from pathlib import Path

MATH_FILE = Path(__file__).with_name("math_answer.py")
"""The file of the reward function for mathematics."""

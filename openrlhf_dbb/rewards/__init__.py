"""Verifiers that OpenRLHF loads by file path as reward functions.

math_answer    mathematics: answers (finds), values (reads and compares), notation, tables.toml
exact_match    texts
reasoning_gym  tasks that a program makes
for_verl       the first and the third as reward functions of verl
verifier_pool  verifiers in processes with a hard time limit
reward_file    a reward file tried before a training
reward_server  a reward server asked during a training, and tried before it
"""

from pathlib import Path

MATH_FILE = Path(__file__).with_name("math_answer.py")

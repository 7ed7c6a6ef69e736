"""Verifiers that OpenRLHF loads by file path as reward functions.

math_answer    mathematics: answers (finds), values (reads and compares), notation, tables.toml
exact_match    texts
reasoning_gym  tasks that a program makes
for_verl       the first and the third as reward functions of verl
for_trl        the same as reward functions of TRL
verifier_pool  verifiers in processes with a hard time limit
reward_file    a reward file tried before a training
reward_server  a reward server asked during a training, and tried before it
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING

from openrlhf_dbb.errors import UsageError

if TYPE_CHECKING:  # a verifier's process does not wait for it
    from openrlhf_dbb.chosen import Values

MATH_FILE = Path(__file__).with_name("math_answer.py")
_REWARD = "reward.remote_url"


def path_of_verifier(run: "Values") -> None:
    """Put the path of a verifier of ours in place of its name.

    Raises:
        UsageError: there is none of that name.
    """
    name = run.values[_REWARD]
    if not name or not re.fullmatch(r"\w+", name):
        return
    path = Path(__file__).with_name(f"{name}.py")
    if not path.exists():
        raise UsageError(
            f"--{_REWARD} {name!r} is neither a URL, a .py file nor a reward of openrlhf_dbb "
            "(math_answer, exact_match, reasoning_gym); give one of these"
        )
    run.values[_REWARD] = str(path)

"""Whether the training stack is installed, which the light install leaves out."""

from __future__ import annotations

import importlib.util
import platform
import sys

from openrlhf_dbb.errors import UsageError

_MODULES = ("torch", "ray", "vllm", "openrlhf")


def require(command: str) -> None:
    """Check that a command's modules are installed; imports none of them.

    Raises:
        UsageError: one is missing, or cannot be had for this Python.
    """
    if sys.version_info >= (3, 13):
        raise UsageError(
            f"{command} needs the training stack, which is for Python 3.10 to 3.12, and this is "
            f"{platform.python_version()}; make an environment with one of these"
        )
    for name in _MODULES:
        if importlib.util.find_spec(name) is None:
            raise UsageError(
                f'{command} needs the training stack: pip install "openrlhf-dbb[cuda]" or, without a GPU, '
                f'"openrlhf-dbb[cpu]" (here: no module named {name})'
            )

"""GRPO with stored reward posteriors on OpenRLHF's Ray + DeepSpeed + vLLM pipeline.

Parts; each imports only what stands below it:

cli         the commands
driver      the process that the user starts, before and around the training
actors      the trainer, in the same process, and Ray's actors: knows torch and OpenRLHF
integrations  the same posteriors in other trainers: TRL, verl
core        numpy alone: posteriors, rollout strategies, replay, what became of each rollout
            (below it: the packages estimators and storage, which know nothing of this one)

What they share:

data        the training prompts and the held-out prompts
rewards     verifiers that run as OpenRLHF reward functions
methods     published training methods, as flag values
presets     flag values for a model
tiny        the task and the model of the tiny preset
upstream    OpenRLHF's internals: how they are reached
platform    the machine: with CUDA, without it, and what the processes of a run need on either
evaluation  models on benchmarks, measured and compared
inspect     a store, looked into and kept in order
watch       runs in the browser: a live page, or one that opens offline
lab         estimators measured without training
terminal    text from a store, made safe for a terminal
options     the parser of every command, and options that several commands have
errors      UsageError and RunError, which end a command in one line; did you mean
"""

__version__ = "0.1.0"

from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = ["Posteriors", "Probes", "Responses", "Scored", "StepExtras", "__version__"]

if TYPE_CHECKING:
    from openrlhf_dbb.core.posteriors import Posteriors
    from openrlhf_dbb.core.step import Probes, Responses, Scored, StepExtras
else:  # a type checker would take a function that answers to any name for all names

    def __getattr__(name: str) -> Any:
        """Posteriors on first use: a command that needs no store does not wait for SQLAlchemy."""
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_LAZY[name]), name)


_STEP = "openrlhf_dbb.core.step"
_LAZY = {"Posteriors": "openrlhf_dbb.core.posteriors"} | dict.fromkeys(__all__[1:-1], _STEP)

"""GRPO with stored reward posteriors on OpenRLHF's Ray + DeepSpeed + vLLM pipeline.

A training run passes through these parts. A part imports only from the parts below it:

cli           starts the part that a command needs
driver        reads the command line, prepares the run and launches it
actors        trains: the trainer, and OpenRLHF's Ray actors with the posteriors
integrations  trains with the same posteriors in TRL and verl
core          computes one step without torch
estimators    turn rewards into posteriors and advantages; numpy alone
storage       keeps posteriors and their history in SQL; SQLAlchemy alone

The other parts:

data        reads the training prompts and the held-out prompts
rewards     verifies responses, as OpenRLHF reward functions
tasks       makes problems with reasoning-gym, and verifies answers to them
methods     published training methods, as flag values
presets     flag values for a model
tiny        the task and the model of the tiny preset
upstream    reaches OpenRLHF's internals
platform    knows the machine: with CUDA or without
evaluation  measures models on benchmarks and compares them
inspect     prints what a store holds
watch       shows runs in the browser, live or as a file
lab         measures estimators without training
terminal    makes text from a store safe for a terminal
options     parses options that several commands have
secrets     masks passwords, tokens and keys
errors      ends a command in one line: UsageError, RunError
"""

__version__ = "0.1.0"

from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = ["Posteriors", "Probes", "Responses", "Scored", "StepExtras", "__version__"]

if TYPE_CHECKING:
    from openrlhf_dbb.core.posteriors import Posteriors
    from openrlhf_dbb.core.step import Probes, Responses, Scored, StepExtras
else:  # a type checker would believe that this function provides every name

    def __getattr__(name: str) -> Any:
        """Import a name on first use, so that a command without a store does not wait for SQLAlchemy."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = "posteriors" if name == "Posteriors" else "step"
        return getattr(import_module(f"openrlhf_dbb.core.{module}"), name)

"""GRPO with stored reward posteriors on OpenRLHF's Ray + DeepSpeed + vLLM pipeline.

A training run passes through these parts. A part imports only from the parts below it:

cli           starts the part that a command needs
driver        reads the command line, prepares the run and launches it
actors        trains: the trainer, and OpenRLHF's Ray actors with the posteriors
integrations  trains with the same posteriors in TRL and verl
core          computes one step without torch
estimators    turn rewards into posteriors and advantages; numpy alone
storage       keeps posteriors and their history in SQL; SQLAlchemy alone

The others are data (prompts), rewards (verifiers), tasks, methods, presets and tiny; upstream, chosen and saved
(OpenRLHF's internals, arguments and folders) and platform (the machine); evaluation, inspect, watch and lab, which read
models and stores; terminal, options, secrets and errors.
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

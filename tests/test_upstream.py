"""OpenRLHF's internals are as this package needs them: its main block, and the methods that our classes override."""

import importlib
import inspect

import pytest

pytest.importorskip("openrlhf")

from openrlhf_dbb import upstream
from openrlhf_dbb.platform import cpu

if not cpu.active():
    pytest.skip("imports the actors without CUDA", allow_module_level=True)
cpu.prepare_driver()

MODULES = (
    "openrlhf_dbb.actors.trainer", "openrlhf_dbb.actors.generation", "openrlhf_dbb.actors.experience_maker",
    "openrlhf_dbb.actors.policy_actor", "openrlhf_dbb.actors.vllm_actor", "openrlhf_dbb.platform.backend",
)  # fmt: skip


def overrides():
    """(our class, method name, our function, OpenRLHF's function) of each method of OpenRLHF that we override."""
    for module in map(importlib.import_module, MODULES):
        for ours in vars(module).values():
            if not inspect.isclass(ours) or ours.__module__ != module.__name__:
                continue
            for name, method in vars(ours).items():
                theirs = next((vars(base)[name] for base in ours.__mro__[1:] if name in vars(base)), None)
                if inspect.isfunction(method) and getattr(theirs, "__module__", "").startswith("openrlhf."):
                    yield ours, name, method, theirs


def accepts(ours, theirs):
    """Return whether any call that suits ``theirs`` suits ``ours`` too."""
    kinds = {parameter.kind for parameter in ours.values()}
    takes_any = inspect.Parameter.VAR_POSITIONAL in kinds, inspect.Parameter.VAR_KEYWORD in kinds
    shared = [name for name in theirs if name in ours]
    return (
        all(name in ours or any(takes_any) for name, p in theirs.items() if p.kind == p.POSITIONAL_OR_KEYWORD)
        and all(name in ours or takes_any[1] for name, p in theirs.items() if p.kind == p.KEYWORD_ONLY)
        and shared == [name for name in ours if name in theirs]
    )


def test_our_methods_accept_what_openrlhf_calls_theirs_with():
    checked = list(overrides())
    assert len(checked) > 15
    for cls, name, ours, theirs in checked:
        if name == "__init__" and cls.__name__ not in ("PosteriorTrainer", "StrictRolloutActor", "PolicyActor"):
            continue  # only we make these objects
        parameters = [dict(inspect.signature(function).parameters) for function in (ours, theirs)]
        parameters[1].pop("_ray_trace_ctx", None)  # Ray adds it
        assert accepts(*parameters), (cls.__name__, name)


def test_a_name_that_a_module_no_longer_has_is_not_replaced():
    with pytest.raises(upstream.UsageError, match=r"^inspect has no no_such_name; install"):
        upstream.replace(inspect, "no_such_name", None)

"""OpenRLHF's internals are as this package needs them, and the table of them is whole."""

import ast
import importlib
import inspect
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("openrlhf")

from openrlhf_dbb import upstream
from openrlhf_dbb.platform import cpu
from openrlhf_dbb.upstream import source_file

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


ROOT = Path(__file__).parents[1]
TREES = {path: ast.parse(path.read_text()) for path in (ROOT / "openrlhf_dbb").rglob("*.py")}
THEIRS = source_file("utils.config").parents[1]
TABLE = SimpleNamespace(**runpy.run_path(str(ROOT / "scripts/openrlhf_changes.py")))


def imported(tree):
    """What each name means that a file imports from OpenRLHF, without the first part."""
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    named = {(a.asname or a.name): f"{node.module}.{a.name}" for node in froms for a in node.names}
    plain = [a for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names if a.asname]
    named |= {a.asname: a.name for a in plain}
    return {name: path.removeprefix("openrlhf.") for name, path in named.items() if path.startswith("openrlhf.")}


def test_the_sources_that_the_table_relies_on_are_those_that_it_was_checked_with():
    rows = TABLE.table()
    assert {row.source: TABLE.digest(row.source) for row in rows} == {row.source: row.digest for row in rows}
    assert TABLE.digest("utils.config:no_such_name") == "gone"


def test_the_table_has_all_that_is_replaced_subclassed_or_read_privately():
    rows = TABLE.table()
    replaced = {row.name.replace(":", ".") for row in rows if row.how == "replaced"}
    subclassed = {row.name.rpartition(":")[2] for row in rows if row.how == "subclassed"}
    read = {row.name.rpartition(".")[2] for row in rows if row.how == "read"}
    theirs = [node for path in THEIRS.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    private = {n.name for n in theirs if isinstance(n, ast.FunctionDef) and n.name.startswith("_") and n.name[1] != "_"}
    found = set()
    for path, tree in TREES.items():
        names = imported(tree)
        own = {getattr(node, "name", None) for node in ast.walk(tree)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                bases = {name.id for base in node.bases for name in ast.walk(base) if isinstance(name, ast.Name)}
                assert {names[base].rpartition(".")[2] for base in bases & names.keys()} <= subclassed, path
                found |= bases & names.keys()
            elif isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "replace" and len(node.args) == 3:
                module, name = node.args[:2]
                if isinstance(module, ast.Name) and module.id in names:
                    assert f"{names[module.id]}.{name.value}" in replaced, path
                    found.add(name.value)
            elif isinstance(node, ast.Attribute) and node.attr in private - own:
                assert node.attr in read, (path, node.attr)
                found.add(node.attr)
    assert {"PPOTrainer", "DeepspeedStrategy", "ActorPPOTrainer", "blending_datasets", "_unwrap_model"} <= found


def test_a_resume_logs_no_step_twice_to_tensorboard(tmp_path):
    from openrlhf.utils.logging_utils import TensorboardLogger
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    args = SimpleNamespace(logger=SimpleNamespace(tensorboard_dir=str(tmp_path), wandb=SimpleNamespace(run_name="run")))
    for done, steps in ((0, [1, 2, 3, 4]), (2, [3, 4, 5])):  # killed after step 4, resumed at step 2
        logger = TensorboardLogger(args)
        upstream.forget_logged(logger, done)
        for step in steps:
            logger.log_train(step, {"loss": 10.0 * done + step})
        logger.close()
    accumulator = EventAccumulator(str(tmp_path / "run")).Reload()
    shown = [(event.step, event.value) for event in accumulator.Scalars("train/loss")]
    assert shown == [(1, 1), (2, 2), (3, 23), (4, 24), (5, 25)]

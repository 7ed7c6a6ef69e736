"""OpenRLHF's internals are as this package needs them, and the table of them is whole."""

import ast
import importlib
import inspect
import os
import pickle
import runpy
import subprocess
import sys
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
                plain = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
                bases = {name.id for base in plain for name in ast.walk(base) if isinstance(name, ast.Name)}
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


HEAVY = """
class Engine:
    wheels = 4

    def __init__(self, power):
        self.power = power
"""
LIGHT = """
import deferred_heavy as package
from deferred_heavy import Engine, parts
from deferred_heavy.parts import Engine as Part
"""
RECEIVER = """
import pickle, sys
package, engine, parts, part = pickle.load(sys.stdin.buffer)
assert engine is package.Engine is part is parts.Engine and type(engine) is type
print(engine(75).power)
"""


def test_a_name_becomes_real_when_it_is_used_and_in_the_process_that_it_is_sent_to(tmp_path, monkeypatch):
    (tmp_path / "deferred_heavy").mkdir()
    (tmp_path / "deferred_heavy/parts.py").write_text(HEAVY)
    (tmp_path / "deferred_heavy/__init__.py").write_text("from deferred_heavy.parts import Engine")
    (tmp_path / "deferred_light.py").write_text(LIGHT)
    monkeypatch.syspath_prepend(tmp_path)
    with upstream.deferring("deferred_heavy"):
        light = importlib.import_module("deferred_light")
    sent = pickle.dumps([light.package, light.Engine, light.parts, light.Part])
    assert "deferred_heavy" not in sys.modules
    command = [sys.executable, "-c", RECEIVER]
    assert subprocess.run(command, input=sent, cwd=tmp_path, capture_output=True, check=True).stdout == b"75\n"
    engine = light.Engine(90)
    assert type(engine) is sys.modules["deferred_heavy.parts"].Engine
    assert (engine.power, light.Part.wheels, light.parts.Engine.wheels) == (90, 4, 4)


@pytest.mark.parametrize(
    ("block", "imported", "heavy"),
    [
        ("upstream.imports_for_driver()", "trainer, openrlhf_dbb.actors.policy_actor", "deepspeed vllm torch._dynamo"),
        ("worker()", "policy_actor", "datasets scipy torch._inductor.lowering vllm"),
        ("worker()", "vllm_actor, openrlhf_dbb.platform.cpu_engine", "pandas scipy torch._inductor.lowering"),
    ],
)
def test_a_process_imports_its_classes_without_what_it_does_not_use(block, imported, heavy):
    code = f"""
import sys
from contextlib import nullcontext
from openrlhf_dbb import upstream
from openrlhf_dbb.platform import cpu
cpu.prepare_driver()
worker = lambda: nullcontext(cpu.prepare_worker())  # as Ray prepares one before its actor
with {block}:
    import openrlhf_dbb.actors.{imported}
print([name for name in sys.modules if name.startswith({tuple(heavy.split())})])
"""
    environment = os.environ | cpu.worker_environment() | {"PYTHONPATH": os.pathsep.join(sys.path)}
    shown = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines()[-1] == "[]"

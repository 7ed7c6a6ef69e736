"""OpenRLHF's internals are as this package needs them, and the table of them is whole."""

import ast
import importlib
import inspect
import os
import pickle
import re
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
    paths = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                paths[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            paths.update((alias.asname, alias.name) for alias in node.names if alias.asname)
    theirs = {}
    for name, path in paths.items():
        if path.startswith("openrlhf."):
            theirs[name] = path.removeprefix("openrlhf.")
    return theirs


def test_the_sources_that_the_table_relies_on_are_those_that_it_was_checked_with():
    rows = TABLE.table()
    assert {row.source: TABLE.digest(row.source) for row in rows} == {
        row.source: row.digest for row in rows
    }
    assert TABLE.digest("utils.config:no_such_name") == "gone"


def of_table(how, separator):
    """The last parts of the names that the table has under this word."""
    return {row.name.rpartition(separator)[2] for row in TABLE.table() if row.how == how}


def nodes(kind):
    """Each node of this kind in our files: its path and tree, and the node."""
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, kind):
                yield path, tree, node


def test_the_table_has_every_class_of_openrlhf_that_is_subclassed():
    listed = of_table("subclassed", ":")
    subclassed = set()
    for path, tree, node in nodes(ast.ClassDef):
        theirs = imported(tree)
        for base in node.bases:
            inside = base.value if isinstance(base, ast.Subscript) else base
            names = {part.id for part in ast.walk(inside) if isinstance(part, ast.Name)}
            for name in names & theirs.keys():
                assert theirs[name].rpartition(".")[2] in listed, path
                subclassed.add(name)
    assert {"PPOTrainer", "DeepspeedStrategy", "ActorPPOTrainer"} <= subclassed


def test_the_table_has_every_name_of_openrlhf_that_is_replaced():
    listed = {row.name.replace(":", ".") for row in TABLE.table() if row.how == "replaced"}
    replaced = set()
    for path, tree, node in nodes(ast.Call):
        if getattr(node.func, "attr", None) != "replace" or len(node.args) != 3:
            continue
        theirs = imported(tree)
        module, name = node.args[:2]
        if isinstance(module, ast.Name) and module.id in theirs:
            assert f"{theirs[module.id]}.{name.value}" in listed, path
            replaced.add(name.value)
    assert "blending_datasets" in replaced


def private_functions_of_openrlhf():
    names = set()
    for path in THEIRS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and re.match("_[^_]", node.name):
                names.add(node.name)
    return names


def test_the_table_has_every_private_function_of_openrlhf_that_is_read():
    listed = of_table("read", ".")
    private = private_functions_of_openrlhf()
    own = {
        path: {getattr(node, "name", None) for node in ast.walk(tree)}
        for path, tree in TREES.items()
    }
    read = set()
    for path, _, node in nodes(ast.Attribute):
        if node.attr in private - own[path]:
            assert node.attr in listed, (path, node.attr)
            read.add(node.attr)
    assert "_unwrap_model" in read


def test_a_resume_logs_no_step_twice_to_tensorboard(tmp_path):
    from openrlhf.utils.logging_utils import TensorboardLogger
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    args = SimpleNamespace(
        logger=SimpleNamespace(tensorboard_dir=str(tmp_path), wandb=SimpleNamespace(run_name="run"))
    )
    for done, steps in (
        (0, [1, 2, 3, 4]),
        (2, [3, 4, 5]),
    ):  # killed after step 4, resumed at step 2
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


def test_a_name_becomes_real_when_it_is_used_and_in_the_process_that_it_is_sent_to(
    tmp_path, monkeypatch
):
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
    assert (
        subprocess.run(command, input=sent, cwd=tmp_path, capture_output=True, check=True).stdout
        == b"75\n"
    )
    engine = light.Engine(90)
    assert type(engine) is sys.modules["deferred_heavy.parts"].Engine
    assert (engine.power, light.Part.wheels, light.parts.Engine.wheels) == (90, 4, 4)


@pytest.mark.parametrize(
    ("block", "imported", "heavy"),
    [
        (
            "upstream.imports_for_driver()",
            "trainer, openrlhf_dbb.actors.policy_actor",
            "deepspeed vllm torch._dynamo",
        ),
        ("worker()", "policy_actor", "datasets scipy torch._inductor.lowering vllm"),
        (
            "worker()",
            "vllm_actor, openrlhf_dbb.platform.cpu_engine",
            "pandas scipy torch._inductor.lowering",
        ),
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
    shown = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert shown.stdout.splitlines()[-1] == "[]"

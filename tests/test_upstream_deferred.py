"""Imports that leave out a module which is only named, on small packages made here; then the driver's own imports."""

import importlib
import os
import pickle
import subprocess
import sys

import pytest

from openrlhf_dbb.platform import cpu
from openrlhf_dbb.upstream.deferred import deferring

FILES = {
    "deferred_heavy/__init__.py": "VERSION = '1.2'",
    "deferred_heavy/parts.py": """
class Engine:
    wheels = 4

    def __init__(self, power):
        self.power = power

def describe(engine):
    return f"{engine.power} kW"
""",
    "deferred_light.py": """
import deferred_heavy
import deferred_heavy.parts as parts
from deferred_heavy.parts import Engine, describe

def started(engine: Engine) -> str:
    return describe(engine)
""",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of the packages; they can be imported in this process until the test ends."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("deferred_")]:
        del sys.modules[name]


@pytest.fixture
def light(folder):
    """A module that names parts of the heavy package, imported without it."""
    with deferring("deferred_heavy"):
        return importlib.import_module("deferred_light")


def imported():
    return [name for name in ("deferred_heavy", "deferred_heavy.parts") if name in sys.modules]


def test_a_name_becomes_real_when_it_is_called(light):
    assert imported() == []
    engine = light.Engine(90)
    assert imported() == ["deferred_heavy", "deferred_heavy.parts"]
    assert type(engine) is sys.modules["deferred_heavy.parts"].Engine
    assert light.started(engine) == "90 kW"
    assert light.Engine.wheels == light.parts.Engine.wheels == 4
    heavy = importlib.import_module("deferred_heavy")  # after the block it is the real one
    assert heavy.VERSION == "1.2" and heavy.__file__.endswith("deferred_heavy/__init__.py")


def test_a_stand_in_arrives_in_another_process_as_the_real_thing(light, folder):
    sent = pickle.dumps([light.Engine, light.parts, light.describe])
    assert imported() == []
    code = """
import pickle, sys
engine, parts, describe = pickle.load(sys.stdin.buffer)
assert engine is parts.Engine and type(engine) is type
print(describe(engine(75)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], input=sent, cwd=folder, capture_output=True, check=True, timeout=60
    )
    assert done.stdout == b"75 kW\n"


@pytest.mark.skipif(not cpu.active(), reason="prepares a driver without CUDA")
def test_the_driver_imports_its_classes_without_deepspeed_and_vllm():
    pytest.importorskip("openrlhf")
    code = """
import sys
from openrlhf_dbb import upstream
from openrlhf_dbb.platform import cpu
cpu.prepare_driver()
with upstream.imports_for_driver():
    import openrlhf_dbb.actors.trainer, openrlhf_dbb.actors.policy_actor
heavy = ("deepspeed", "vllm", "torch._dynamo")
print([name for name in sys.modules if name.startswith(heavy)])
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    shown = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert shown.stdout == "[]\n"

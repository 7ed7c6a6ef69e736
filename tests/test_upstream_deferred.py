"""Imports that leave out what a module only names, on small packages made here; then the driver's own imports."""

import importlib
import itertools
import os
import pickle
import subprocess
import sys
import threading

import pytest

from openrlhf_dbb.platform import cpu
from openrlhf_dbb.upstream.deferred import deferring

FILES = {
    "deferred_heavy/__init__.py": "VERSION = __version__ = '1.2'",
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

def make(power):
    return Engine(power)

def is_engine(thing):
    return isinstance(thing, Engine)

def version():
    return deferred_heavy.__version__
""",
    "deferred_subclass.py": """
from deferred_heavy.parts import Engine

class Diesel(Engine):
    pass
""",
}
HEAVY = ("deferred_heavy", "deferred_heavy.parts")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where the packages are; importable in this process until the test ends."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("deferred_")]:
        del sys.modules[name]


@pytest.fixture
def light(folder):
    """A module that names what is in the heavy package, imported without it."""
    with deferring("deferred_heavy"):
        return importlib.import_module("deferred_light")


def imported():
    return [name for name in HEAVY if name in sys.modules]


def test_what_is_only_named_is_not_imported(light):
    assert light.started.__annotations__["engine"] is light.Engine
    assert imported() == []


def test_a_name_becomes_real_when_it_is_called(light):
    engine = light.make(90)
    assert imported() == ["deferred_heavy", "deferred_heavy.parts"]
    assert type(engine) is sys.modules["deferred_heavy.parts"].Engine
    assert light.started(engine) == "90 kW"


def test_attributes_are_the_real_ones(light):
    assert light.Engine.wheels == 4
    assert light.parts.Engine.wheels == 4
    with pytest.raises(AttributeError, match="doors"):
        _ = light.Engine.doors


def test_a_version_is_the_real_one(light):
    assert light.version() == "1.2"
    assert imported() == ["deferred_heavy"]


def test_isinstance_asks_the_real_class(light):
    engine = light.make(90)
    assert light.is_engine(engine) and not light.is_engine(90)


def test_a_base_class_is_imported_within_the_block(folder):
    with deferring("deferred_heavy"):
        subclass = importlib.import_module("deferred_subclass")
    real = sys.modules["deferred_heavy.parts"].Engine
    assert subclass.Diesel.__mro__[1] is real
    assert subclass.Diesel(60).power == 60


def test_an_import_after_the_block_is_a_real_one(light):
    heavy = importlib.import_module("deferred_heavy")
    assert heavy.VERSION == "1.2" and heavy.__file__.endswith("deferred_heavy/__init__.py")


def test_an_import_after_a_block_that_failed_is_a_real_one(folder):
    with pytest.raises(ZeroDivisionError), deferring("deferred_heavy"):
        importlib.import_module("deferred_light")
        _ = 1 / 0
    assert importlib.import_module("deferred_heavy").VERSION == "1.2"


def test_a_package_that_was_imported_before_is_not_touched(folder):
    heavy = importlib.import_module("deferred_heavy")
    with deferring("deferred_heavy"):
        light = importlib.import_module("deferred_light")
    assert light.deferred_heavy is heavy is sys.modules["deferred_heavy"]
    assert type(light.Engine) is type  # the class itself


def test_another_thread_may_import_meanwhile(folder):
    ended = threading.Event()

    def keep_importing():
        for number in itertools.cycle(range(1000)):
            if ended.is_set():
                return
            sys.modules[f"deferred_other_{number}"] = sys
            sys.modules.pop(f"deferred_other_{(number + 500) % 1000}", None)

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=keep_importing)
    thread.start()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(200):
            with deferring("deferred_heavy"):
                pass
    finally:
        sys.setswitchinterval(interval)
        ended.set()
        thread.join()


def test_other_packages_of_a_similar_name_are_imported(folder):
    with deferring("deferred"):
        light = importlib.import_module("deferred_light")
    assert light.Engine.__module__ == "deferred_heavy.parts" and type(light.Engine) is type


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


def run(code):
    """What a new process prints."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=120
    ).stdout


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
    assert run(code) == "[]\n"

"""Imports that leave out a module which is only named, on small packages made here; then the driver's own imports."""

import importlib
import os
import pickle
import subprocess
import sys

import pytest

from openrlhf_dbb.platform import cpu
from openrlhf_dbb.upstream.deferred import deferring

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
    with deferring("deferred_heavy"):
        light = importlib.import_module("deferred_light")
    sent = pickle.dumps([light.package, light.Engine, light.parts, light.Part])
    assert "deferred_heavy" not in sys.modules
    command = [sys.executable, "-c", RECEIVER]
    assert subprocess.run(command, input=sent, cwd=tmp_path, capture_output=True, check=True).stdout == b"75\n"
    engine = light.Engine(90)
    assert type(engine) is sys.modules["deferred_heavy.parts"].Engine
    assert (engine.power, light.Part.wheels, light.parts.Engine.wheels) == (90, 4, 4)


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

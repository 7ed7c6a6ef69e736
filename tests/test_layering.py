"""estimators and storage stay usable beside any trainer: in a fresh process they load nothing heavy."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "ray", "openrlhf", "openrlhf_dbb", "vllm", "transformers", "deepspeed")


def _loaded(imports):
    code = f"import {imports}, sys; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()


@pytest.mark.parametrize(
    ("imports", "own", "absent"),
    [
        ("storage, estimators", {"storage", "estimators", "numpy", "sqlalchemy"}, (*HEAVY, "scipy")),
        ("estimators", {"estimators", "numpy"}, (*HEAVY, "storage", "sqlalchemy")),
        # the driver of a database that is not used is not needed, nor what only a migration uses
        ("storage", {"storage", "numpy", "sqlalchemy"}, (*HEAVY, "estimators", "psycopg", "alembic")),
        # what decides about rollouts and counts them
        ("openrlhf_dbb.core.strategies", {"openrlhf_dbb", "numpy"}, ("torch", "ray", "openrlhf", "vllm", "storage")),
        ("openrlhf_dbb.core.usage, openrlhf_dbb.core.posteriors", {"storage"}, ("torch", "ray", "openrlhf", "vllm")),
        ("openrlhf_dbb.methods", {"openrlhf_dbb"}, ("torch", "ray", "openrlhf", "vllm")),
        (
            "openrlhf_dbb.core.replay.cache, openrlhf_dbb.core.replay.normalization",
            {"openrlhf_dbb", "numpy"},
            ("torch", "ray", "openrlhf", "vllm"),
        ),
        ("openrlhf_dbb", {"openrlhf_dbb"}, ("torch", "ray", "openrlhf", "vllm")),
        # scipy comes with the report's credible intervals
        ("openrlhf_dbb.cli.posteriors", {"openrlhf_dbb", "storage"}, ("torch", "ray", "openrlhf", "vllm", "scipy")),
        # comparing evaluations needs no training stack
        ("openrlhf_dbb.cli.evaluate", {"openrlhf_dbb"}, ("torch", "ray", "openrlhf", "vllm", "pyarrow", "scipy")),
        # matplotlib comes with the first figure
        ("openrlhf_dbb.cli.lab", {"openrlhf_dbb", "storage"}, ("torch", "ray", "openrlhf", "vllm", "matplotlib")),
    ],
)
def test_a_fresh_process_loads_only_what_the_package_needs(imports, own, absent):
    loaded = set(_loaded(imports))
    assert own <= loaded
    assert loaded.isdisjoint(absent)

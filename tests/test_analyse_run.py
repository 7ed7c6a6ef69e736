"""The pandas example, on a store whose numbers are known."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from openrlhf_dbb.storage import ProbeRows

pytest.importorskip("pandas", reason="the example needs pandas")
EXAMPLE = Path(__file__).parents[1] / "examples" / "analyse_run.py"


def test_the_pandas_example(store, fill, tmp_path):
    run = fill.run(store)
    ids = fill.prompts(store, 2)
    fill.step(run, 1, ids, [4, 1])  # (4.5, 0.5), (1.5, 3.5)
    probes = ProbeRows(ids[:1], np.array([4]), np.array([4.0]), np.array([4.0]))
    fill.step(run, 2, ids, [4, 4], probes=probes)  # (6.25, 0.25), (4.75, 1.75)
    done = subprocess.run(
        [sys.executable, EXAMPLE], cwd=tmp_path, capture_output=True, text=True,
        env=os.environ | {"OPENRLHF_DBB_STORE_URL": store.url, "MPLBACKEND": "agg"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    parts = {part.partition("\n")[0]: part.splitlines()[1:] for part in done.stdout.split("\n\n")}
    assert "run run: dbb, tiny, 4 visits of 2 prompts" in parts
    # means (0.9 + 0.3) / 2 and (0.9615 + 0.7308) / 2; zero-variance groups 1 of 2, then 2 of 2
    assert [line.split() for line in parts["by epoch"][2:]] == [
        ["1", "2", "0.625", "0.600", "0.5"],
        ["2", "2", "1.000", "0.846", "1.0"],
    ]
    assert [line.split()[1:4] for line in parts["most improved"][2:]] == [
        ["0.3", "0.731", "0.431"], ["0.9", "0.962", "0.062"],
    ]  # fmt: skip
    assert [line.split()[-3:] for line in parts["forecast of the next visit"][2:]] == [
        ["1", "0.3", "1.0"], ["1", "0.9", "1.0"],
    ]  # fmt: skip
    assert f"mean squared error against 1 probes: {(1 - 6.25 / 6.5) ** 2:.4f}" in done.stdout

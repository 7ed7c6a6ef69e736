"""The pandas example, on a store whose numbers are known."""

import runpy
from pathlib import Path

import pytest

pytest.importorskip("pandas", reason="the example needs pandas")
EXAMPLE = Path(__file__).parents[1] / "examples" / "analyse_run.py"


def test_the_pandas_example(store, fill, tmp_path, monkeypatch, capsys):
    run, ids = fill.run(store), fill.prompts(store, 2)
    fill.step(run, 1, ids, [4, 1])  # (4.5, 0.5), (1.5, 3.5)
    fill.step(run, 2, ids, [4, 4], probes=fill.probes(ids[:1], [4], [4]))  # (6.25, 0.25), (4.75, 1.75)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENRLHF_DBB_STORE_URL", store.url)
    monkeypatch.setenv("MPLBACKEND", "agg")
    runpy.run_path(str(EXAMPLE))
    out = capsys.readouterr().out
    parts = {part.partition("\n")[0]: [line.split() for line in part.splitlines()[1:]] for part in out.split("\n\n")}
    assert "run run: dbb, tiny, 4 visits of 2 prompts" in parts
    # means (0.9 + 0.3) / 2 and (0.9615 + 0.7308) / 2; zero-variance groups 1 of 2, then 2 of 2
    assert parts["by epoch"][2:] == [["1", "2", "0.625", "0.600", "0.5"], ["2", "2", "1.000", "0.846", "1.0"]]
    improved = [line[1:4] for line in parts["most improved"][2:]]
    assert improved == [["0.3", "0.731", "0.431"], ["0.9", "0.962", "0.062"]]
    forecasts = [line[-3:] for line in parts["forecast of the next visit"][2:]]
    assert forecasts == [["1", "0.3", "1.0"], ["1", "0.9", "1.0"]]
    assert f"mean squared error against 1 probes: {(1 - 6.25 / 6.5) ** 2:.4f}" in out

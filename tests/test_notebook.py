"""The notebook, and the page "In a notebook", in a real Jupyter kernel."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("nbclient", reason="needs Jupyter's kernel, a test tool")

import nbformat
from nbclient import NotebookClient
from trainings import rows

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
CHECK = """
import json
truth, _ = models["slow"]
noise = 1000 * np.mean(truth[1:] * (1 - truth[1:])) / ROLLOUTS
print(json.dumps({"errors": errors.to_dict(), "noise": noise, "groups": groups.to_dict()}))
"""


def execute(sources, folder):
    """Run cells in a new kernel that works in a folder; return what each printed or showed: type -> text."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    NotebookClient(notebook, resources={"metadata": {"path": folder}}).execute()
    return [shown(cell) for cell in notebook.cells]


def shown(cell):
    return {
        name: text for output in cell.outputs for name, text in output.get("data", {"text": output.get("text")}).items()
    }


@pytest.fixture(scope="module")
def twice(tmp_path_factory):
    """The cells of the notebook, and their outputs after each has run a second time."""
    notebook = nbformat.read(EXAMPLES / "posteriors.ipynb", as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    sources = [source for cell in cells for source in [cell.source] * 2]
    return cells, execute([*sources, CHECK], tmp_path_factory.mktemp("notebook"))


def test_the_notebook_gives_its_saved_outputs_also_when_cells_run_again(twice):
    cells, outputs = twice
    for cell, first, again in zip(cells, outputs[:-1:2], outputs[1::2], strict=True):
        for kind in ("text", "text/plain"):
            assert shown(cell).get(kind) == first.get(kind) == again.get(kind)
    assert "image/png" in outputs[4]


def test_what_the_notebook_says_of_the_estimators_is_so(twice):
    *_, printed = twice[1]
    result = json.loads(printed["text"])
    slow, fast = result["errors"]["slow, later"], result["errors"]["fast, later"]
    assert slow["point"] == pytest.approx(result["noise"], rel=0.05)  # p (1 - p) / N, the variance of a group's mean
    assert max(slow["dbb"], slow["auto"]) < slow["point"] / 2
    assert fast["auto"] < fast["point"] < fast["dbb"]
    groups = result["groups"]
    equal = groups["all_wrong"]["dbb"] + groups["all_right"]["dbb"]
    assert groups["rescued"] == {"point": 0, "dbb": equal, "auto": equal}


@pytest.mark.e2e
def test_the_cells_of_the_page_train_and_show_a_run(tmp_path, monkeypatch):
    pytest.importorskip("trl", reason="needs TRL")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    _, *cells = re.findall(r"```python\n(.*?)```", (ROOT / "docs/notebook.md").read_text(), flags=re.DOTALL)
    *_, looked = execute(["import sys; sys.modules['vllm'] = None  # as where it is not installed", *cells], tmp_path)
    assert "first.html" in looked["text/html"] and (tmp_path / "first.html").read_text().startswith("<!DOCTYPE html>")
    runs = rows(tmp_path, "SELECT name, estimator, status, last_step FROM dbb_run", "runs.db")
    assert runs == [("first", "auto", "finished", 16)]
    assert rows(tmp_path, "SELECT count(inclusion) FROM posterior_history", "runs.db") == [(16 * 8,)]

"""README.md, the tutorial, the notebooks and examples/ run as they stand there, and their texts are true."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from trainings import rows

from openrlhf_dbb import storage

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
README = (ROOT / "README.md").read_text(encoding="utf-8")


def code(page: str, language: str) -> list[str]:
    """The code of a page's blocks in one language."""
    return re.findall(rf"```{language}\n(.*?)```", page, flags=re.DOTALL)


# ---- README


def anchors(page: Path) -> set[str]:
    """The anchors of a Markdown page's headings, as code hosts make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_of_the_readme_leads_to_a_file_and_a_heading():
    links = re.findall(r"\]\(([^)]+)\)", README) + re.findall(r'(?:src|srcset)="([^"]+)"', README)
    assert len(links) > 10
    for link in links:
        name, _, anchor = link.partition("#")
        target = ROOT / (name or "README.md")
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def tables(page: Path) -> list[list[str]]:
    """The tables of a Markdown page, as their lines; a row that a blank line cuts off is a table of its own."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    blocks = re.findall(r"(?:^ *\|.*\n)+", text, flags=re.MULTILINE)
    return [block.splitlines() for block in blocks]


def pages_with_tables() -> list[Path]:
    pages = {*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("study/**/*.md")}
    return sorted(page for page in pages if tables(page))


def number_of_cells(line: str) -> int:
    return len(re.split(r"(?<!\\)\|", line.strip()))


@pytest.mark.parametrize("page", pages_with_tables(), ids=lambda page: str(page.relative_to(ROOT)))
def test_each_table_of_a_page_is_whole(page):
    for lines in tables(page):
        assert len(lines) > 2, lines
        assert re.fullmatch(r"[\s|:-]+", lines[1]), lines[:2]
        head = number_of_cells(lines[0])
        assert {number_of_cells(line) for line in lines} == {head}, lines[0]


def test_the_loop_of_the_readme_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    [source] = [block for block in code(README, "python") if "Posteriors.cr" in block]
    exec(source, {})
    assert len(capsys.readouterr().out.strip("[]\n").split()) == 8
    with storage.open_store("sqlite:///runs.db", create=False) as store:
        history = storage.read_log(store, store.find_run("my-loop"))
    assert (list(history.rollouts), sorted(history.successes)) == ([4, 4], [0, 2])


def test_the_loop_of_the_page_about_ones_own_loop_runs(tmp_path, monkeypatch):
    """Two first rollouts, then six where these differ: every second answer to an even row is right."""
    monkeypatch.chdir(tmp_path)
    [source] = [
        block
        for block in code((ROOT / "docs/posteriors.md").read_text(), "python")
        if "Loop(" in block
    ]
    trained = []

    def sample(prompt, count):
        return ["right" if sampled % 2 else prompt for sampled in range(count)]

    def verify(text, label):
        return float(text == "right" and int(label) % 2 == 0)

    names = {
        "prompts": [f"prompt {row}" for row in range(128)],
        "labels": [str(row) for row in range(128)],
        "sample": sample,
        "verify": verify,
        "train": lambda rollouts, advantages: trained.append((len(rollouts), len(advantages))),
    }
    exec(source, names)
    # A step passes over as many odd rows as it trains on even ones: 64 x 8 + 64 x 2 rollouts.
    assert len(trained) == 10_000 // (64 * 8 + 64 * 2) and set(trained) == {(512, 512)}
    assert sorted(int(folder.name) for folder in tmp_path.glob("checkpoints/*")) == list(
        range(1, 16)
    )
    with storage.open_store("sqlite:///runs.db", create=False) as store:
        assert store.query("SELECT name, status, last_step FROM runs") == [
            ("my-run", "finished", 15)
        ]


# ---- examples/


def test_grpo_dbb_trains_for_two_steps(tmp_path):
    done = subprocess.run(
        [sys.executable, EXAMPLES / "grpo_dbb.py", "--steps", "2"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, *steps, look, last = done.stdout.splitlines()
    assert first.startswith("held-out accuracy before:")
    assert last.startswith("held-out accuracy after:")
    assert look.endswith("serve --store.url sqlite:///grpo_dbb.db")
    rewards = [float(re.search(r"reward (\d\.\d+)", line)[1]) for line in steps]
    assert len(rewards) == 2
    # The supervised warm start leaves some prompts solved and some unsolved.
    assert min(rewards) > 0.1
    assert max(rewards) < 0.9
    with storage.open_store(f"sqlite:///{tmp_path}/grpo_dbb.db", create=False) as store:
        runs = store.query("SELECT name, status, last_step FROM runs")
        steps = store.query("SELECT generated, trained FROM steps ORDER BY step")
    assert runs == [("grpo-dbb", "finished", 2)]
    assert steps == [(512, 512), (512, 512)]


def test_grpo_dbb_imports_no_training_framework():
    code = (EXAMPLES / "grpo_dbb.py").read_text()
    imports = re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE)
    assert not {"ray", "openrlhf", "vllm", "deepspeed"} & set(imports)


def test_the_pandas_example_runs_on_a_run_worked_out_by_hand(
    store, fill, tmp_path, monkeypatch, capsys
):
    pytest.importorskip("pandas", reason="the example needs pandas")
    run = fill.run(store)
    ids = fill.prompts(store, 2)
    fill.step(run, 1, ids, [4, 1])  # (4.5, 0.5), (1.5, 3.5)
    # (6.25, 0.25), (4.75, 1.75)
    fill.step(run, 2, ids, [4, 4], probes=fill.probes(ids[:1], [4], [4]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENRLHF_DBB_STORE_URL", store.url)
    monkeypatch.setenv("MPLBACKEND", "agg")
    runpy.run_path(str(EXAMPLES / "analyse_run.py"))
    out = capsys.readouterr().out
    parts = {
        part.partition("\n")[0]: [line.split() for line in part.splitlines()[1:]]
        for part in out.split("\n\n")
    }
    assert "run run: dbb, tiny, 4 visits of 2 prompts" in parts
    # means (0.9 + 0.3) / 2 and (0.9615 + 0.7308) / 2; zero-variance groups 1 of 2, then 2 of 2
    assert parts["by epoch"][2:] == [
        ["1", "2", "0.625", "0.600", "0.5"],
        ["2", "2", "1.000", "0.846", "1.0"],
    ]
    improved = [line[1:4] for line in parts["most improved"][2:]]
    assert improved == [["0.3", "0.731", "0.431"], ["0.9", "0.962", "0.062"]]
    forecasts = [line[-3:] for line in parts["forecast of the next visit"][2:]]
    assert forecasts == [["1", "0.3", "1.0"], ["1", "0.9", "1.0"]]
    assert f"mean squared error against 1 probes: {(1 - 6.25 / 6.5) ** 2:.4f}" in out


# ---- the tutorial


@pytest.mark.e2e
def test_the_commands_of_the_tutorial_run_in_their_order(tmp_path, monkeypatch):
    """With 4 questions of each file: one step instead of 32."""
    monkeypatch.delenv("OPENRLHF_DBB_STORE_URL", raising=False)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    shutil.copytree(EXAMPLES / "tutorial", tmp_path / "examples/tutorial")
    settings = tmp_path / "examples/tutorial/largest.toml"
    few = {
        "data.max_samples": 4, "train.num_episodes": 1, "rollout.batch_size": 4, "rollout.n_samples_per_prompt": 4,
        "train.batch_size": 16, "rollout.micro_batch_size": 16, "train.micro_batch_size": 16, "eval.steps": 1,
    }  # fmt: skip
    settings.write_text(
        settings.read_text() + "".join(f"{flag} = {value}\n" for flag, value in few.items())
    )
    commands = "".join(code((ROOT / "docs/tutorial.md").read_text(), "bash"))
    done = subprocess.run(
        ["bash", "-ec", commands], cwd=tmp_path, text=True, capture_output=True, timeout=1800
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "1.0  93." in done.stdout
    assert "dry run: all checks passed" in done.stdout
    assert re.search(
        r"^(no difference shown|the second is (higher|lower))$", done.stdout, re.MULTILINE
    )
    assert (tmp_path / "grpo.html").read_text().startswith("<!DOCTYPE html>")
    with storage.open_store(f"sqlite:///{tmp_path}/openrlhf_dbb.db") as store:
        runs = store.query("SELECT name, estimator, status, last_step FROM runs ORDER BY run_id")
        evaluated = store.query(
            "SELECT run_id, step, prompts, samples FROM evaluations ORDER BY 1, 2"
        )
    assert [tuple(run) for run in runs] == [
        ("grpo", "point", "finished", 1),
        ("dbb", "dbb", "finished", 1),
    ]
    assert [tuple(row) for row in evaluated] == [
        (run, step, 4, 4) for run in (1, 2) for step in (0, 1)
    ]


# ---- notebooks, in a real Jupyter kernel

CHECK = """
import json
truth, _ = models["slow"]
noise = 1000 * np.mean(truth[1:] * (1 - truth[1:])) / ROLLOUTS
tables = {"errors": errors.to_dict(), "groups": groups.to_dict(), "mse": mse.to_dict("records")}
print(json.dumps({"noise": noise, **tables}))
"""


def execute(sources, folder):
    """Run cells in a new kernel that works in a folder; return what each printed or showed: type -> text."""
    import nbclient
    import nbformat

    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(source) for source in sources]
    )
    nbclient.NotebookClient(notebook, resources={"metadata": {"path": folder}}).execute()
    return [shown(cell) for cell in notebook.cells]


def shown(cell):
    parts = [output.get("data", {"text": output.get("text")}) for output in cell.outputs]
    return {name: text for part in parts for name, text in part.items()}


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    """The code cells of the notebook, what each gave when it ran twice in a row, and the numbers of its end."""
    pytest.importorskip("nbclient", reason="needs Jupyter's kernel, a test tool")
    import nbformat

    cells = nbformat.read(EXAMPLES / "posteriors.ipynb", as_version=4).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    sources = []
    for cell in code:
        sources += [cell.source, cell.source]
    *outputs, printed = execute([*sources, CHECK], tmp_path_factory.mktemp("notebook"))
    return code, outputs, json.loads(printed["text"])


@pytest.mark.slow
def test_the_notebook_gives_its_saved_outputs_also_when_cells_run_again(notebook):
    cells, outputs, _ = notebook
    for cell, first, again in zip(cells, outputs[::2], outputs[1::2], strict=True):
        for kind in ("text", "text/plain"):
            assert shown(cell).get(kind) == first.get(kind) == again.get(kind)
    assert "image/png" in outputs[4]


@pytest.mark.slow
def test_what_the_notebook_says_about_errors_of_means_is_so(notebook):
    _, _, result = notebook
    slow = result["errors"]["slow, later"]
    fast = result["errors"]["fast, later"]
    # P (1 - p) / N, the variance of a group's mean
    assert slow["point"] == pytest.approx(result["noise"], rel=0.05)
    assert max(slow["dbb"], slow["auto"]) < slow["point"] / 2
    assert fast["auto"] < fast["point"] < fast["dbb"]


@pytest.mark.slow
def test_what_the_notebook_says_about_discounts_is_so(notebook):
    _, _, result = notebook
    mse = {}
    for row in result["mse"]:
        assert row["simulation"] == pytest.approx(row["formula"], rel=0.05)
        mse[row["drift"], row["discount"], row["rollouts"]] = row
    assert best_discount(result["mse"], "slow") == 0.7
    assert best_discount(result["mse"], "fast") == 0.3
    assert 1.8 < mse["fast", 0.75, 4]["formula"] / mse["fast", 0.75, 4]["point"] < 2
    for rollouts, is_better in (
        (1, True),
        (2, True),
        (4, True),
        (8, True),
        (16, True),
        (32, False),
    ):
        row = mse["slow", 0.75, rollouts]
        assert (row["formula"] < row["point"]) == is_better


def best_discount(table, drift):
    of_drift = [row for row in table if row["drift"] == drift and row["rollouts"] == 4]
    return min(of_drift, key=lambda row: row["formula"])["discount"]


@pytest.mark.slow
def test_what_the_notebook_says_about_rescued_groups_is_so(notebook):
    _, _, result = notebook
    groups = result["groups"]
    equal = groups["all_wrong"]["dbb"] + groups["all_right"]["dbb"]
    assert groups["rescued"] == {"point": 0, "dbb": equal, "auto": equal}


@pytest.mark.e2e
def test_the_cells_of_the_notebook_of_trl_train_and_show_a_run(tmp_path, monkeypatch):
    pytest.importorskip("nbclient", reason="needs Jupyter's kernel, a test tool")
    pytest.importorskip("trl", reason="needs TRL")
    import nbformat

    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    sources = [
        cell.source
        for cell in nbformat.read(EXAMPLES / "trl.ipynb", as_version=4).cells
        if cell.cell_type == "code"
    ]
    cells = [source for source in sources if not source.startswith("%pip")]
    *_, looked = execute(
        ["import sys; sys.modules['vllm'] = None  # as where it is not installed", *cells], tmp_path
    )
    assert "first.html" in looked["text/html"] and (tmp_path / "first.html").read_text().startswith(
        "<!DOCTYPE html>"
    )
    runs = rows(tmp_path, "SELECT name, estimator, status, last_step FROM dbb_run", "runs.db")
    assert runs == [("first", "auto", "finished", 16)]
    assert rows(tmp_path, "SELECT count(inclusion) FROM posterior_history", "runs.db") == [
        (16 * 8,)
    ]

"""python -m study reproduce: what is listed, which runs are missing, and the tables."""

from pathlib import Path

import pytest

from study.__main__ import main

RESULTS = Path(__file__).parents[1] / "study" / "results"
STUDY = str(RESULTS / "main")


def command(capsys, *argv):
    """Exit code, output and errors of ``python -m study reproduce``."""
    code = main(["reproduce", *argv])
    return code, *capsys.readouterr()


def test_the_list_has_every_claim_with_what_was_found(capsys):
    code, printed, _ = command(capsys, "list", "--known", STUDY)
    assert code == 0
    # 8 paired seeds of the study, +0.55 (+0.15 to +0.96) at N = 2, but the verdict is that of N = 8.
    assert "dr-grpo                         tiny: no difference shown; gpu: not run\n" in printed
    assert "DBB helps Dr.GRPO as well (Table 3, section 5.4)" in printed


def test_runs_whose_rows_are_known_are_not_made_again(capsys):
    code, printed, _ = command(capsys, "run", "dr-grpo", "clip-fraction", "--dry_run", "--seeds", "1", "--known", STUDY)
    assert code == 0
    assert printed.splitlines() == [
        "sweep-n2-grpo-s11", "sweep-n2-dbb-standard-s11", "sweep-n8-grpo-s11", "sweep-n8-dbb-standard-s11",
    ]  # fmt: skip
    _, printed, _ = command(capsys, "run", "dr-grpo", "--dry_run", "--seeds", "1", "--known")
    assert printed.splitlines()[0] == "n2-dr_grpo-s1"
    assert command(capsys, "run", "dr-grpo", "--known", STUDY)[:2] == (
        0,
        "no run is missing; python -m study reproduce report writes what was found\n",
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["run", "dr-gpo"], "study: the paper's claims have no 'dr-gpo'; python -m study reproduce list shows the"),
        (["run", "all", "--seeds", "0"], "study: --seeds 0: give a number above 0"),
        (["run", "all", "--hours", "-1"], "study: --hours -1: give a number above 0"),
        (["list", "--known", "/nowhere"], "study: --known /nowhere: no runs.csv there; name a folder that reproduce"),
        (["report", "--known"], "study: --output paper-runs holds no runs, and no folder with rows of earlier ones is"),
    ],
)
def test_wrong_requests_end_in_one_line(capsys, tmp_path, monkeypatch, argv, message):
    monkeypatch.chdir(tmp_path)
    code, _, errors = command(capsys, *argv)
    assert (code, errors.count("\n")) == (2, 1)
    assert errors.startswith(message)


def test_the_tables_are_written(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, printed, _ = command(capsys, "report", "--into", str(tmp_path / "paper"), "--known", STUDY)
    path = tmp_path / "paper" / "tables.md"
    assert (code, printed.splitlines()[-1]) == (0, str(path))
    text = path.read_text()
    assert "- At the paper's scale, of 36 claims: 36 not run." in text
    assert "| DBB helps Dr.GRPO as well (`dr-grpo`) | Table 3, section 5.4: +1.96 (1.7B) points | +0.14 (" in text
    assert "| `dr-grpo` | n2 | +0.55 (+0.15 to +0.96) points | 8 | reproduced |" in text


def test_the_committed_tables_are_those_of_the_committed_rows(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command(capsys, "report", "--into", str(tmp_path), "--known", str(RESULTS / "main"), str(RESULTS / "paper"))
    assert (tmp_path / "tables.md").read_text() == (RESULTS / "paper" / "tables.md").read_text()

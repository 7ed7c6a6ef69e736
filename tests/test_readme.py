"""What README.md says is true: its links, its table, its picture's data, its own-loop example."""

import csv
import re
import runpy
import sys
from pathlib import Path

import pytest

import storage
from openrlhf_dbb.study import analysis
from openrlhf_dbb.study.files import load

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def anchors(page: Path) -> set[str]:
    """The anchors of a Markdown page's headings, as code hosts make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_leads_to_a_file_and_a_heading():
    links = re.findall(r"\]\(([^)]+)\)", README) + re.findall(r'(?:src|srcset)="([^"]+)"', README)
    assert len(links) > 30
    for link in links:
        name, _, anchor = link.partition("#")
        target = ROOT / (name or "README.md")
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize(
    ("row", "experiment", "seeds"),
    [
        ("2, 4 passes (primary)", "n2", range(1, 9)),
        ("2, 16 passes", "long-n2", range(1, 9)),
        ("2, 16 passes, added seeds", "long-n2", range(4, 9)),
        ("4, 4 passes", "n4", range(1, 4)),
        ("8, 4 passes", "n8", range(1, 4)),
        ("8, hard start", "hard", range(1, 4)),
    ],
)
def test_the_table_has_the_numbers_of_the_study(row, experiment, seeds):
    study = load(ROOT / "docs/study").of_seeds(set(seeds))
    tested = analysis.contrasts(study, experiment, "accuracy")
    cells = [row, str(len(seeds))]
    for arm in ("dbb", "auto"):
        test, corrected = tested[arm, "grpo"]
        mean, low, high = (f"{100 * value:+.2f}" for value in (test.mean, test.low, test.high))
        cells += [f"{mean} ({low} to {high})", f"{corrected:.2g}"]
    verdict = README.split("| " + " | ".join(cells) + " | ")[1].split(" |")[0]
    better = [f"`{arm}` better" for arm in ("dbb", "auto") if tested[arm, "grpo"][1] < 0.05]
    assert verdict == ["no difference shown", "".join(better), "both better, but see below"][len(better)]


def test_the_loop_in_the_readme_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    [source] = [code for code in re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL) if "Posteriors" in code]
    exec(source, {})
    assert re.findall(r"^\d", capsys.readouterr().out, flags=re.MULTILINE) == ["1", "2", "3"]
    with storage.open_store("sqlite:///runs.db", create=False) as store:
        run = store.find_run("my-loop")
        history = storage.read_posteriors(store, run)
    assert list(history.rollouts) == [8] * 6  # two prompts in three steps


def test_the_picture_shows_posteriors_of_discount_one_half():
    with (ROOT / "scripts/readme_posterior.csv").open(encoding="utf-8") as file:
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    alpha = beta = 1.0
    for row in rows:
        alpha = 0.5 * alpha + row["successes"]
        beta = 0.5 * beta + row["rollouts"] - row["successes"]
        assert (row["alpha"], row["beta"]) == pytest.approx((alpha, beta))


def test_the_picture_can_be_drawn_again(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(sys, "argv", ["draw_readme.py", "--output", str(tmp_path)])
    runpy.run_path(str(ROOT / "scripts/draw_readme.py"), run_name="__main__")
    # The size of a PNG stands in bytes 16 to 23: 10 x 5.6 inches at 160 dots.
    for name in ("readme.png", "readme-dark.png"):
        picture = (tmp_path / name).read_bytes()
        assert (int.from_bytes(picture[16:20], "big"), int.from_bytes(picture[20:24], "big")) == (1600, 896)

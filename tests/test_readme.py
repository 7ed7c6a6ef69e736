"""README.md: its links, its loop and its picture."""

import re
import runpy
import sys
from pathlib import Path

import pytest

from openrlhf_dbb import storage

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def anchors(page: Path) -> set[str]:
    """The anchors of a Markdown page's headings, as code hosts make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_leads_to_a_file_and_a_heading():
    links = re.findall(r"\]\(([^)]+)\)", README) + re.findall(r'(?:src|srcset)="([^"]+)"', README)
    assert len(links) > 10
    for link in links:
        name, _, anchor = link.partition("#")
        target = ROOT / (name or "README.md")
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_it_begins_with_two_commands_of_which_continuous_integration_runs_the_second():
    first = re.search(r"```bash\n(.*?)```", README, flags=re.DOTALL)[1]
    trains, tests = (line.partition("#")[0].strip() for line in first.splitlines())
    assert trains == "bash scripts/quickstart.sh"
    assert (ROOT / ".ci/run").read_text().splitlines()[-1] == f"exec {tests}"


def test_the_loop_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    [source] = [code for code in re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL) if "Posteriors.cr" in code]
    exec(source, {})
    assert len(capsys.readouterr().out.strip("[]\n").split()) == 8
    with storage.open_store("sqlite:///runs.db", create=False) as store:
        history = storage.read_log(store, store.find_run("my-loop"))
    assert (list(history.rollouts), sorted(history.successes)) == ([4, 4], [0, 2])


def test_the_picture_can_be_drawn_again(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(sys, "argv", ["draw_readme.py", "--output", str(tmp_path)])
    runpy.run_path(str(ROOT / "scripts/draw_readme.py"), run_name="__main__")
    # The size of a PNG stands in bytes 16 to 23: 10 x 5.6 inches at 160 dots.
    for name in ("readme.png", "readme-dark.png"):
        picture = (tmp_path / name).read_bytes()
        assert (int.from_bytes(picture[16:20], "big"), int.from_bytes(picture[20:24], "big")) == (1600, 896)

"""README.md: its links, its loop and its picture."""

import re
from pathlib import Path

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


def test_the_loop_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    [source] = [code for code in re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL) if "Posteriors.cr" in code]
    exec(source, {})
    assert len(capsys.readouterr().out.strip("[]\n").split()) == 8
    with storage.open_store("sqlite:///runs.db", create=False) as store:
        history = storage.read_log(store, store.find_run("my-loop"))
    assert (list(history.rollouts), sorted(history.successes)) == ([4, 4], [0, 2])

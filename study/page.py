"""Everything that shows the study, drawn at once, and the study as one self-contained page that opens offline."""

from __future__ import annotations

import base64
import hashlib
import html
from importlib.resources import files
from pathlib import Path

from study import figures, tables
from study.cells import Table
from study.data import EXPERIMENTS, Study
from study.files import load
from study.verdict import verdict

TITLE = "GRPO with a reward estimator that remembers: the study"
_OWN_STYLE = """
img { width: 100%; height: auto; background: #fff; border-radius: .4rem; }
.charts { grid-template-columns: repeat(auto-fit, minmax(min(100%, 34rem), 1fr)); margin-top: 1rem; }
td:last-child, th:last-child { text-align: right; white-space: nowrap; width: auto; min-width: 0; }
td:first-child, th:first-child { text-align: left; }
table { width: auto; }
#verdict { padding-left: 1.2rem; list-style: disc; }
main { padding-bottom: 4rem; }
"""


def draw(data: Path, output: Path) -> list[Path]:
    """Redraw figures, tables.md, index.html, and the tables in the study's document.

    The document of a folder ``docs/study`` is ``docs/study.md``; it is filled in only if it exists.

    Args:
        data: folder of the CSV files.
        output: folder to write to, created if needed.

    Returns:
        The files written; the document only if it changed.

    Raises:
        UsageError: the data cannot be used, the document has a wrong marker, or matplotlib or scipy is not installed.
    """
    study = load(data)
    written = figures.draw(study, output)
    built = tables.build(study)
    path = output / "tables.md"
    path.write_text("\n\n".join(f"## {name}\n\n{text}" for name, text in built.items()) + "\n", encoding="utf-8")
    written += [path, write(study, output)]
    document = output.with_name(f"{output.name}.md")
    if document.exists() and tables.fill(document, built):
        written.append(document)
    return written


def write(study: Study, folder: Path) -> Path:
    """Write index.html with the verdict, the tables and the figures found in ``folder``; its path."""
    style = (files("openrlhf_dbb.watch") / "page.css").read_text(encoding="utf-8") + _OWN_STYLE
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'"  # nothing is fetched, nothing runs
    lines = "".join(f"<li>{html.escape(line)}</li>\n" for line in verdict(study))
    drawn = "".join(_figure(folder / f"{name}.png", text) for name, text in figures.CAPTIONS.items())
    made = "".join(_table(name, table) for name, table in tables.sections(study).items())
    path = folder / "index.html"
    path.write_text(
        f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{TITLE}</title>
<style>{style}</style>
</head>
<body>
<header>
<h1>{TITLE}</h1>
<p class="note">{_summary(study)}</p>
<nav aria-label="Sections">
<a href="#found">What was found</a> <a href="#figures">Figures</a> <a href="#tables">Tables</a>
</nav>
</header>
<main>
<h2 id="found">What was found</h2>
<ul id="verdict">
{lines}</ul>
<h2 id="figures">Figures</h2>
<div class="charts">
{drawn}</div>
<h2 id="tables">Tables</h2>
{made}</main>
</body>
</html>
""",
        encoding="utf-8",
    )
    return path


def _summary(study: Study) -> str:
    compared = [run for run in study.runs if run.experiment in EXPERIMENTS]
    arms, seeds = len({run.arm for run in compared}), len({run.seed for run in compared})
    return (
        f"{len(compared)} training runs of {arms} arms and {seeds} seeds. A seed fixes the task's data, the "
        "warm-started model and the training; arms are paired by seed. Accuracies are Acc@8 on held-out prompts."
    )


def _figure(path: Path, text: str) -> str:
    if not path.exists():
        return ""
    image = base64.b64encode(path.read_bytes()).decode()
    caption = html.escape(text)
    return (
        f'<figure id="figure-{path.stem}">\n<img alt="{caption}" src="data:image/png;base64,{image}">\n'
        f'<p class="note">{caption}</p>\n</figure>\n'
    )


def _table(name: str, table: Table) -> str:
    head = "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in table.header)
    rows = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>\n" for row in table.rows)
    return (
        f'<h3 id="{name}">{html.escape(table.title)}</h3>\n<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n'
        f'<tbody>\n{rows}</tbody>\n</table></div>\n<p class="note">{html.escape(table.note)}</p>\n'
    )

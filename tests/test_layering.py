"""Who may import whom: no circles, nothing imports upwards, and a fresh process loads only what it needs."""

import ast
import re
import subprocess
import sys
from glob import glob
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "ray", "openrlhf", "vllm", "transformers", "deepspeed")
STACK = ("torch", "ray", "openrlhf", "vllm")

LAYERS = (
    ("__main__", "cli"),  # the commands
    ("driver",),  # a command line of training
    ("actors", "integrations"),  # trainers
    ("watch", "inspect", "evaluation", "lab"),  # what reads a store or a model
    ("data", "tasks", "rewards"),  # prompts and verifiers
    ("methods", "presets", "tiny"),  # values of flags
    (
        "platform",
        "chosen",
        "saved",
        "upstream",
        "options",
        "",
    ),  # the machine, and what is OpenRLHF's
    ("core",),
    ("estimators", "storage"),
    ("terminal", "errors", "secrets", "toml_file"),
)
"""Parts of openrlhf_dbb, upper ones first; a part may import those of lower layers."""

WITHIN = {
    ("__main__", "cli"),
    ("watch", "inspect"),  # how a report words a run
    ("inspect", "evaluation"),  # the measures of an evaluation
    ("data", "tasks"),
    ("data", "rewards"),  # labels that the verifier cannot read
    ("tasks", "rewards"),  # the verifier of a task
    ("tiny", "presets"),  # the cache of what is made once
    ("platform", "upstream"),
    ("platform", "chosen"),  # rollouts of a step
    ("terminal", "secrets"),  # nothing is printed with a password
}
"""All imports between two parts of one layer: who imports, and what."""


FILES = {  # estimators and storage are links, which Path.rglob would not follow
    path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): ROOT / path
    for path in sorted(glob("openrlhf_dbb/**/*.py", root_dir=ROOT, recursive=True))
}


def _imports(path):
    """Modules that a file imports anywhere, also in functions and for types only."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"relative import in {path}"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in FILES else node.module for name in names)


IMPORTS = {module: sorted(set(_imports(path))) for module, path in FILES.items()}


def _part(module):
    """``core`` of ``openrlhf_dbb.core.step``; the package itself has no name."""
    return module.split(".")[1] if "." in module else ""


LAYER_OF = {part: height for height, layer in enumerate(LAYERS) for part in layer}
BETWEEN = {  # by the importing and the imported part, a module that imports
    (_part(module), _part(name)): module
    for module, names in IMPORTS.items()
    for name in names
    if name.startswith("openrlhf_dbb") and _part(name) != _part(module)
}


def test_no_module_and_no_part_imports_itself_around_a_corner():
    parts = {part: set() for part in LAYER_OF if part}
    for importing, imported in BETWEEN:
        if importing:
            parts[importing].add(imported)
    for graph in (IMPORTS, parts):
        TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_every_part_is_in_one_layer():
    assert {_part(module) for module in FILES} == LAYER_OF.keys()
    assert sum(map(len, LAYERS)) == len(LAYER_OF)


def test_no_part_imports_from_a_layer_above():
    upwards = {
        parts: module
        for parts, module in BETWEEN.items()
        if LAYER_OF[parts[1]] < LAYER_OF[parts[0]]
    }
    assert upwards == {}


def test_imports_within_a_layer_are_those_that_are_named():
    within = {
        parts: module
        for parts, module in BETWEEN.items()
        if LAYER_OF[parts[0]] == LAYER_OF[parts[1]]
    }
    assert within.keys() == WITHIN, within


def test_the_table_of_parts_for_contributors_is_this_one():
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.MULTILINE)
    names = [re.findall(r"`(?:openrlhf_dbb/)?(\w+)(?:/|\.py)`", row) for row in rows]
    heights = [LAYER_OF[name] for row in names for name in row if name in LAYER_OF]
    assert heights == sorted(heights)
    missing = LAYER_OF.keys() - {name for row in names for name in row}
    assert missing == {"", "__main__"}


@pytest.mark.parametrize(
    ("package", "absent"),
    [
        ("estimators", (*HEAVY, "sqlalchemy")),
        ("storage", HEAVY),
        ("core", HEAVY),  # it runs in Ray's actors and out of them
        ("", ("tests", "benchmarks", "estimators", "storage")),
    ],
)
def test_no_file_of_a_package_imports_what_the_package_does_not_know(package, absent):
    imports = imports_of(package)
    assert imports
    assert [(module, name) for module, name in imports if name.split(".")[0] in absent] == []


@pytest.mark.parametrize("package", ["estimators", "storage"])
def test_estimators_and_storage_import_nothing_else_of_ours(package):
    own = f"openrlhf_dbb.{package}."
    ours = {name for _, name in imports_of(package) if name.startswith("openrlhf_dbb")}
    assert [name for name in ours if not f"{name}.".startswith(own)] == []


def imports_of(package):
    """Pairs of a module of the package and a name that it imports."""
    own = f"openrlhf_dbb.{package}".rstrip(".")
    pairs = set()
    for module, names in IMPORTS.items():
        if f"{module}.".startswith(f"{own}."):
            pairs.update((module, name) for name in names)
    return pairs


BUILD = "from openrlhf_dbb.cli.main import build; build"
PARSE = "from openrlhf_dbb.driver import arguments; arguments.parse([])"


@pytest.mark.parametrize(
    ("code", "own", "absent"),
    [
        # the driver of a database that is not used is not needed
        (
            "from openrlhf_dbb import storage, estimators",
            {"storage", "estimators"},
            (*HEAVY, "scipy", "psycopg"),
        ),
        # what decides about rollouts
        (
            "import openrlhf_dbb.core.strategies, openrlhf_dbb.methods",
            {"openrlhf_dbb", "numpy"},
            (*STACK, "storage"),
        ),
        ("import openrlhf_dbb.core.posteriors", {"storage"}, STACK),
        # what --help waits for
        (
            "import openrlhf_dbb.cli.main",
            {"openrlhf_dbb"},
            (*STACK, "numpy", "storage", "sqlalchemy"),
        ),
        (f"{BUILD}(['runs'])", {"storage"}, (*STACK, "scipy", "matplotlib")),
        (f"{BUILD}(['serve']); build(['evaluate'])", {"storage"}, (*STACK, "scipy", "pyarrow")),
        (f"{BUILD}(['lab'])", {"storage", "estimators"}, (*STACK, "matplotlib", "scipy")),
        (PARSE, {"upstream"}, (*HEAVY, "storage", "sqlalchemy")),
    ],
)
def test_a_fresh_process_loads_only_what_it_needs(code, own, absent):
    if code == PARSE:
        pytest.importorskip("openrlhf")  # whose flags are read from its source
    code += "; import sys; print(*{name.removeprefix('openrlhf_dbb.').split('.')[0] for name in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split())
    assert own <= loaded
    assert loaded.isdisjoint(absent)

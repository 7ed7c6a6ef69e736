"""Who may import whom: no circles, nothing imports upwards, and a fresh process loads only what it needs."""

import ast
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
    ("cli", "__main__"),
    ("driver",),
    ("actors", "integrations"),
    # tools and subjects of their own, which know nothing of a training that runs
    (
        *("", "data", "chosen", "saved", "upstream", "platform", "rewards", "tasks", "tiny", "methods", "presets"),
        *("evaluation", "lab"),
        *("inspect", "watch", "terminal", "options"),
    ),
    ("core",),
    ("estimators", "storage"),
    ("errors", "secrets", "toml_file"),
)
"""Parts of openrlhf_dbb, upper ones first; a part may import those of its own layer and of lower ones."""


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


def test_no_module_and_no_part_imports_itself_around_a_corner():
    parts = {part: set() for layer in LAYERS for part in layer if part}
    for module, names in IMPORTS.items():
        if part := _part(module):
            parts[part] |= {_part(name) for name in names if name.startswith("openrlhf_dbb.")} - {part}
    for graph in (IMPORTS, parts):
        TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_no_part_imports_from_a_layer_above():
    layer_of = {part: height for height, layer in enumerate(LAYERS) for part in layer}
    assert {_part(module) for module in FILES} <= layer_of.keys()
    ours = [(module, name) for module, names in IMPORTS.items() for name in names if name.startswith("openrlhf_dbb")]
    assert [(module, name) for module, name in ours if layer_of[_part(name)] < layer_of[_part(module)]] == []


@pytest.mark.parametrize(
    ("package", "absent"),
    [
        ("estimators", (*HEAVY, "sqlalchemy")),
        ("storage", HEAVY),
        ("core", HEAVY),  # it runs in Ray's actors and out of them
        ("", ("tests", "benchmarks", "estimators", "storage")),
    ],
)
def test_no_file_of_a_package_imports(package, absent):
    own = f"openrlhf_dbb.{package}".rstrip(".")
    inside = [module for module in IMPORTS if f"{module}.".startswith(f"{own}.")]
    found = {(module, name) for module in inside for name in IMPORTS[module]}
    assert found
    assert [(module, name) for module, name in found if name.split(".")[0] in absent] == []
    if package in ("estimators", "storage"):  # these know nothing of the rest
        ours = {name for _, name in found if name.startswith("openrlhf_dbb")}
        assert [name for name in ours if not f"{name}.".startswith(f"{own}.")] == []


BUILD = "from openrlhf_dbb.cli.main import build; build"
PARSE = "from openrlhf_dbb.driver import arguments; arguments.parse([])"


@pytest.mark.parametrize(
    ("code", "own", "absent"),
    [
        # the driver of a database that is not used is not needed
        ("from openrlhf_dbb import storage, estimators", {"storage", "estimators"}, (*HEAVY, "scipy", "psycopg")),
        # what decides about rollouts
        ("import openrlhf_dbb.core.strategies, openrlhf_dbb.methods", {"openrlhf_dbb", "numpy"}, (*STACK, "storage")),
        ("import openrlhf_dbb.core.posteriors", {"storage"}, STACK),
        # what --help waits for
        ("import openrlhf_dbb.cli.main", {"openrlhf_dbb"}, (*STACK, "numpy", "storage", "sqlalchemy")),
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
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert own <= loaded
    assert loaded.isdisjoint(absent)

"""What is shipped: the wheel, the metadata of the bare install, and the locks."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]


def repository():
    """The files of the checkout."""
    command = ["git", "-c", "safe.directory=*", "ls-files"]  # whoever owns the checkout
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [name for name in listed.splitlines() if os.path.lexists(ROOT / name)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel made from our sdist, built from a copy, so that the checkout stays clean."""
    source = tmp_path_factory.mktemp("source")
    for name in repository():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name, follow_symlinks=False)
    command = [sys.executable, "-m", "build", "--no-isolation"]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    return next((source / "dist").glob("*.whl"))


@pytest.fixture(scope="module")
def metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return message_from_bytes(archive.read(next(n for n in archive.namelist() if n.endswith("-info/METADATA"))))


def test_bare_install_is_light_and_the_changelog_begins_with_this_version(metadata):
    bare = [r for r in metadata.get_all("Requires-Dist", []) if "extra ==" not in r]
    assert {Requirement(r).name for r in bare} == {"msgspec", "numpy", "rich", "scipy", "sqlalchemy", "tomli"}
    newest = re.search(r"^## (\S+),", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert newest and newest[1] == metadata["Version"]


def test_wheel_holds_openrlhf_dbb_with_its_data_and_no_other_top_level_name(wheel):
    ours = set(repository())
    linked = {f"openrlhf_dbb/{name}" for name in ours if name.split("/")[0] in ("estimators", "storage")}
    expected = {name for name in ours if name.startswith("openrlhf_dbb/") and (ROOT / name).is_file()} | linked
    assert {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name} == expected


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12"])
@pytest.mark.parametrize(
    ("lock", "extras"),
    [
        ("cpu.lock", ["cpu", "postgres"]),
        ("cuda.lock", ["cuda", "postgres"]),
        ("test.lock", ["test", "lint", "docs", "trl"]),
        ("verl.lock", ["verl"]),
    ],
)
def test_lock_answers_its_extras(metadata, lock, extras, python):
    environment = {"python_version": python, "python_full_version": f"{python}.0"}
    lines = (ROOT / "requirements" / lock).read_text().splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    held = {canonicalize_name(p.name): p.specifier for p in pins if p.marker is None or p.marker.evaluate(environment)}
    asked = [
        requirement
        for requirement in map(Requirement, metadata.get_all("Requires-Dist", []))
        if requirement.marker
        and not requirement.marker.evaluate({**environment, "extra": ""})  # of the bare install
        and any(requirement.marker.evaluate({**environment, "extra": extra}) for extra in extras)
    ]
    assert asked
    for requirement in asked:
        [pin] = held[canonicalize_name(requirement.name)]
        assert pin.operator in ("==", "===") and pin.version in requirement.specifier, requirement


@pytest.mark.slow
def test_light_install_trains_and_reports(wheel, tmp_path):
    """In an environment that has the wheel alone."""
    commands = tmp_path / "light/bin"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "light"], check=True)
    pip = [commands / "python", "-m", "pip", "install", "--quiet", "--no-compile", wheel]
    subprocess.run(pip, check=True, capture_output=True)

    def run(name, *arguments):
        environment = os.environ | {"OPENRLHF_DBB_STORE_URL": "sqlite:///any_trainer.db"}
        environment.pop("PYTHONPATH", None)
        command = [commands / name, *arguments]
        completed = subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True)
        assert completed.stderr == ""
        return completed.stdout

    assert run("python", "-I", "-c", "import importlib.util as i; print(i.find_spec('torch'))") == "None\n"
    for name in ["estimators", "storage", "study", "core", "data"]:  # folders that may stand beside a user's script
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('this is another project')")
    run("python", "-c", "import sys; sys.path.insert(0, '.'); from openrlhf_dbb import Posteriors")
    name = run("python", ROOT / "examples/any_trainer.py").split()[-1]
    assert name in run("openrlhf-dbb", "runs")
    run("openrlhf-dbb", "report", name)
    (page,) = tmp_path.glob("*.html")
    assert name in page.read_text()

"""What is shipped: the wheel, the sdist, their metadata, and the locks."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PYTHONS = ["3.10", "3.11", "3.12"]


def repository() -> list[str]:
    """The files of the checkout."""
    command = ["git", "-c", "safe.directory=*", "ls-files"]  # whoever owns the checkout
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [name for name in listed.splitlines() if os.path.lexists(ROOT / name)]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of our sdist and the wheel made from it, built from a copy, so that the checkout stays clean."""
    source = tmp_path_factory.mktemp("source")
    for name in repository():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name, follow_symlinks=False)
    command = [sys.executable, "-m", "build", "--no-isolation"]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    return source / "dist"


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    return next(built.glob("*.whl"))


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        return message_from_bytes(archive.read(next(n for n in archive.namelist() if n.endswith("-info/METADATA"))))


def requirements(metadata: Message, extra: str, python: str) -> list[Requirement]:
    """An extra's requirements on one Python version, without those of the bare install."""
    environments = [{"python_version": python, "extra": name} for name in (extra, "")]
    return [
        requirement
        for requirement in map(Requirement, metadata.get_all("Requires-Dist", []))
        if requirement.marker and [requirement.marker.evaluate(each) for each in environments] == [True, False]
    ]


def locked(lock: str, python: str) -> dict[str, str]:
    """Name -> version of the pins that hold on one Python version; a name pinned twice fails."""
    environment = {"python_version": python, "python_full_version": f"{python}.0"}
    pins: dict[str, str] = {}
    for line in (ROOT / "requirements" / lock).read_text().splitlines():
        if line.startswith("#"):
            continue
        pin = Requirement(line)
        if pin.marker is None or pin.marker.evaluate(environment):
            (specifier,) = pin.specifier
            assert specifier.operator in ("==", "==="), line
            assert pins.setdefault(canonicalize_name(pin.name), specifier.version) == specifier.version, line
    return pins


def test_bare_install_is_light_and_the_changelog_begins_with_this_version(metadata: Message) -> None:
    bare = [r for r in metadata.get_all("Requires-Dist", []) if "extra ==" not in r]
    assert {Requirement(r).name for r in bare} == {"msgspec", "numpy", "rich", "scipy", "sqlalchemy", "tomli"}
    newest = re.search(r"^## (\S+),", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert newest and newest[1] == metadata["Version"]


def installed() -> set[str]:
    """The files that the wheel has to hold, by their place in it; two folders come by links of openrlhf_dbb."""
    names = set(repository())
    linked = {f"openrlhf_dbb/{name}" for name in names if name.split("/")[0] in ("estimators", "storage")}
    return {name for name in names if name.startswith("openrlhf_dbb/") and (ROOT / name).is_file()} | linked


def test_wheel_holds_openrlhf_dbb_with_its_data_and_no_other_top_level_name(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == installed() > {"openrlhf_dbb/estimators/py.typed", "openrlhf_dbb/storage/py.typed"}
    assert {Path(name).suffix for name in names} == {".py", ".typed", ".toml", ".html", ".css", ".js"}


def test_sdist_holds_what_sets_up_the_training_stack_and_an_index_would_take_both(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    assert installed() <= names
    assert {name for name in repository() if name.split("/")[0] in ("requirements", "scripts")} <= names
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *built.iterdir()], check=True)


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize(
    ("lock", "extras"),
    [
        ("cpu.lock", ["cpu", "postgres"]),
        ("cuda.lock", ["cuda", "postgres"]),
        ("test.lock", ["test", "lint", "docs", "trl"]),
        ("verl.lock", ["verl"]),
    ],
)
def test_lock_answers_its_extras(metadata: Message, lock: str, extras: list[str], python: str) -> None:
    pins = locked(lock, python)
    asked = [r for extra in extras for r in requirements(metadata, extra, python)]
    assert asked
    for requirement in asked:
        assert pins[canonicalize_name(requirement.name)] in requirement.specifier, requirement


@pytest.mark.slow
def test_light_install_trains_and_reports(wheel: Path, tmp_path: Path) -> None:
    """In an environment that has the wheel alone."""
    commands = tmp_path / "light/bin"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "light"], check=True)
    pip = [sys.executable, "-m", "pip", "--python", commands / "python", "install", "--quiet", "--no-compile", wheel]
    subprocess.run(pip, check=True, capture_output=True)

    def run(name: str, *arguments: str | Path) -> str:
        environment = os.environ | {"OPENRLHF_DBB_STORE_URL": "sqlite:///any_trainer.db"}
        environment.pop("PYTHONPATH", None)
        completed = subprocess.run(
            [commands / name, *arguments], cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
        )
        assert completed.stderr == ""
        return completed.stdout

    assert run("python", "-I", "-c", "import importlib.util as i; print(i.find_spec('torch'))") == "None\n"
    for package in ["openrlhf_dbb.estimators", "openrlhf_dbb.storage", "openrlhf_dbb"]:
        run("python", "-W", "error", "-c", f"import {package}")
    for name in ["estimators", "storage", "study", "core", "data"]:  # folders that may stand beside a user's script
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('this is another project')")
    run("python", "-c", "import sys; sys.path.insert(0, '.'); from openrlhf_dbb import Posteriors")

    name = run("python", ROOT / "examples/any_trainer.py").split()[-1]
    assert name in run("openrlhf-dbb", "runs")
    assert "5" in run("openrlhf-dbb", "show", name)
    run("openrlhf-dbb", "report", name)
    (page,) = tmp_path.glob("*.html")
    assert name in page.read_text()

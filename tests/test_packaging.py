"""What is shipped: the wheel, the sdist, their metadata, and the locks."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]


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


def test_sdist_holds_what_sets_up_the_training_stack(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    assert installed() <= names
    assert {name for name in repository() if name.split("/")[0] in ("requirements", "scripts")} <= names


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
def test_lock_answers_its_extras(metadata: Message, lock: str, extras: list[str], python: str) -> None:
    def asked(lines: list[str], extra: str = "") -> list[Requirement]:
        environment = {"python_version": python, "python_full_version": f"{python}.0", "extra": extra}
        found = map(Requirement, lines)
        return [each for each in found if each.marker is None or each.marker.evaluate(environment)]

    lines = (ROOT / "requirements" / lock).read_text().splitlines()
    pins = {canonicalize_name(pin.name): pin.specifier for pin in asked([line for line in lines if line[0] != "#"])}
    required = metadata.get_all("Requires-Dist", [])
    bare = set(map(str, asked(required)))
    of_extras = [each for extra in extras for each in asked(required, extra) if str(each) not in bare]
    assert of_extras
    for requirement in of_extras:
        (pin,) = pins[canonicalize_name(requirement.name)]
        assert pin.operator in ("==", "===") and pin.version in requirement.specifier, requirement


def needed(requires: Iterable[str]) -> dict[str, importlib.metadata.Distribution]:
    """The installed distributions that a bare install with these requirements brings."""
    found: dict[str, importlib.metadata.Distribution] = {}
    left = list(requires)
    while left:
        requirement = Requirement(left.pop())
        if requirement.name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found[requirement.name] = importlib.metadata.distribution(requirement.name)
        left += found[requirement.name].requires or []
    return found


COMMAND = "from importlib.metadata import entry_points as e; e(group='console_scripts')['openrlhf-dbb'].load()()"


@pytest.mark.slow
def test_light_install_trains_and_reports(wheel: Path, metadata: Message, tmp_path: Path) -> None:
    """In an environment that has the wheel and links to what it requires, nothing else."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "light"], check=True)
    (packages,) = tmp_path.glob("light/lib/python*/site-packages")
    zipfile.ZipFile(wheel).extractall(packages)  # pip would do that and no more, in seconds
    for distribution in needed(metadata.get_all("Requires-Dist", [])).values():
        for top in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
            (packages / top).symlink_to(distribution.locate_file(top))

    def run(*arguments: str | Path) -> str:
        environment = os.environ | {"OPENRLHF_DBB_STORE_URL": "sqlite:///any_trainer.db"}
        environment.pop("PYTHONPATH", None)
        command = [tmp_path / "light/bin/python", *arguments]
        completed = subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True)
        assert completed.stderr == ""
        return completed.stdout

    for name in ["estimators", "storage", "study", "core", "data"]:  # folders that may stand beside a user's script
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('this is another project')")
    run("-W", "error", "-c", "import sys; sys.path.insert(0, '.'); from openrlhf_dbb import Posteriors")
    name = run(ROOT / "examples/any_trainer.py").split()[-1]
    assert name in run("-c", COMMAND, "runs")
    assert "5" in run("-c", COMMAND, "show", name)
    run("-c", COMMAND, "report", name)
    (page,) = tmp_path.glob("*.html")
    assert name in page.read_text()

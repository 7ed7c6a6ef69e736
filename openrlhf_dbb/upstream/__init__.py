"""How OpenRLHF's internals are reached.

deferred   imports that leave out what a module only names
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.util
import logging
import os
import re
import runpy
import traceback
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.upstream.deferred import deferring

CHECKED_VERSIONS = ("0.11.2",)
COMMAND = "openrlhf.cli.train_ppo_ray"
# Imported by OpenRLHF's trainer, or by transformers for it, but not used in the driver.
_NOT_IN_DRIVER = (
    "deepspeed", "vllm", "peft", "flash_attn", "openrlhf.utils.deepspeed", "openrlhf.models.actor",
    "openrlhf.models.model", "openrlhf.utils.math_utils", "torch._dynamo", "torch.distributed.fsdp",
    "torch.distributed._composable",
)  # fmt: skip
_FORM = "algo.advantage.estimator"
_ATTENTION = "ds.attn_implementation"
_HIERARCHIZE = "from openrlhf.utils.config import hierarchize"


def check_version() -> None:
    """Raise UsageError unless the installed OpenRLHF is a version that this package was checked with."""
    try:
        installed = version("openrlhf")
    except PackageNotFoundError:
        raise UsageError(
            "openrlhf is not installed; run `bash scripts/quickstart.sh`, or pip install 'openrlhf-dbb[cuda]'"
        ) from None
    if installed not in CHECKED_VERSIONS:
        raise UsageError(
            f"openrlhf {installed} is installed, but openrlhf_dbb was checked on {', '.join(CHECKED_VERSIONS)} only; "
            f"pip install openrlhf=={CHECKED_VERSIONS[-1]}"
        )


def installed_folder() -> Path:
    """Return the folder of the installed OpenRLHF, which is not imported.

    Raises:
        UsageError: OpenRLHF is not installed.
    """
    spec = importlib.util.find_spec("openrlhf")
    if spec is None or spec.origin is None:
        raise UsageError(f"openrlhf cannot be found; pip install openrlhf=={CHECKED_VERSIONS[-1]}")
    return Path(spec.origin).parent


def _tree(module: str) -> ast.Module:
    """The syntax tree of a module of OpenRLHF."""
    path = installed_folder().joinpath(*module.split(".")[1:]).with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8"))


def main_block(tree: ast.Module) -> tuple[ast.Module, ast.Module] | None:
    """OpenRLHF builds its parser under ``if __name__ == "__main__"``: that block's code, without the import.

    Args:
        tree: of the module ``COMMAND``.

    Returns:
        The statements before ``args = parser.parse_args()``, and those after it up to ``train(args)``; None if the
        block is not of this form.
    """
    for node in tree.body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'":
            texts = [ast.unparse(statement) for statement in node.body]
            if "args = parser.parse_args()" in texts and texts[-1] == "train(args)":
                split = texts.index("args = parser.parse_args()")
                before, after = node.body[:split], node.body[split + 1 : -1]
                after = [statement for statement in after if ast.unparse(statement) != _HIERARCHIZE]
                return ast.Module(before, type_ignores=[]), ast.Module(after, type_ignores=[])
    return None


def _run_main_block(part: int, names: dict[str, Any]) -> None:
    parts = main_block(_tree(COMMAND))
    if parts is None:
        raise UsageError(f"{COMMAND} no longer builds its parser as in openrlhf {CHECKED_VERSIONS[-1]}")
    exec(compile(parts[part], COMMAND, "exec"), names)


def build_parser() -> argparse.ArgumentParser:
    """OpenRLHF's own parser, every flag with its name, default, meaning and help; imports nothing heavy."""
    from datetime import datetime

    names: dict[str, Any] = {"argparse": argparse, "datetime": datetime}
    _run_main_block(0, names)
    return names["parser"]


def choices(flag: str) -> list[str]:
    """What OpenRLHF's own parser allows for a flag; of one that allows anything, nothing."""
    return [str(choice) for each in build_parser()._actions if each.dest == flag for choice in each.choices or ()]


def finish_arguments(args: argparse.Namespace, *, group_baseline: bool = True) -> SimpleNamespace:
    """Nest the flat namespace (``args.actor.adam.lr``) and apply OpenRLHF's own checks and derived values.

    Args:
        args: as the parser returns it.
        group_baseline: False if OpenRLHF's baseline of the current group is replaced: its check that a group
            has more than one rollout is then left out.

    Raises:
        UsageError: one of OpenRLHF's assertions failed (its message is kept), or anything else in its checks.
    """
    names: dict[str, Any] = {"args": args, "hierarchize": load("openrlhf.utils.config", "hierarchize")}
    flags = dict(vars(args))
    form = getattr(args, _FORM)
    if not group_baseline and form != "gae":
        setattr(args, _FORM, "reinforce")  # like the group forms, without a critic
    attention = getattr(args, _ATTENTION)
    setattr(args, _ATTENTION, "flash_attention_2")  # to packed samples OpenRLHF would give no other
    try:
        _run_main_block(1, names)
    except ModuleNotFoundError as error:  # --use_ms asks for modelscope
        raise UsageError(f"--use_ms: the package {error.name} is not installed; install it, or leave it out") from error
    except Exception as error:
        if isinstance(error, AssertionError) and str(error):
            raise UsageError(str(error)) from error
        raise UsageError(_what_failed(error, flags)) from error
    names["args"].algo.advantage.estimator = form
    names["args"].ds.attn_implementation = attention
    return names["args"]


def _what_failed(error: Exception, flags: dict[str, Any]) -> str:
    """That OpenRLHF's main block has failed, with the flags that its statement reads."""
    line = max(frame.lineno or 0 for frame in traceback.extract_tb(error.__traceback__) if frame.filename == COMMAND)
    statements = [
        node
        for node in ast.walk(_tree(COMMAND))
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    innermost = max(statements, key=lambda node: node.lineno)
    text = ast.unparse(getattr(innermost, "test", innermost))
    read = [f"--{flag} {flags[flag]}" for flag in flags if re.search(rf"\bargs\.{re.escape(flag)}\b", text)]
    return (
        f"OpenRLHF cannot work with {', '.join(read) or 'these flags'}: {type(error).__name__}: {error}; "
        "change or give them"
    )


def load(module: str, name: str) -> Any:
    """``name`` of a module of OpenRLHF, by its file: an import of its package would import torch."""
    path = installed_folder().joinpath(*module.split(".")[1:]).with_suffix(".py")
    return runpy.run_path(str(path))[name]


def data_parallel_ranks(args: SimpleNamespace) -> int:
    """Ranks that train on different rows."""
    ranks = args.actor.num_nodes * args.actor.num_gpus_per_node
    return int(ranks // args.ds.ring_attn_size // args.ds.tensor_parallel_size)


@contextlib.contextmanager
def imports_for_driver() -> Iterator[None]:
    """For the driver's imports of OpenRLHF: without DeepSpeed, vLLM and torch's compiler, which it never uses."""
    import torch

    compiler, torch.compile = torch.compile, lambda model=None, **_: model or (lambda function: function)
    try:
        with deferring(*_NOT_IN_DRIVER):
            yield
    finally:
        torch.compile = compiler


def _no_bar(*args: Any, **options: Any) -> Any:
    from tqdm import tqdm

    return tqdm(*args, **options | {"disable": True})


@contextlib.contextmanager
def quiet(verbose: bool = False) -> Iterator[None]:
    """Drop what OpenRLHF prints and logs in this process: among other things all its arguments, secrets included."""
    if verbose:
        yield
        return
    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of how OpenRLHF uses torch and Ray
            yield
    finally:
        logging.disable(before)


def plain_class(remote_class: Any) -> type:
    """The class behind a Ray actor class, which itself cannot be subclassed."""
    return remote_class.__ray_metadata__.modified_class


def replace(module: ModuleType, name: str, replacement: Any) -> None:
    """Put ``replacement`` where ``module`` of OpenRLHF looks ``name`` up when it runs.

    Raises:
        UsageError: there is no such name any more.
    """
    if not hasattr(module, name):
        raise UsageError(f"openrlhf no longer has {module.__name__}.{name}; use {CHECKED_VERSIONS[-1]}")
    setattr(module, name, replacement)


def run(
    args: SimpleNamespace,
    *,
    trainer: Any | None = None,
    rollout_actor: Any | None = None,
    policy_actor: Any | None = None,
    get_strategy: Callable[[SimpleNamespace], Any] | None = None,
    placement_group: Callable[..., Any] | None = None,
    bars: bool = True,
) -> None:
    """OpenRLHF's ``train(args)`` with our classes in place of the names it looks up when called.

    Args:
        trainer: anything with ``.remote(...)``, like a Ray actor class, for ``PPOTrainer`` and ``PPOTrainerAsync``.
        rollout_actor: Ray actor class for ``RolloutRayActor``.
        policy_actor: Ray actor class for ``PolicyModelActor``.
        get_strategy: for ``get_strategy``.
        placement_group: for Ray's function of that name.
        bars: show the progress bars of a trainer in this process.
    """
    with imports_for_driver():
        import openrlhf.cli.train_ppo_ray as command
        import openrlhf.datasets.prompts_dataset as prompts_dataset
        import openrlhf.trainer.ppo_trainer as ppo_trainer
        import openrlhf.trainer.ppo_trainer_async as ppo_trainer_async
        import openrlhf.trainer.ray.launcher as launcher
        import openrlhf.trainer.ray.vllm_engine as vllm_engine

    bar = None if bars else _no_bar
    for module, name, replacement in (
        (prompts_dataset, "tqdm", bar),
        (ppo_trainer, "tqdm", bar),
        (ppo_trainer, "PPOTrainer", trainer),
        (ppo_trainer_async, "PPOTrainerAsync", trainer),
        (vllm_engine, "RolloutRayActor", rollout_actor),
        (command, "PolicyModelActor", policy_actor),
        (command, "get_strategy", get_strategy),
        (command, "placement_group", placement_group),
        (launcher, "placement_group", placement_group),
        (vllm_engine, "placement_group", placement_group),
    ):
        if replacement is not None:
            replace(module, name, replacement)
    command.train(args)

"""Reaches OpenRLHF's internals: its parser, its checks, and the names that it looks up during a training.

``requirements/openrlhf.toml`` lists every name that is replaced, subclassed, patched or read privately.
"""

import argparse
import ast
import contextlib
import functools
import importlib
import logging
import os
import re
import runpy
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.secrets import without_secrets

CHECKED_VERSIONS = ("0.11.2",)
COMMAND = "cli.train_ppo_ray"
# OpenRLHF's trainer imports these modules, or transformers imports them for it, but the driver does not use them.
# math_utils imports sympy: half a second.
_NOT_IN_DRIVER = (
    "deepspeed", "vllm", "peft", "openrlhf.utils.deepspeed", "openrlhf.utils.math_utils", "torch._dynamo",
    "torch.distributed.fsdp", "torch.distributed._composable",
)  # fmt: skip
_FORM = "algo.advantage.estimator"
_ATTENTION = "ds.attn_implementation"


def check_version() -> None:
    """Raise UsageError unless the installed OpenRLHF is a version that this package was checked with."""
    try:
        installed = version("openrlhf")
    except PackageNotFoundError:
        raise UsageError(
            "openrlhf is not installed; "
            "run bash scripts/setup_env.sh in the repository or the unpacked sdist"
        ) from None
    if installed not in CHECKED_VERSIONS:
        raise UsageError(
            f"openrlhf {installed} is installed, but openrlhf_dbb was checked on {', '.join(CHECKED_VERSIONS)} only; "
            f"pip install openrlhf=={CHECKED_VERSIONS[-1]}"
        )


def source_file(module: str) -> Path:
    """Return the file of a module of OpenRLHF. OpenRLHF is not imported."""
    spec = find_spec("openrlhf")
    assert spec is not None and spec.origin is not None, "check_version has passed"
    return Path(spec.origin).parent.joinpath(*module.split(".")).with_suffix(".py")


def _run_main_block(*, before_parsing: bool, names: dict[str, Any]) -> None:
    """Execute OpenRLHF's main block before, or after, ``args = parser.parse_args()``."""
    # OpenRLHF has no function that returns its parser or checks its arguments, and its import takes seconds.
    nodes = ast.parse(source_file(COMMAND).read_text(encoding="utf-8")).body
    [main] = [
        n
        for n in nodes
        if isinstance(n, ast.If) and ast.unparse(n.test) == "__name__ == '__main__'"
    ]
    split = [ast.unparse(statement) for statement in main.body].index("args = parser.parse_args()")
    # The last statement is train(args). The import of hierarchize would import torch; we give that name.
    part = main.body[:split] if before_parsing else main.body[split + 1 : -1]
    part = [
        statement for statement in part if not ast.unparse(statement).endswith("import hierarchize")
    ]
    exec(compile(ast.Module(part, type_ignores=[]), COMMAND, "exec"), names)


def build_parser(parser_class: type[argparse.ArgumentParser] = argparse.ArgumentParser) -> Any:
    """Return a parser of this class with every flag of OpenRLHF; imports nothing heavy."""
    from datetime import datetime

    names = {
        "argparse": SimpleNamespace(**vars(argparse) | {"ArgumentParser": parser_class}),
        "datetime": datetime,
    }
    _run_main_block(before_parsing=True, names=names)
    return names["parser"]


def choices(flag: str) -> list[str]:
    """Return the values that OpenRLHF's parser allows for a flag; nothing if it allows any value."""
    actions = [action for action in build_parser()._actions if action.dest == flag]
    return [str(choice) for action in actions for choice in action.choices or ()]


def finish_arguments(args: argparse.Namespace, *, group_baseline: bool = True) -> SimpleNamespace:
    """Nest the parsed arguments (``args.actor.adam.lr``) and apply OpenRLHF's own checks and derived values.

    ``group_baseline`` is False if our form replaces OpenRLHF's baseline of the current group.

    Raises:
        UsageError: OpenRLHF refuses the arguments.
    """
    flags = dict(vars(args))
    names: dict[str, Any] = {
        "args": args,
        "hierarchize": load("openrlhf.utils.config", "hierarchize"),
    }
    form = flags[_FORM]
    attention = flags[_ATTENTION]
    # OpenRLHF asserts that a group has several rollouts, which our baselines do not need. It asserts
    # nothing of "reinforce".
    if not group_baseline and form != "gae":
        setattr(args, _FORM, "reinforce")
    # OpenRLHF replaces any other attention where samples are packed; sdpa and flash-attn 4 take packed samples too.
    setattr(args, _ATTENTION, "flash_attention_2")
    try:
        _run_main_block(before_parsing=False, names=names)
    except Exception as error:
        raise UsageError(_refusal(error, flags)) from error
    finished: SimpleNamespace = names["args"]
    finished.algo.advantage.estimator = form
    finished.ds.attn_implementation = attention
    return finished


def _refusal(error: Exception, flags: Mapping[str, Any]) -> str:
    """Return which flags OpenRLHF's main block refused with this error, and why."""
    calls = traceback.extract_tb(error.__traceback__)
    statement = _statement_at(max(call.lineno or 0 for call in calls if call.filename == COMMAND))
    names = dict.fromkeys(re.findall(r"args\.([\w.]+)", statement))
    values = ", ".join(f"--{name} {flags[name]}" for name in names if name in flags)
    why = f"{type(error).__name__}: {error}, at: {statement}"
    if isinstance(error, AssertionError):
        why = str(error) or statement
    return f"OpenRLHF cannot work with {values or 'these flags'}: {why}; change one of them"


def _statement_at(line: int) -> str:
    """Return the first line of the innermost statement at a line of OpenRLHF's command; of an assert its test."""
    tree = ast.parse(source_file(COMMAND).read_text(encoding="utf-8"))
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    around = [node for node in statements if node.lineno <= line <= (node.end_lineno or line)]
    innermost = around[-1]
    shown = innermost.test if isinstance(innermost, ast.Assert) else innermost
    return ast.unparse(shown).splitlines()[0]


def load(module: str, name: str) -> Any:
    """Return ``name`` of a module of OpenRLHF without importing its package, which would import torch."""
    return runpy.run_path(str(source_file(module.removeprefix("openrlhf."))))[name]


def nested(values: Mapping[str, Any]) -> SimpleNamespace:
    """Return namespaces in namespaces, by the dots in the flags' names."""
    nest: Callable[[SimpleNamespace], SimpleNamespace] = load(
        "openrlhf.utils.config", "hierarchize"
    )
    return nest(SimpleNamespace(**values))


@contextlib.contextmanager
def imports_for_driver() -> Iterator[None]:
    """Let the driver import OpenRLHF without DeepSpeed, vLLM and torch's compiler."""
    import torch

    # OpenRLHF decorates functions with torch.compile, which imports the compiler at once.
    compiler = torch.compile
    torch.compile = lambda model=None, **_: model or (lambda function: function)
    try:
        with deferring(*_NOT_IN_DRIVER):
            yield
    finally:
        torch.compile = compiler


@contextlib.contextmanager
def deferring(*modules: str) -> Iterator[None]:
    """Let ``import`` of these modules make stand-ins within the block, whose code may only name them.

    Later a stand-in becomes the real thing when it is called, when an attribute is read, and in the process that it is
    pickled to. What was imported before stays.
    """
    finder = _Finder([module for module in modules if module not in sys.modules])
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        # A copy, because Ray imports in a thread of its own.
        for name, module in sys.modules.copy().items():
            if isinstance(module, _Module):
                del sys.modules[name]


class _Finder(MetaPathFinder, Loader):
    def __init__(self, modules: list[str]) -> None:
        self._modules = modules

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        held = any(f"{name}.".startswith(f"{module}.") for module in self._modules)
        return ModuleSpec(name, self, is_package=True) if held else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Module(ModuleType):
    """Stands in for a module; its attributes are stand-ins."""

    def __getattr__(self, name: str) -> Any:
        if name == "__version__":  # OpenRLHF reads that of vLLM before it makes the engines
            return version(packages_distributions()[self.__name__][0])
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(self.__name__, name)

    def __reduce__(self) -> Any:
        return importlib.import_module, (self.__name__,)


class _Name:
    """Stands in for a class, a function or a submodule."""

    def __init__(self, *place: str) -> None:  # module and name
        self.__place = place

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _real(*self.__place)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_real(*self.__place), name)

    def __reduce__(self) -> Any:
        return _real, self.__place


def _real(module: str, name: str) -> Any:
    imported = importlib.import_module(module)
    if hasattr(imported, name):
        return getattr(imported, name)
    return importlib.import_module(f"{module}.{name}")


@contextlib.contextmanager
def quiet(verbose: bool = False) -> Iterator[None]:
    """Drop what OpenRLHF prints in this process: all its arguments, secrets included."""
    with contextlib.ExitStack() as stack:
        if not verbose:
            stack.callback(logging.disable, logging.root.manager.disable)
            logging.disable(logging.INFO)
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8", errors="replace"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # about OpenRLHF's use of torch and Ray
        yield


def plain_class(remote_class: Any) -> type:
    """Return the class behind a Ray actor class. The actor class itself cannot be subclassed."""
    return remote_class.__ray_metadata__.modified_class


def replace(module: ModuleType, name: str, replacement: Any) -> None:
    """Put ``replacement`` where OpenRLHF, or a package that it uses, looks ``name`` up; raise UsageError without it."""
    if not hasattr(module, name):
        raise UsageError(
            f"{module.__name__} has no {name}; install the locked versions: bash scripts/setup_env.sh"
        )
    setattr(module, name, replacement)


@functools.cache
def mask_trackers() -> None:
    """Keep secrets from W&B, to which OpenRLHF sends all its arguments."""
    from openrlhf.utils.logging_utils import WandbLogger

    begin = WandbLogger.__init__

    def masked(logger: Any, args: SimpleNamespace) -> None:
        import wandb

        if not wandb.api.api_key:
            os.environ["WANDB_API_KEY"] = args.logger.wandb.key
        del sys.argv[1:]  # W&B sends the command line too
        begin(logger, without_secrets(args))

    WandbLogger.__init__ = masked


def forget_logged(tensorboard: Any, step: int) -> None:
    """Let TensorBoard leave out what an earlier start of the run has logged after ``step``."""
    tensorboard.writer.close()
    tensorboard.writer.purge_step = step + 1  # read when the writer opens again, at its next event


class InThisProcess:
    """Poses as a Ray actor class and as its actor, for an object in this process: ``made``, None before it is made.

    OpenRLHF's ``train`` gets nothing but arguments. It makes the trainer by ``PPOTrainer.remote(...)``, calls it by
    ``trainer.NAME.remote(...)``, and gives what these return to ``ray.get``.
    """

    # Arguments that OpenRLHF does not give
    def __init__(self, cls: Callable[..., Any], **more: Any) -> None:
        self._cls = cls
        self._more = more
        self.made: Any = None

    def remote(self, *args: Any, **kwargs: Any) -> "InThisProcess":
        """Make the object from OpenRLHF's arguments and ours; return this stand-in, its actor."""
        self.made = self._cls(*args, **kwargs, **self._more)
        return self

    def __getattr__(self, name: str) -> Any:
        import ray

        return SimpleNamespace(
            remote=lambda *args, **kwargs: ray.put(getattr(self.made, name)(*args, **kwargs))
        )


def with_more(actor_class: Any, **more: Any) -> Any:
    """Return what poses as a Ray actor class, and adds arguments to those that OpenRLHF gives."""

    def with_options(**options: Any) -> Any:
        made = actor_class.options(**options)
        return SimpleNamespace(remote=lambda **kwargs: made.remote(**{**kwargs, **more}))

    return SimpleNamespace(options=with_options)


def run(
    args: SimpleNamespace,
    *,
    trainer: InThisProcess | None = None,
    rollout_actor: Any | None = None,
    policy_actor: Any | None = None,
    get_strategy: Callable[[SimpleNamespace], Any] | None = None,
    bars: bool = True,  # of a trainer in this process
    tokenizer: Any | None = None,  # of the trainer; None: it makes one
) -> None:
    """Run OpenRLHF's ``train(args)`` with our classes in place of the names that it looks up."""
    from tqdm import tqdm

    with imports_for_driver():
        import openrlhf.cli.train_ppo_ray as command
        import openrlhf.datasets.prompts_dataset as prompts_dataset
        import openrlhf.trainer.ppo_trainer as ppo_trainer
        import openrlhf.trainer.ppo_trainer_async as ppo_trainer_async
        import openrlhf.trainer.ray.vllm_engine as vllm_engine

    bar = None if bars else lambda *args, **options: tqdm(*args, **options | {"disable": True})
    # Each module has its own copy of an imported name, so some names are replaced in several modules.
    for module, name, replacement in (
        (prompts_dataset, "tqdm", bar),
        (ppo_trainer, "tqdm", bar),
        (ppo_trainer, "PPOTrainer", trainer),
        (ppo_trainer, "get_tokenizer", tokenizer and (lambda *args, **options: tokenizer)),
        (ppo_trainer_async, "PPOTrainerAsync", trainer),
        (vllm_engine, "RolloutRayActor", rollout_actor),
        (command, "PolicyModelActor", policy_actor),
        (command, "get_strategy", get_strategy),
    ):
        if replacement is not None:
            replace(module, name, replacement)
    command.train(args)

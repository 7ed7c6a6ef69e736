"""The training command: ``openrlhf-dbb train``, also ``deepspeed --module openrlhf_dbb.cli.train_grpo``.

The deepspeed launcher starts one process per device. OpenRLHF needs a single driver, so all processes but the first
leave at once. Their number becomes the number of DeepSpeed ranks.
"""

import functools
import logging
import os
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from openrlhf_dbb.driver import interrupt
from openrlhf_dbb.secrets import mask_process
from openrlhf_dbb.terminal import exit_code, prepare_streams, print_error, say

if TYPE_CHECKING:
    from openrlhf_dbb.driver.prepare import Prepared
    from openrlhf_dbb.driver.ray_session import RayStart

_LAUNCHER_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "CROSS_RANK", "CROSS_SIZE",
    "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
REFUSED = 2


def main(argv: list[str] | None = None) -> int:
    """Train; return 0 done, 1 the training failed, 2 the input is refused, 130 interrupted."""
    began = time.monotonic()
    if int(os.environ.get("RANK", "0")) != 0:
        return 0
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    hosts = int(os.environ.get("CROSS_SIZE", "1"))
    for variable in _LAUNCHER_VARIABLES:
        os.environ.pop(variable, None)
    _leave_out_warnings()

    from openrlhf_dbb.driver import (
        arguments,
        checks,
        hub,
        prepare,
        printed,
        progress_line,
        ray_session,
    )
    from openrlhf_dbb.errors import RunError, UsageError
    from openrlhf_dbb.storage import StoreError

    try:
        if hosts > 1:
            raise UsageError(
                f"the deepspeed launcher was given {hosts} hosts, but Ray places a run's processes: see Several hosts "
                f"in docs/scale.md, and give --actor.num_nodes {hosts}"
            )
        settings = arguments.parse(sys.argv[1:] if argv is None else argv, world_size=world_size)
        checks.check(settings)
        resumed = prepare.find(settings)
        ray_start = None if settings.args.dry_run else ray_session.RayStart(settings)
        with progress_line.waiting("reading data and model, trying the reward"):
            prepared = prepare.prepare(settings, resumed)
            if ray_start is not None:
                folder = Path(prepared.settings.args.ckpt.path)
                prepared.notes.extend(ray_start.check_hosts(folder))
                hub.fetch_models(prepared.settings.args)
            prepared = prepare.begin(prepared)
    except (UsageError, StoreError, RunError) as error:
        print_error(f"error: {error}")
        return 1 if isinstance(error, RunError) else REFUSED
    if ray_start is None:
        print(printed.configuration(prepared.settings), printed.plan(prepared), sep="\n")
        print("dry run: all checks passed, nothing was started or stored")
        return 0
    return _train(prepared, ray_start, began)


def _leave_out_warnings() -> None:
    """Leave out warnings about which nobody who trains can do anything."""
    # torch imports a package that OpenRLHF pins.
    warnings.filterwarnings("ignore", message="The pynvml package is deprecated")
    # transformers does the right thing with a setting in the files of many models.
    beginning = "Ignoring clean_up_tokenization_spaces"
    tokenizers = logging.getLogger("transformers.tokenization_utils_tokenizers")
    tokenizers.addFilter(lambda record: not record.getMessage().startswith(beginning))


def _train(prepared: "Prepared", ray_start: "RayStart", began: float) -> int:
    """Launch a prepared training, and return the exit code."""
    from openrlhf_dbb.driver import last_words, launch, printed, ray_session, summary

    if prepared.run is not None:
        interrupt.say(functools.partial(printed.unfinished, prepared))
        last_words.leave(printed.ended_silently(prepared))
    say(printed.plan(prepared))
    try:
        progress = launch.launch(prepared, ray_start)
        if prepared.run is not None:
            say(summary.summary(prepared, progress, time.monotonic() - began))
    except BaseException as error:
        code = _code_of(error, prepared)
        if code is None:
            raise
        return code
    finally:
        ray_session.stop()
    return 0


def _code_of(error: BaseException, prepared: "Prepared") -> int | None:
    """Say how a training ended; return the exit code, or None for an error that is to be raised."""
    from openrlhf_dbb.driver import printed, watching
    from openrlhf_dbb.errors import RunError, UsageError
    from openrlhf_dbb.storage import StoreError

    if isinstance(error, watching.PartDied):
        traces = printed.keep_trace(prepared.settings)
        print_error(f"error: {error}; {printed.unfinished(prepared)}; traces are in {traces}")
        return 1
    if prepared.run is not None:
        print_error(printed.unfinished(prepared))
    if isinstance(error, KeyboardInterrupt):
        return error.args[0] if error.args else 130
    # Ray hands over the exceptions of an actor with the actor's traceback in their text.
    if isinstance(error, (UsageError, RunError, StoreError)):
        print_error(f"error: {getattr(error, 'cause', error)}")
        return 1
    return None


def command(argv: list[str] | None = None) -> NoReturn:
    """Train, and end this process with the exit code of :func:`main`."""
    prepare_streams()
    mask_process()
    interrupt.install()
    code = exit_code(lambda: main(argv))
    if code:
        # Ray may still be starting, or wait for a host that is gone: an orderly end would take long.
        sys.stderr.flush()
        interrupt.kill_children()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    command()

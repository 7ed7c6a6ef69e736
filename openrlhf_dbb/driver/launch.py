"""Runs OpenRLHF's training with our classes, watches its actors, and shows its progress."""

import _thread
import functools
import threading
import time
from collections.abc import Mapping
from typing import Any

from openrlhf_dbb import presets, upstream
from openrlhf_dbb.actors.progress import COUNTED_BY_ENGINES, Progress
from openrlhf_dbb.driver import fit, interrupt
from openrlhf_dbb.driver.cluster import RayStart
from openrlhf_dbb.driver.light_backend import LightBackend
from openrlhf_dbb.driver.prepare import Prepared
from openrlhf_dbb.driver.progress_line import ProgressLine
from openrlhf_dbb.driver.progress_line import text as progress_text
from openrlhf_dbb.errors import RunError
from openrlhf_dbb.platform import cpu, cuda

POLL_S = 0.5
GRACE_S = 5.0
LOOK_S = 10.0
_GROUPS = {"actor_model_group": "policy", "reference_model_group": "reference", "reward_model_group": "reward model"}


class PartDied(RunError):
    """An actor or an engine of the run is gone."""


def launch(prepared: Prepared, ray_start: RayStart) -> Any:
    """Train, with OpenRLHF's trainer in this process and the models and engines in actors.

    Returns the trainer's last :class:`openrlhf_dbb.actors.progress.Progress`, or None for OpenRLHF alone. Raises
    PartDied, which names the actor that has died, or another exception that ended the training.
    """
    import ray

    with upstream.imports_for_driver():  # seconds, in which Ray starts
        from openrlhf_dbb.actors.policy_actor import PolicyActor
        from openrlhf_dbb.actors.trainer import PosteriorTrainer
        from openrlhf_dbb.actors.vllm_actor import PlatformRolloutActor, StrictRolloutActor
    ray_start.wait()
    rollout_class = PlatformRolloutActor if prepared.run is None else StrictRolloutActor
    rollout_actor = engines(ray.remote(rollout_class), prepared)
    if prepared.run is None:
        return upstream.run(prepared.settings.openrlhf_args(), rollout_actor=rollout_actor, get_strategy=LightBackend)
    policy = ray.remote(num_gpus=1, **fit.actor_options(prepared.settings.args, prepared.shape))(PolicyActor)
    return train(prepared, PosteriorTrainer, rollout_actor, policy)


def engines(rollout_actor: Any, prepared: Prepared) -> Any:
    """Return the actor class of the engines with vLLM's arguments, which OpenRLHF does not set."""
    args = prepared.settings.args
    options = fit.actor_options(args, prepared.shape)
    arguments: dict[str, Any] = {"trust_remote_code": args.trust_remote_code}
    if cpu.active():
        arguments |= cpu.engine_arguments(fit.engine_arguments(args, prepared.shape))
        if args.ds.param_dtype == "fp32":
            arguments["dtype"] = "float32"
    elif prepared.settings.preset != presets.NONE:
        arguments |= cuda.engine_limits(args)
    return upstream.with_more(rollout_actor, options, arguments)


def train(prepared: Prepared, trainer_class: Any, rollout_actor: Any, policy_actor: Any) -> Any:
    """Train with these classes, the last two of Ray actors; return and raise as :func:`launch`."""
    import ray

    class Trainer(trainer_class):
        def fit(self, global_step: int = 0) -> None:
            interrupt.raise_from_now_on()
            super().fit(global_step)

    run, args = prepared.run, prepared.settings.openrlhf_args()
    assert run is not None
    progress = Progress()  # its clock begins with the engines
    trainer = upstream.InThisProcess(
        Trainer,
        store_url=prepared.store_url,
        run_uuid=run.uuid,
        checkpoint=prepared.checkpoint,
        rows=prepared.prompts.rows,
        sources=prepared.prompts.sources,
        benchmarks=prepared.benchmarks,
        progress=progress,
    )
    verbose = prepared.settings.args.verbose
    try:
        with Watch(trainer, progress), upstream.quiet(verbose):
            upstream.run(
                args,
                trainer=trainer,
                rollout_actor=rollout_actor,
                policy_actor=policy_actor,
                get_strategy=functools.partial(LightBackend, loads=prepared.checkpoint),
                bars=verbose,
            )
            return trainer.made.finish()
    except ray.exceptions.RayError as error:
        died = find_dead(_parts(trainer.made)) if trainer.made is not None else None
        if died is None:
            raise
        raise PartDied(died) from error


def find_dead(parts: Mapping[str, Any], wait_s: float = LOOK_S) -> str | None:
    """Return a line about the actors that have died.

    None if none has died, and if one could not be made: its exception says more.
    """
    import ray
    from ray._private.state import actors  # what Ray documents needs its dashboard

    # Ray's list of actors learns of a lost host too late, so each actor is asked. A busy rank answers after ``wait_s``.
    calls = {actor.__ray_ready__.remote(): name for name, actor in parts.items()}
    answered, _ = ray.wait(list(calls), num_returns=len(calls), timeout=wait_s) if calls else ([], [])
    dead = []
    for call in answered:
        try:
            ray.get(call)
        except ray.exceptions.RayError as error:
            if getattr(error, "actor_init_failed", False):
                return None
            dead.append(calls[call])
    if not dead:
        return None
    hosts, named = {node["NodeID"]: node["NodeManagerHostname"] for node in ray.nodes()}, []
    for name in dead:
        about = actors(parts[name]._actor_id.hex())
        host, address = hosts[about["Address"]["NodeID"]], about["Address"]["IPAddress"]
        named.append(f"{name} (process {about['Pid']} on host {host} ({address}))")
    return f"{' and '.join(named)} has died: killed or crashed, perhaps for want of memory (see dmesg on that host)"


def _parts(trainer: Any) -> dict[str, Any]:
    """Return the actors that a run needs, by name."""
    parts = {f"vLLM engine {number}": engine for number, engine in enumerate(trainer.vllm_engines)}
    for name, called in _GROUPS.items():
        group = getattr(trainer, name)
        handlers = group._actor_handlers if group is not None else ()
        parts |= {f"rank {rank} of the {called}": handler for rank, handler in enumerate(handlers)}
    return parts


class Watch:
    """Shows progress within its block, and ends the wait in the main thread when an engine has died that it misses."""

    def __init__(self, trainer: upstream.InThisProcess, progress: Progress) -> None:
        self._trainer, self._progress = trainer, progress
        self._error: Exception | None = None
        self._done = threading.Event()
        self._warned: set[str] = set()
        self._thread = threading.Thread(target=self._show, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, _: object, ended_by: BaseException | None, __: object) -> None:
        self._done.set()
        self._thread.join(timeout=10)
        if self._error is not None and isinstance(ended_by, KeyboardInterrupt):
            raise self._error from None

    def _show(self) -> None:
        import ray

        line, asked, unfinished = ProgressLine(), dict[Any, Any](), dict[Any, int]()
        while not self._done.wait(POLL_S):
            try:
                for engine in self._trainer.made.vllm_engines if self._trainer.made is not None else ():
                    call = asked.pop(engine, None) or engine.get_num_unfinished_requests.remote()
                    if ray.wait([call], timeout=0)[0]:
                        unfinished[engine] = ray.get(call)  # raises if the engine has died
                    else:
                        asked[engine] = call
            except ray.exceptions.RayError as error:
                # The main thread mostly sees the same error, with more to say.
                if not self._done.wait(GRACE_S):
                    self._error = error
                    interrupt.raise_from_now_on()
                    _thread.interrupt_main()
                break
            self._draw(line, sum(unfinished.values()))
        self._draw(line, 0, last=True)

    def _draw(self, line: ProgressLine, unfinished: int, *, last: bool = False) -> None:
        progress, trainer, done = self._progress, self._trainer.made, None
        if progress.phase in COUNTED_BY_ENGINES and unfinished:
            done = max(progress.size - unfinished, 0)  # an engine does not count requests that it has not taken yet
        for kind, warning in (trainer.warnings() if trainer is not None else {}).items():
            if kind not in self._warned:
                self._warned.add(kind)
                line.warn(warning)
        line.show(progress_text(progress, done, time.monotonic()), last=last)

"""Runs OpenRLHF's training with our classes."""

import functools
from typing import Any

from openrlhf_dbb import upstream
from openrlhf_dbb.actors.progress import Progress
from openrlhf_dbb.driver import interrupt, recorded
from openrlhf_dbb.driver.checks import gpus_needed
from openrlhf_dbb.driver.light_backend import LightBackend
from openrlhf_dbb.driver.prepare import Prepared
from openrlhf_dbb.driver.ray_session import RayStart
from openrlhf_dbb.driver.watching import PartDied, find_dead, parts_of, watching
from openrlhf_dbb.platform import cuda
from openrlhf_dbb.platform.actor_start import started_actors
from openrlhf_dbb.platform.ray_start import find_lost


def launch(prepared: Prepared, ray_start: RayStart) -> Any:
    """Train, with OpenRLHF's trainer in this process and the models and engines in actors.

    Returns:
        The trainer's last :class:`openrlhf_dbb.actors.progress.Progress`; None for OpenRLHF alone.

    Raises:
        PartDied: an actor has died, or Ray has lost hosts that the run needs; it names them.
        Exception: another one that ended the training.
    """
    import ray

    with upstream.imports_for_driver():  # seconds, in which Ray starts
        from openrlhf_dbb.actors.policy_actor import PolicyActor
        from openrlhf_dbb.actors.trainer import PosteriorTrainer
        from openrlhf_dbb.actors.vllm_actor import (
            PlatformRolloutActor,
            StrictRolloutActor,
        )
    ray_start.wait()
    with started_actors():
        if prepared.run is not None:
            policy_actor = ray.remote(num_gpus=1)(PolicyActor)
            return train(prepared, PosteriorTrainer, ray.remote(StrictRolloutActor), policy_actor)
        actor = ray.remote(PlatformRolloutActor)
        return upstream.run(
            prepared.settings.openrlhf_args(),
            rollout_actor=upstream.with_more(actor, **prepared.engine_arguments),
            get_strategy=functools.partial(LightBackend, threads=prepared.threads),
        )


def train(prepared: Prepared, trainer_class: Any, rollout_actor: Any, policy_actor: Any) -> Any:
    """Train with these classes, the last two of Ray actors; return and raise as :func:`launch`."""
    import ray

    class Trainer(trainer_class):
        def fit(self, global_step: int = 0) -> None:
            interrupt.raise_from_now_on()
            super().fit(global_step)

    args = prepared.settings.openrlhf_args()
    run = prepared.run
    assert run is not None
    progress = Progress(has_end_token=prepared.has_end_token)  # its clock begins with the engines
    if prepared.record is not None:
        progress.enter("starting the policy")
    trainer = upstream.InThisProcess(
        Trainer,
        store_url=prepared.store_url,
        run_uuid=run.uuid,
        checkpoint=prepared.checkpoint,
        rows=prepared.prompts.rows,
        sources=prepared.prompts.sources,
        benchmarks=prepared.benchmarks,
        recorder=recorded.recorder(prepared.settings, prepared.about),
        record=prepared.record,
        progress=progress,
    )
    get_strategy = functools.partial(
        LightBackend,
        loads=prepared.checkpoint,
        threads=prepared.threads,
    )
    verbose = prepared.settings.args.verbose
    rollout_actor = upstream.with_more(
        rollout_actor,
        **prepared.engine_arguments,
        gives_up_weights=cuda.gives_up_weights(args),
    )
    gpus = gpus_needed(args)
    try:
        with watching(trainer, progress, gpus), upstream.quiet(verbose):
            upstream.run(
                args,
                trainer=trainer,
                rollout_actor=rollout_actor,
                policy_actor=policy_actor,
                get_strategy=get_strategy,
                bars=verbose,
                tokenizer=prepared.tokenizer,
            )
            return trainer.made.finish()
    except ray.exceptions.RayError as error:
        died = find_lost()
        if died is None and trainer.made is not None:
            died = find_dead(parts_of(trainer.made))
        if died is None:
            raise
        raise PartDied(died) from error

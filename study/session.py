"""Trainings one after another in the same Ray actors, so that start-up is paid once.

Only processes outlive a run: Ray's, vLLM's engine, and what they have imported. All that could carry over from one run
to the next is made anew: the policy and its optimizer are loaded from the run's own model and sent to vLLM before the
first rollout, random streams start from the run's own seed, vLLM's prefix cache is dropped, and trainer, estimator,
data order and trackers are new objects.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from openrlhf_dbb import upstream
from openrlhf_dbb.driver import (
    arguments,
    checks,
    launch,
    prepare,
    printed,
    ray_session,
    summary,
    watching,
)
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.platform import ray_start

_A_RUNS_OWN = ("model", "seed", "remote_rm_url", "logprobs_mode", "max_logprobs")
"""Arguments of a vLLM engine that may differ between the runs of a session: each engine gives log-probs if asked."""
_LIMITS = ("max_num_seqs", "kv_cache_memory_bytes")
"""Arguments of which a later run may want less than the session's engine has."""


class _Kept:
    """Creates objects for the first run, and returns the same ones to later runs, in the same order.

    ``reuse`` is called with the object, the keyword arguments of its creation, and the arguments of the new run.
    """

    def __init__(
        self, create: Callable[..., Any], reuse: Callable[..., None] | None = None
    ) -> None:
        self._create, self._reuse = create, reuse
        self._made: list[tuple[Any, dict[str, Any]]] = []
        self._waiting: list[tuple[Any, dict[str, Any]]] = []

    def begin_run(self) -> None:
        self._waiting = list(self._made)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._waiting:
            thing, made_with = self._waiting.pop(0)
            if self._reuse:
                self._reuse(thing, made_with, *args, **kwargs)
            return thing
        self._made.append((self._create(*args, **kwargs), kwargs))
        return self._made[-1][0]


class _KeptActors(_Kept):
    """Stands in for a Ray actor class."""

    def __init__(self, actor_class: Any, reuse: Callable[..., None] | None = None) -> None:
        super().__init__(
            lambda *args, **kwargs: actor_class.options(**self._options).remote(*args, **kwargs),
            reuse,
        )
        self._options: dict[str, Any] = {}

    def options(self, **options: Any) -> _KeptActors:
        self._options = options
        return self

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        return self(*args, **kwargs)


class Session:
    """Trains command lines one after another in one Ray cluster. Not thread-safe.

    The runs of a session may differ in everything except vLLM's engine flags and the number of ranks. A model of
    another shape than the last run's gets new actors.
    """

    def __init__(self) -> None:
        self._kept: tuple[_KeptActors, _KeptActors, _Kept] | None = None
        self._shape = ""

    def train(self, argv: Sequence[str]) -> None:
        """Train as ``openrlhf_dbb.cli.train_grpo`` does with the same arguments, and print the same.

        After UsageError, RunError or StoreError the next run can be trained. After another error close the session.
        """
        began = time.monotonic()
        settings = arguments.parse(list(argv))
        checks.check(settings)
        prepared = prepare.prepare(settings, prepare.find(settings))
        prepared = prepare.begin(prepared)
        settings = prepared.settings
        if prepared.run is None:
            raise UsageError(
                "--estimator none records no run in the store, which a session needs; use for instance point"
            )
        print(printed.plan(prepared), flush=True)
        shape = _shape(settings.args.actor.model_name_or_path)
        if shape != self._shape and self._kept is not None:
            self.close()
        if self._kept is None:
            self._shape = shape
            ray_start.prepare()
            ray_session.start(settings)
            self._kept = _actors()
        rollouts, policy, groups = self._kept
        for kept in self._kept:
            kept.begin_run()
        with upstream.imports_for_driver():
            import openrlhf.cli.train_ppo_ray as command
            from openrlhf.trainer.ray import launcher, vllm_engine

            from openrlhf_dbb.actors.trainer import PosteriorTrainer
        for module in (command, launcher, vllm_engine):  # each has its own copy of Ray's function
            upstream.replace(module, "placement_group", groups)
        try:
            progress = launch.train(prepared, PosteriorTrainer, rollouts, policy)
        except watching.PartDied:
            self.close()
            raise
        print(summary.summary(prepared, progress, time.monotonic() - began), flush=True)

    def close(self) -> None:
        """Stop all actors; the next run starts new ones."""
        ray_session.stop()
        self._kept = None


def _shape(model: str) -> str:
    """What an engine is built for: the model's configuration, or the name of one that is not here."""
    config = Path(model) / "config.json"
    return config.read_text(encoding="utf-8") if config.is_file() else model


def _actors() -> tuple[_KeptActors, _KeptActors, _Kept]:
    import ray
    from ray.util import placement_group

    with upstream.imports_for_driver():
        from study.shared_actors import SharedPolicy, SharedRollouts

    return (
        _KeptActors(ray.remote(SharedRollouts), _next_rollouts),
        _KeptActors(ray.remote(num_gpus=1)(SharedPolicy)),
        _Kept(placement_group),
    )


def _next_rollouts(actor: Any, made_with: dict[str, Any], **wanted: Any) -> None:
    import ray

    for name, value in wanted.items():
        fits = name in _LIMITS and value < made_with.get(name, 0)
        if name not in _A_RUNS_OWN and value != made_with.get(name) and not fits:
            raise UsageError(
                f"this run needs a vLLM engine with {name} = {value!r}, but the session's has {made_with.get(name)!r}; "
                "train it on its own"
            )
    ray.get(actor.begin.remote(wanted["seed"], wanted["remote_rm_url"]))

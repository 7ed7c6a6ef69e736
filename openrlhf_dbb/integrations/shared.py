"""Serves both integrations: allowed releases, prompts as text, runs and their checkpoints, draws by a strategy."""

import dataclasses
import importlib.metadata
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from openrlhf_dbb import storage
from openrlhf_dbb.core import KEEP
from openrlhf_dbb.core.posteriors import Posteriors, as_estimator
from openrlhf_dbb.core.step import Floats, Key, Scored, StepExtras
from openrlhf_dbb.core.strategies import STRATEGIES, Drawn, Plain, RolloutStrategy, RunFacts, varies
from openrlhf_dbb.estimators import FORMS, RewardEstimator

# The integrations override methods that another release may change. The extras in setup.py allow the same releases.
ALLOWED = {"trl": ">=1.16,<1.17", "verl": ">=0.9.1,<0.10"}

_log = logging.getLogger(__name__)

SAVED = "posteriors.json"  # in a checkpoint; no pickle, which could run code


def check_release(distribution: str) -> None:
    """Refuse a release of a trainer that its integration was not written for."""
    from packaging.specifiers import SpecifierSet  # the command import uses this module without the extras

    allowed, installed = ALLOWED[distribution], importlib.metadata.version(distribution)
    if installed not in SpecifierSet(allowed):
        raise ImportError(f"{distribution} {installed} is installed; pip install '{distribution}{allowed}'")


def text_of(prompt: Any) -> str:
    """Return a prompt as one text: a single user message as its text, other messages as JSON; ValueError for images."""
    # The chat template is not applied: some templates insert the date, so that every day would have new prompts.
    if isinstance(prompt, str):
        return prompt
    messages = [{key: value for key, value in dict(message).items() if value is not None} for message in prompt]
    match messages:
        case [{"role": "user", "content": str(content), **other}] if not other:
            return content
    try:
        return json.dumps(messages, ensure_ascii=False, sort_keys=True)
    except TypeError as error:
        raise ValueError(f"a prompt's messages are no text, by which posteriors tell prompts apart ({error})") from None


def label_of(label: Any) -> str:
    """Return a label as text: text as it is, "" for None, other values as JSON."""
    if label is None or isinstance(label, str):
        return label or ""
    return json.dumps(label, ensure_ascii=False, sort_keys=True, default=_plain)


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)  # Parquet gives numpy's arrays and numbers


def run_exists(store: storage.PosteriorStore | str | None, name: str) -> bool:
    with nullcontext(store) if isinstance(store, storage.PosteriorStore) else storage.open_store(store) as opened:
        return any(run.name == name for run in opened.runs())


@dataclass(frozen=True)
class Settings:
    """What an integration adds to its trainer's own settings, by the same names everywhere; see docs/trl.md."""

    estimator: str | RewardEstimator = "dbb"
    parameters: Mapping[str, Any] | None = None
    form: str | None = None
    strategy: str = "plain"
    strategy_parameters: Mapping[str, Any] = field(default_factory=dict)
    store: storage.PosteriorStore | str | None = None
    run_name: str | None = None
    warm_start: str | None = None
    warm_start_weight: float = 1.0
    warm_start_store: storage.PosteriorStore | str | None = None
    take_over: bool = False
    keep_rollouts: int | None = KEEP

    @cached_property
    def built(self) -> tuple[RewardEstimator, RolloutStrategy]:
        """The estimator and the strategy; ValueError if a name or a parameter is wrong, or they do not fit together."""
        estimator = as_estimator(self.estimator, self.parameters)
        strategy = STRATEGIES.build(self.strategy, **self.strategy_parameters)
        FORMS.get(self.form or "group_norm")
        # A strategy that skips prompts or judges groups would do nothing here.
        if not isinstance(strategy, Plain) and not (strategy.draws and estimator.belief.can_predict()):
            raise ValueError(
                f"strategy {self.strategy!r} with {estimator.name!r}: use posterior, and an estimator that forecasts"
            )
        return estimator, strategy


class Steps:
    """The steps of a run in a trainer: prompts, scores, checkpoints."""

    def __init__(
        self, settings: Settings, name: str, resume: bool, keys: Sequence[Key], facts: RunFacts, **about: Any
    ) -> None:
        """Create the run, or resume it with its estimator; refuse another one.

        ``keys`` are text and label of each row of the data set. ``about`` is of :meth:`Posteriors.create`.
        """
        (estimator, self._strategy), self._keys, self._facts = settings.built, keys, facts
        prompts, labels = zip(*dict.fromkeys(keys), strict=True)
        if resume:
            self.posteriors = Posteriors.resume(settings.store, name, prompts, labels, take_over=settings.take_over)
        else:
            start = ("warm_start", "warm_start_weight", "warm_start_store")
            options = about | {option: getattr(settings, option) for option in start}
            options["config"] = json.loads(json.dumps(about.get("config", {}), default=str))  # a trainer's own objects
            self.posteriors = Posteriors.create(settings.store, name, prompts, labels, estimator=estimator, **options)
        if self.posteriors.estimator != estimator:
            self.posteriors.close()
            begun = self.posteriors.estimator
            raise ValueError(f"run {name!r} was begun with {begun}, not {estimator}: use that, or warm_start={name!r}")
        self._row_of = {self.posteriors.prompt_ids[key]: row for row, key in reversed([*enumerate(keys)])}
        self._start_over()

    def _start_over(self) -> None:
        self._sampler, self._left = self._strategy.sampler(self._facts), len(self._keys)
        self._drawn: dict[Key, Drawn] = {}

    def draw(self) -> list[int]:
        """Draw the next step's prompts; return their rows in the data set."""
        rows: list[int] = []
        self._drawn = {}
        for _ in range(self._facts.groups):
            if not self._left:
                note = self._sampler.note
                self._sampler.end_pass()
                self._left = len(self._keys)
                if self._sampler.note != note:
                    _log.warning("%s", self._sampler.note)
            drawn = self._sampler.next_prompt(self.posteriors.predictive)
            self._left -= 1
            rows.append(self._row_of[drawn.prompt_id])
            self._drawn[self._keys[rows[-1]]] = drawn
        return rows

    def observe(
        self, keys_R: Sequence[Key], rewards_R: Floats, scores_R: Floats, form: str, extras: StepExtras
    ) -> Scored:
        """Do the next step; return it with the advantages that are trained with, weighted and whitened."""
        prompts, labels = zip(*keys_R, strict=True)
        if self._drawn:
            drawn_R = [self._drawn[key] for key in keys_R]
            inclusion, weights = [drawn.inclusion for drawn in drawn_R], [drawn.weight for drawn in drawn_R]
            extras = dataclasses.replace(extras, inclusion=inclusion, weights=weights)
        step = self.posteriors.step + 1
        scored = self.posteriors.observe(step, prompts, labels, rewards_R, scores=scores_R, form=form, extras=extras)
        for key, drawn in self._drawn.items():
            scores_N = scores_R[[other == key for other in keys_R]]
            if not np.isnan(scores_N).all():
                self._sampler.observe(drawn, varies(scores_N))
        self._sampler.end_step()
        scored.metrics.update(self._sampler.metrics())
        tokens_R = np.where(np.isnan(rewards_R), 0, np.asarray(extras.tokens)) * np.asarray(extras.trained)
        if not (FORMS.get(form).whitened and tokens_R.any()):
            return scored
        mean = np.average(scored.advantages, weights=tokens_R)
        variance = np.average((scored.advantages - mean) ** 2, weights=tokens_R)
        white_R = (scored.advantages - mean) / np.sqrt(max(variance, 1e-8))  # OpenRLHF's floor
        return dataclasses.replace(scored, advantages=np.where(tokens_R > 0, white_R, scored.advantages))

    def save(self, folder: Path) -> None:
        """Write what a resume needs into a checkpoint's folder, once every step up to here is durable."""
        folder.mkdir(parents=True, exist_ok=True)
        self.posteriors.checkpoint(self.posteriors.step, folder.name)
        saved = {"run": self.posteriors.run.record.uuid, "step": self.posteriors.step, "tag": folder.name}
        drawn = {"strategy": self._sampler.state(), "left": self._left}
        (folder / SAVED).write_text(json.dumps(saved | drawn, default=lambda random: random.bit_generator.state))

    def saved_in(self, folder: Path) -> dict[str, Any]:
        """Return what :meth:`save` has written; refuse a checkpoint of another run, or of steps that were undone."""
        record = self.posteriors.run.record
        begin = f"begin another run with the checkpoint as its model and warm_start={record.name!r}"
        try:
            saved: dict[str, Any] = json.loads((folder / SAVED).read_text(encoding="utf-8"), object_hook=_decoded)
            run, step, tag = str(saved["run"]), int(saved["step"]), str(saved["tag"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"checkpoint {folder} was not saved with posteriors ({error}): {begin}") from None
        if run != record.uuid:
            raise ValueError(f"checkpoint {folder} belongs to run {run}, not to {record.name!r}: {begin}")
        # The store forgets a checkpoint when the run goes back behind it.
        if (step, tag) not in self.posteriors.store.checkpoints(record):
            raise ValueError(f"checkpoint {folder} is of steps that run {record.name!r} has undone; use an older one")
        return saved

    def go_back(self, checkpoint: Path | None, folder: Path) -> None:
        """Go back to a checkpoint, bit for bit; without one start over, unless there are some outside ``folder``."""
        record, recorded = self.posteriors.run.record, self.posteriors.store.checkpoints(self.posteriors.run.record)
        if checkpoint is None and len(recorded) > 1:  # a kill may have cut the only one short
            tags = ", ".join(tag for _, tag in recorded)
            raise ValueError(
                f"run {record.name!r} has recorded {tags}, and no checkpoint in {folder} is whole: name one"
            )
        self._start_over()
        if checkpoint is None:
            self.posteriors.roll_back(0)
            return
        saved = self.saved_in(checkpoint)
        if saved["strategy"].keys() != self._sampler.state().keys():
            raise ValueError(f"checkpoint {checkpoint} is of another strategy; resume it with its own")
        self._sampler.load(saved["strategy"])
        self._left = saved["left"]
        self.posteriors.roll_back(int(saved["step"]))


def _decoded(values: dict[str, Any]) -> Any:
    if "bit_generator" not in values:
        return values
    random = np.random.default_rng()
    random.bit_generator.state = values
    return random

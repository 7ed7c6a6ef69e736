"""Refusals of every training: names, folders, checkpoints, data. A rule may rely on those before it."""

import re

from openrlhf_dbb.core.rules import Refusal, Rules
from openrlhf_dbb.data import TRAINING
from openrlhf_dbb.driver.arguments import MODEL_FLAG, Settings

RUN: Rules[Settings] = Rules()

_MISSING = "missing; name one, or leave out --preset none"
_TOO_LOW = "too low; give 1 or more"


@RUN.add
def no_model(settings: Settings) -> Refusal:
    """Nothing to train."""
    if settings.values[MODEL_FLAG]:
        return None
    return f"{settings.shown(MODEL_FLAG)}: {_MISSING}"


@RUN.add
def no_prompts(settings: Settings) -> Refusal:
    """Nothing to train on."""
    if settings.values[TRAINING]:
        return None
    return f"{settings.shown(TRAINING)}: {_MISSING}"


@RUN.add
def name_of_no_folder(settings: Settings) -> Refusal:
    """A run's name names its folders, and stands behind flags."""
    if re.fullmatch(r"(?!\.+$)[\w.+][\w.+-]{,199}", settings.run_name):
        return None
    advice = "it names folders; use letters, digits and . _ + -, no - first, at most 200"
    return f"{settings.shown('run_name')}: {advice}"


@RUN.add
def continued_and_begun(settings: Settings) -> Refusal:
    """A run goes on, or it begins with another run's posteriors."""
    if settings.args.resume is None or settings.args.warm_start is None:
        return None
    both = settings.shown("resume", "warm_start")
    return f"{both}: one continues a run, the other begins a new one; give one of them"


@RUN.add
def two_beginnings(settings: Settings) -> Refusal:
    """Posteriors begin with known pass rates or with another run's."""
    if not settings.args.data.pass_rate_key or not settings.args.warm_start:
        return None
    both = settings.shown("data.pass_rate_key", "warm_start")
    return f"{both}: both say what a run begins with; give one of them"


@RUN.add
def one_checkpoint(settings: Settings) -> Refusal:
    """A kill while OpenRLHF replaces the only checkpoint would leave none."""
    if settings.args.ckpt.max_num >= 2:
        return None
    reason = "OpenRLHF deletes an old checkpoint before the new one is whole; give 2 or more"
    return f"{settings.shown('ckpt.max_num')}: {reason}"


@RUN.add
def no_adapter_to_save(settings: Settings) -> Refusal:
    """Only a run with adapters can save them."""
    if not settings.args.ckpt.save_adapter or settings.args.ds.lora.rank:
        return None
    advice = "there are no adapters; give --ds.lora.rank, or leave it out"
    return f"{settings.shown('ckpt.save_adapter')}: {advice}"


@RUN.add
def universal_checkpoint(settings: Settings) -> Refusal:
    """A universal checkpoint is a converted copy, which no manifest of ours covers."""
    if not settings.args.ds.use_universal_ckpt:
        return None
    flag = settings.shown("ds.use_universal_ckpt")
    return f"{flag}: a run resumes from its own checkpoints only; leave it out"


@RUN.add
def logging_never(settings: Settings) -> Refusal:
    """OpenRLHF divides by the steps between logs."""
    if settings.args.logger.logging_steps >= 1:
        return None
    return f"{settings.shown('logger.logging_steps')}: {_TOO_LOW}"


@RUN.add
def two_templates(settings: Settings) -> Refusal:
    """OpenRLHF would apply the chat template alone, in silence."""
    if not settings.args.data.input_template or not settings.args.data.apply_chat_template:
        return None
    both = settings.shown("data.input_template", "data.apply_chat_template")
    return f"{both}: a prompt gets one of them; leave one out"


@RUN.add
def endless_queue(settings: Settings) -> Refusal:
    """Python takes a queue of size 0 as one without an end."""
    if settings.args.train.async_queue_size >= 1:
        return None
    return f"{settings.shown('train.async_queue_size')}: {_TOO_LOW}"

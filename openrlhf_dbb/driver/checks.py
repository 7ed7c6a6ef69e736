"""What the arguments alone tell: values and combinations that cannot work, each refused with the reason.

What a single estimator or rollout strategy allows is checked in its own file, when the command line is parsed.
"""

from __future__ import annotations

import json
import re
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import estimators
from estimators import FORMS, RewardEstimator
from openrlhf_dbb import presets, upstream
from openrlhf_dbb.driver import validation
from openrlhf_dbb.driver.flags import NO_ESTIMATOR
from openrlhf_dbb.driver.settings import Settings
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.methods import CONSTANT_LENGTH
from openrlhf_dbb.platform import cpu, cuda

FILES = (".json", ".jsonl", ".csv", ".parquet", ".arrow")
_FORM = "algo.advantage.estimator"
_CHAT_TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")

# Flag -> the value that asks for nothing, and why any other one would do nothing.
_WITHOUT_EFFECT: dict[str, tuple[Any, str]] = {
    "algo.advantage.gamma": (1.0, "an estimator's advantages are not discounted"),
    "algo.advantage.lambd": (1.0, "it belongs to gae, which needs a critic"),
    "reward.clip_range": ((-10, 10), "it would clip advantages, not rewards, and is not applied"),
    "critic.save_value_network": (False, "an estimator takes the critic's place"),
    "actor.muon.ns_steps": (5, "DeepSpeed's Muon always takes 5 steps"),
}
# OpenRLHF's forms in which an estimator has no place, why, and what to use.
_NO_PLACE = {
    "reinforce": "it subtracts no baseline of the prompt; use reinforce_baseline",
    "flash_reinforce": "its baseline is the mean of the whole batch, for one rollout a prompt; with the prompt's own "
    "in its place it is dr_grpo: use that",
    "gae": "its baseline is a critic; use group_norm",
}


def check(settings: Settings) -> None:
    """Refuse what cannot work.

    Raises:
        UsageError: naming the flags, the values, and what to do.
    """
    args = settings.args
    if settings.on_cpu:
        if presets.load(settings.preset).needs_cuda:
            raise UsageError(
                f"--preset {settings.preset} needs CUDA, and there is none here; use --preset tiny, or name a model "
                "and data of yours"
            )
        cpu.check_flags(args)
    else:
        cuda.check_flags(args, settings.machine.gpus)
    _check_start(settings)
    _check_places(args)
    _check_probes(settings)
    if settings.estimator == NO_ESTIMATOR:
        _check_openrlhf_alone(settings)
        return
    _check_strategy(settings)
    if args.replay.samples:
        _check_replay(settings)
    if args.actor.loss_agg_mode == CONSTANT_LENGTH:
        _check_constant_length(args)
    _check_estimator(settings)
    _check_models(settings)
    _check_reward(settings)
    _check_loss(settings)
    _check_data(settings)
    _check_rollouts(args)
    _check_lag(args)
    _check_batches(args)
    _check_intervals(args)
    _check_evaluations(settings)
    _check_checkpoints(settings)


def _check_start(settings: Settings) -> None:
    for flag, value in (
        ("actor.model_name_or_path", settings.args.actor.model_name_or_path),
        ("data.prompt_dataset", settings.args.data.prompt_dataset),
    ):
        if not value:
            raise UsageError(f"--{flag} is missing; name one, or leave out --preset none to start from a preset")
    if not re.fullmatch(r"[\w.+-]+", settings.run_name):
        raise UsageError(f"--run_name {settings.run_name!r}: use letters, digits and . _ + - only (it names folders)")
    if settings.args.ds.lora.rank > 0:
        raise UsageError(
            f"--ds.lora.rank {settings.args.ds.lora.rank}: OpenRLHF's weight sync sends adapters under names that vLLM "
            "does not know; train all weights, leave it out"
        )
    if settings.resume is not None and settings.warm_start is not None:
        raise UsageError("--resume continues a run, --warm_start begins a new one; give one of them")
    if not 0 < settings.warm_start_weight <= 1:
        raise UsageError(f"--warm_start_weight {settings.warm_start_weight} is not in (0, 1]")


def _check_places(args: SimpleNamespace) -> None:
    """OpenRLHF asserts this when Ray has started."""
    ranks, engines = args.actor.num_nodes * args.actor.num_gpus_per_node, args.vllm.num_engines or 0
    parallel = args.vllm.tensor_parallel_size
    if args.train.colocate_all and not args.train.async_enable and engines and ranks != engines * parallel:
        raise UsageError(
            f"--train.colocate_all: the policy has {ranks} GPUs (--actor.num_nodes x --actor.num_gpus_per_node), vLLM "
            f"{engines} x {parallel} (--vllm.num_engines x --vllm.tensor_parallel_size); give both as many"
        )


def _check_probes(settings: Settings) -> None:
    args = settings.args
    fraction, samples = args.probe.fraction, args.probe.samples
    if not 0 <= fraction <= 1:
        raise UsageError(f"--probe.fraction {fraction} is not in [0, 1]; 0.1 probes a tenth of the prompts")
    if samples < 2:
        raise UsageError(f"--probe.samples {samples} is below 2: the noise of a single response is unknown")
    if fraction and settings.estimator == NO_ESTIMATOR:
        raise UsageError(f"--probe.fraction {fraction} measures an estimator; --estimator is {NO_ESTIMATOR}, name one")
    if fraction and not _rewards_at_generation(args):
        raise UsageError("--probe.fraction needs rewards at generation; give --reward.remote_url")


def _rewards_at_generation(args: SimpleNamespace) -> bool:
    return bool(args.reward.remote_url or args.train.agent_func_path)


def _check_openrlhf_alone(settings: Settings) -> None:
    args = settings.args
    # OpenRLHF has dynamic filtering of its own, which its switch then asks for.
    known = "dynamic" if args.algo.dynamic_filtering_enable else "plain"
    form = args.algo.advantage.estimator
    for flag, used in (
        (f"--rollout.strategy {args.rollout.strategy}", args.rollout.strategy != known),
        (f"--replay.samples {args.replay.samples}", args.replay.samples),
        (f"--actor.loss_agg_mode {CONSTANT_LENGTH}", args.actor.loss_agg_mode == CONSTANT_LENGTH),
        (f"--{_FORM} {form}", form not in upstream.choices(_FORM)),
        (f"--train.max_rollouts {args.train.max_rollouts}", args.train.max_rollouts is not None),
        (f"--train.max_lag {args.train.max_lag}", args.train.max_lag is not None),
        (f"--eval.benchmarks {args.eval.benchmarks}", args.eval.benchmarks),
        (f"--eval.top_p {args.eval.top_p}", args.eval.top_p != args.rollout.top_p),
    ):
        if used:
            raise UsageError(
                f"{flag} is not OpenRLHF's, which --estimator {NO_ESTIMATOR} leaves as it is; "
                "use --estimator point, its group mean"
            )
    if settings.warm_start is not None:
        raise UsageError(f"--warm_start needs an estimator with a history; --estimator is {NO_ESTIMATOR}")


def _check_strategy(settings: Settings) -> None:
    args, strategy, facts = settings.args, settings.strategy, settings.facts
    name = args.rollout.strategy
    if facts.rollouts < strategy.min_rollouts:
        raise UsageError(
            f"--rollout.strategy {name} looks for groups with different rewards; a group of "
            f"--rollout.n_samples_per_prompt {facts.rollouts} never has them; give {strategy.min_rollouts} or more, or "
            "--rollout.strategy plain"
        )
    if strategy.needs_scores and not _rewards_at_generation(args):
        raise UsageError(f"--rollout.strategy {name} needs rewards at generation; give --reward.remote_url")
    if facts.score_range is not None and not strategy.reads_score_range:
        raise UsageError(f"--algo.dynamic_filtering_enable asks for another --rollout.strategy than {name}; give one")


def _check_replay(settings: Settings) -> None:
    args, replay = settings.args, settings.args.replay
    if not 1 <= replay.samples <= replay.cache:
        raise UsageError(
            f"--replay.samples {replay.samples} is not in [0, {replay.cache}]; --replay.cache {replay.cache} rollouts "
            "of a prompt are kept"
        )
    for flag, used, why in (
        ("train.dynamic_batch_enable", args.train.dynamic_batch_enable, "it makes the micro-batches itself"),
        (
            "algo.advantage.is_correction_level",
            args.algo.advantage.is_correction_level != "off",
            "no log-probs of vLLM are kept",
        ),
        ("algo.kl.use_loss", args.algo.kl.use_loss, "no log-probs of the reference model are kept"),
        ("data.max_images_per_prompt", args.data.max_images_per_prompt, "no images are kept"),
    ):
        if used:
            raise UsageError(f"--{flag} does not go with --replay.samples {replay.samples}: {why}; leave one out")


def _check_constant_length(args: SimpleNamespace) -> None:
    mode = args.actor.loss_agg_mode
    if args.rollout.max_new_tokens is None:
        raise UsageError(f"--actor.loss_agg_mode {mode} divides by a length; give --rollout.max_new_tokens")
    if args.actor.policy_loss_type != "ppo":
        raise UsageError(
            f"--actor.loss_agg_mode {mode} sums over tokens, --actor.policy_loss_type {args.actor.policy_loss_type} "
            "has one ratio a sequence; use ppo"
        )


def _check_estimator(settings: Settings) -> None:
    args = settings.args
    estimator = estimators.build(settings.estimator, **settings.parameters)
    _check_form(settings, estimator)
    group, fewest = args.rollout.n_samples_per_prompt, estimator.min_rollouts
    if group < fewest:
        raise UsageError(
            f"--estimator {settings.estimator} needs --rollout.n_samples_per_prompt {fewest} or more, "
            f"got {group}: one rollout alone has no deviation from its mean; give as many, or --estimator auto, which "
            "has a mean from earlier visits"
        )
    if settings.strategy.draws and not estimator.can_predict():
        raise UsageError(
            f"--rollout.strategy {args.rollout.strategy} draws prompts by what is known of them before a visit, which "
            f"--estimator {settings.estimator} does not keep; use dbb, auto or predicted_prior"
        )
    for flag, used in (
        ("ds.tensor_parallel_size", args.ds.tensor_parallel_size > 1),
        ("ds.ring_attn_size", args.ds.ring_attn_size > 1),
        ("data.max_images_per_prompt", args.data.max_images_per_prompt),
    ):
        if estimator.features == "hidden" and used:
            raise UsageError(
                f"--{estimator.name}.features hidden does not go with --{flag}: each rank of the policy reads whole "
                f"prompts of text; use --{estimator.name}.features text, or leave it out"
            )
    if settings.warm_start is not None and not estimator.state_fields + estimator.shared_fields:
        raise UsageError(f"--warm_start: --estimator {settings.estimator} keeps no history that it could start from")


def _check_form(settings: Settings, estimator: RewardEstimator) -> None:
    advantage = settings.args.algo.advantage
    asked = f"--{_FORM} {advantage.estimator}"
    alone = f"or --estimator {NO_ESTIMATOR} for OpenRLHF's own advantages"
    if advantage.estimator in _NO_PLACE:
        raise UsageError(f"{asked} has no place for an estimator: {_NO_PLACE[advantage.estimator]}, {alone}")
    if advantage.estimator not in FORMS.available():
        raise UsageError(
            f"{asked} cannot be used with --estimator {settings.estimator}; use {', '.join(FORMS.available())}, {alone}"
        )
    form = FORMS.build(advantage.estimator)
    if form.leave_one_out and not estimator.can_leave_one_out():
        raise UsageError(
            f"{asked} scores a rollout by the mean without it, which --estimator {settings.estimator} cannot tell (its "
            "group_weight is None); use dr_grpo, or --estimator dbb"
        )
    if form.whitened and settings.args.replay.samples:
        raise UsageError(
            f"{asked} does not go with --replay.samples {settings.args.replay.samples}: it is whitened over the batch, "
            "and RePO does not say how replayed rollouts would be; use dr_grpo, or leave out the replay"
        )
    if advantage.no_std_norm and not form.whitened:
        raise UsageError(
            f"--algo.advantage.no_std_norm would do nothing: {asked} is not whitened over the batch; leave it out "
            "(dr_grpo divides by no deviation)"
        )


def _check_models(settings: Settings) -> None:
    args = settings.args
    if _given(settings, "critic.model_name_or_path"):  # OpenRLHF has emptied the value
        raise UsageError(
            "--critic.model_name_or_path: an estimator takes the critic's place; leave it out, or train with "
            f"--estimator {NO_ESTIMATOR} --algo.advantage.estimator gae"
        )
    if args.ds.use_universal_ckpt:
        raise UsageError("--ds.use_universal_ckpt: runs are resumed from their own checkpoints; leave it out")
    name = args.actor.model_name_or_path
    experts, vision = ("output_router_logits", "mixture-of-experts model"), ("vision_config", "vision-language model")
    for flag, (key, kind) in (
        ("actor.aux_loss_coef", experts),
        ("ds.experts_implementation", experts),
        ("actor.freeze_visual_encoder", vision),
        ("data.max_images_per_prompt", vision),
    ):
        if attrgetter(flag)(args) and not _may_have(name, key):
            raise UsageError(f"--{flag}: --actor.model_name_or_path {name} is no {kind}; leave it out")


def _may_have(model: str, key: str) -> bool:
    """Whether the configuration of a model has this key; True where it is not a folder here."""
    file = Path(model) / "config.json"
    if not file.is_file():
        return True
    config = json.loads(file.read_text(encoding="utf-8"))
    return key in config or key in config.get("text_config", {})


def _given(settings: Settings, flag: str) -> bool:
    return settings.origin.get(flag) == "command line"


def _check_reward(settings: Settings) -> None:
    args = settings.args
    model, url = args.reward.model_name_or_path, args.reward.remote_url
    if model and url:
        raise UsageError(
            f"--reward.model_name_or_path {model} is not asked where --reward.remote_url {','.join(url)} gives the "
            "rewards; give one of them, the model without a preset that has the other (--preset none)"
        )
    if url == "" or not (model or url):
        raise UsageError("--reward.remote_url is missing; name a reward, or with --preset none a reward model")
    if model:
        if "," in model:
            raise UsageError(
                f"--reward.model_name_or_path {model} names {model.count(',') + 1} models, OpenRLHF asks one; name one"
            )
        support = estimators.build(settings.estimator, **settings.parameters).support
        if support != "real":
            raise UsageError(
                f"--reward.model_name_or_path {model} gives any real number, --estimator {settings.estimator} takes "
                f"scores {'0 and 1' if support == 'binary' else 'in [0, 1]'} only; use --estimator gaussian or point"
            )
    buffer, longest = args.reward.overlong_buffer_len, args.rollout.max_new_tokens or args.data.max_len
    if buffer is not None and not 0 < buffer <= longest:
        raise UsageError(
            f"--reward.overlong_buffer_len {buffer:g} is not above 0 and at most {longest}, the longest response"
        )
    coefficient = args.reward.stop_properly_penalty_coef
    if coefficient is not None and coefficient > 1:
        raise UsageError(f"--reward.stop_properly_penalty_coef {coefficient:g} is above 1; give 0 to 1, or below 0")


def _check_loss(settings: Settings) -> None:
    args = settings.args
    for flag, (harmless, why) in _WITHOUT_EFFECT.items():
        value = attrgetter(flag)(args)
        if value not in (harmless, list(harmless) if isinstance(harmless, tuple) else harmless):
            raise UsageError(f"--{flag}{_shown(value)} would do nothing: {why}; leave it out")
    if not args.actor.muon.nesterov:
        raise UsageError(
            "--actor.muon.no_nesterov would do nothing: DeepSpeed's Muon always has Nesterov momentum; leave it out"
        )
    if _given(settings, "actor.eps_clip") and "actor.eps_clip_low_high" in settings.origin:
        low, high = args.actor.eps_clip_low_high
        raise UsageError(
            f"--actor.eps_clip {args.actor.eps_clip:g} would do nothing: --actor.eps_clip_low_high {low:g} {high:g} "
            f"[{settings.origin['actor.eps_clip_low_high']}] takes its place; give that one"
        )
    if args.actor.dual_clip is not None and args.actor.dual_clip <= 1:
        raise UsageError(f"--actor.dual_clip {args.actor.dual_clip:g} is not above 1; give for instance 3")
    kl, says_0 = args.algo.kl, _given(settings, "algo.kl.init_coef") and args.algo.kl.init_coef == 0
    for flag, used, needs, has in (
        # An explicit 0 switches the KL loss off, as in OpenRLHF's recipe for images.
        ("algo.kl.use_loss", kl.use_loss and not says_0, "--algo.kl.init_coef above 0", kl.init_coef > 0),
        ("algo.kl.target", kl.target, "--algo.kl.init_coef above 0", kl.init_coef > 0),
        ("algo.kl.unbiased_gradient", kl.unbiased_gradient, "--algo.kl.use_loss", kl.use_loss),
    ):
        if used and not has:
            raise UsageError(f"--{flag} would do nothing without {needs}; give both, or neither")
    _check_correction(args.algo.advantage)


def _shown(value: Any) -> str:
    """A value as on the command line; of a switch nothing."""
    values = value if isinstance(value, list) else [] if value is True else [value]
    return "".join(f" {each:g}" for each in values)


def _check_correction(correction: SimpleNamespace) -> None:
    level, mode, gating = (getattr(correction, f"is_correction_{name}") for name in ("level", "mode", "gating"))
    if level == "off":
        return
    if mode == "clip" and (level, gating) != ("token", "ratio"):
        raise UsageError(
            "--algo.advantage.is_correction_mode clip needs --algo.advantage.is_correction_level token and "
            f"--algo.advantage.is_correction_gating ratio, not {level} and {gating}; give these, or use mask"
        )
    low, high = correction.is_correction_threshold
    if gating != "ratio" and low > 0:
        raise UsageError(
            f"--algo.advantage.is_correction_threshold {low:g} {high:g}: a {gating} (--algo.advantage."
            "is_correction_gating) has an upper bound only; give one number"
        )


def _check_data(settings: Settings) -> None:
    data = settings.args.data
    if _given(settings, "data.input_template") and data.input_template is None:  # OpenRLHF has emptied the value
        raise UsageError("--data.input_template has no {} where the prompt goes; put it in")
    try:
        (data.input_template or "").format("prompt")
    except (ValueError, LookupError) as error:
        raise UsageError(
            f"--data.input_template {data.input_template!r} can have one {{}} only, for the prompt ({error}); "
            "write other braces twice"
        ) from error
    if data.prompt_probs:
        sets, shares = data.prompt_dataset.split(","), data.prompt_probs.split(",")
        if len(sets) != len(shares):
            raise UsageError(
                f"--data.prompt_probs {data.prompt_probs} has {len(shares)} numbers for the {len(sets)} data sets of "
                "--data.prompt_dataset; give one for each"
            )
    for flag, split, named in (
        ("data.prompt_split", data.prompt_split, data.prompt_dataset),
        ("eval.split", settings.args.eval.split, settings.args.eval.dataset),
    ):
        for name in (named or "").split(","):
            path = Path(name.split("@")[0].strip())
            if path.suffix in FILES and split not in ("", "train"):
                raise UsageError(f"--{flag} {split}: a file such as {path} has one split, train; leave it out")
    model = Path(settings.args.actor.model_name_or_path)
    if data.apply_chat_template and (model / "tokenizer_config.json").is_file():
        found = "chat_template" in json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
        if not found and not any((model / name).exists() for name in _CHAT_TEMPLATES):
            raise UsageError(
                f"--data.apply_chat_template: the tokenizer of --actor.model_name_or_path {model} has no template; "
                "leave it out, or give --data.input_template"
            )


def _check_rollouts(args: SimpleNamespace) -> None:
    if not args.vllm.num_engines:
        raise UsageError("--vllm.num_engines is missing; name the number of engines that generate the rollouts")
    if args.rollout.temperature <= 0:
        raise UsageError(
            f"--rollout.temperature {args.rollout.temperature:g} is not above 0; rollouts of a group have to differ"
        )
    step = args.rollout.batch_size * args.rollout.n_samples_per_prompt
    if args.train.max_rollouts is not None and args.train.max_rollouts < step:
        raise UsageError(
            f"--train.max_rollouts {args.train.max_rollouts} is less than one step: --rollout.batch_size "
            f"{args.rollout.batch_size} x {args.rollout.n_samples_per_prompt} = {step} rollouts; raise it"
        )


def _check_lag(args: SimpleNamespace) -> None:
    most = args.train.max_lag
    if most is None:
        return
    if not args.train.async_enable:
        raise UsageError(f"--train.max_lag {most} does nothing without --train.async_enable; give both, or neither")
    if most < 0:
        raise UsageError(f"--train.max_lag {most} is below 0; give the most training steps that a group may be late")


def _check_batches(args: SimpleNamespace) -> None:
    rollouts = args.rollout.batch_size * args.rollout.n_samples_per_prompt
    if rollouts % args.train.batch_size:
        raise UsageError(
            f"a rollout batch of {args.rollout.batch_size} prompts x {args.rollout.n_samples_per_prompt} samples = "
            f"{rollouts} is not a multiple of --train.batch_size {args.train.batch_size} (samples); "
            f"left-over rollouts would vanish: give --train.batch_size {rollouts} or a divisor of it"
        )
    ranks = upstream.data_parallel_ranks(args)
    if args.train.dynamic_batch_enable:
        if args.train.batch_size % ranks:
            raise UsageError(f"--train.batch_size {args.train.batch_size} is not a multiple of {ranks} ranks")
        if args.ds.overlap_comm and args.ds.zero_stage != 2:
            raise UsageError(
                "--ds.overlap_comm: with --train.dynamic_batch_enable DeepSpeed has it for --ds.zero_stage 2 only, not "
                f"{args.ds.zero_stage}; leave one of them out"
            )
        return
    if args.train.batch_size % (args.train.micro_batch_size * ranks):
        raise UsageError(
            f"--train.batch_size {args.train.batch_size} is not a multiple of --train.micro_batch_size "
            f"{args.train.micro_batch_size} x {ranks} ranks"
        )
    if rollouts % (args.rollout.micro_batch_size * ranks):
        raise UsageError(
            f"{rollouts} rollouts a step are not a multiple of --rollout.micro_batch_size "
            f"{args.rollout.micro_batch_size} x {ranks} ranks, so that ranks would get unequal shares"
        )


def _check_intervals(args: SimpleNamespace) -> None:
    for flag in ("eval.steps", "ckpt.save_steps", "logger.logging_steps"):
        value = attrgetter(flag)(args)
        never = flag != "logger.logging_steps"
        if value < 1 and not (never and value == -1):
            raise UsageError(f"--{flag} {value} is below 1; give a number of steps{', or -1 for never' * never}")


def _check_evaluations(settings: Settings) -> None:
    args = settings.args.eval
    if args.temperature < 0:
        raise UsageError(f"--eval.temperature {args.temperature:g} is below 0; give 0 (greedy) or more")
    if not 0 < args.top_p <= 1:
        raise UsageError(f"--eval.top_p {args.top_p:g} is not in (0, 1]; 1 samples from the whole distribution")
    if args.n_samples_per_prompt < 1:
        raise UsageError(f"--eval.n_samples_per_prompt {args.n_samples_per_prompt} is below 1")
    if args.benchmarks:
        if not has_eval_steps(settings) and _given(settings, "eval.benchmarks"):
            raise UsageError(
                f"--eval.benchmarks {args.benchmarks} does nothing with --eval.steps {args.steps}; give the training "
                "steps between two evaluations, or leave out the benchmarks"
            )
        validation.entries(settings.args)


def has_eval_steps(settings: Settings) -> bool:
    """Whether evaluations are made; a preset that does not say how often makes some, see ``preflight.complete``."""
    unsaid = settings.preset != presets.NONE and "eval.steps" not in settings.origin
    return unsaid or settings.args.eval.steps > 0


def _check_checkpoints(settings: Settings) -> None:
    args = settings.args
    evaluates = (args.eval.dataset or args.eval.benchmarks) and has_eval_steps(settings)
    if args.ckpt.best_metric_key not in ("", "none") and not evaluates:
        raise UsageError(
            f"--ckpt.best_metric_key {args.ckpt.best_metric_key} needs evaluations; give --eval.dataset or "
            "--eval.benchmarks, and --eval.steps, or leave it out"
        )
    if args.ckpt.max_num < 2:
        raise UsageError(
            f"--ckpt.max_num {args.ckpt.max_num}: the old checkpoint is deleted before the new one is whole; "
            "use 2 or more"
        )

"""Refusals of a training with an estimator. A rule may rely on those before it."""

from types import SimpleNamespace

from openrlhf_dbb import chosen
from openrlhf_dbb.core import rules
from openrlhf_dbb.core.rules import Refusal, Rules
from openrlhf_dbb.driver.arguments import Settings
from openrlhf_dbb.driver.rules.places import GPUS, NODES
from openrlhf_dbb.estimators import FORMS
from openrlhf_dbb.evaluation.training import EVALUATIONS, Evaluations

POSTERIORS: Rules[Settings] = Rules()

_FORM = "algo.advantage.estimator"
_STRATEGY = "rollout.strategy"
_REWARD = "reward.remote_url"
_REWARD_MODEL = "reward.model_name_or_path"
_PROMPTS = "rollout.batch_size"
_GROUP = "rollout.n_samples_per_prompt"
_VANISH = "and left-over rollouts would vanish; change one of them"


@POSTERIORS.add
def form_without_estimator(settings: Settings) -> Refusal:
    """OpenRLHF's own advantages read no estimate."""
    forms = FORMS.available()
    if settings.values[_FORM] in forms:
        return None
    advice = f"it has no place for an estimator; use {', '.join(forms)}, or --estimator none"
    return f"{settings.shown(_FORM)}: {advice}"


@POSTERIORS.add
def rules_of_its_parts(settings: Settings) -> Refusal:
    """What the estimator, the form, the strategy and further parts refuse in every trainer."""
    return rules.refusal(settings.plan)


@POSTERIORS.add
def vllm_log_probs_and_kl(settings: Settings) -> Refusal:
    """The KL term would be measured between two implementations."""
    if not settings.args.train.vllm_log_probs or settings.args.algo.kl.init_coef <= 0:
        return None
    both = settings.shown("train.vllm_log_probs", "algo.kl.init_coef")
    return f"{both}: the KL term takes the policy's log-probs; leave one out"


@POSTERIORS.add
def vllm_log_probs_and_correction(settings: Settings) -> Refusal:
    """The correction would compare vLLM's log-probs with themselves."""
    level = settings.args.algo.advantage.is_correction_level
    if not settings.args.train.vllm_log_probs or level == "off":
        return None
    both = settings.shown("train.vllm_log_probs", "algo.advantage.is_correction_level")
    return f"{both}: the correction compares vLLM's log-probs with the policy's; leave one out"


@POSTERIORS.add
def two_strategies(settings: Settings) -> Refusal:
    """OpenRLHF's switch asks for dynamic filtering."""
    if not settings.args.algo.dynamic_filtering_enable or settings.strategy.reads_score_range:
        return None
    both = settings.shown(_STRATEGY, "algo.dynamic_filtering_enable")
    return f"{both}: the switch asks for another strategy; give one of them"


@POSTERIORS.add
def no_reward(settings: Settings) -> Refusal:
    """Nothing scores the rollouts."""
    if settings.args.reward.model_name_or_path or settings.args.reward.remote_url:
        return None
    return (
        f"{settings.shown(_REWARD)}: missing; give math_answer, exact_match, reasoning_gym, a FILE.py of yours, "
        f"or a server's http://...; or --preset none and --{_REWARD_MODEL}"
    )


@POSTERIORS.add
def two_rewards(settings: Settings) -> Refusal:
    """OpenRLHF would ask the verifier alone, in silence."""
    if not settings.args.reward.model_name_or_path or not settings.args.reward.remote_url:
        return None
    both = settings.shown(_REWARD_MODEL, _REWARD)
    return f"{both}: the model is not asked; give one, the model with --preset none"


@POSTERIORS.add
def rules_of_evaluations(settings: Settings) -> Refusal:
    """What the evaluations during a training refuse."""
    return EVALUATIONS.refusal(Evaluations(settings.args.eval.steps))


@POSTERIORS.add
def no_steps_between_checkpoints(settings: Settings) -> Refusal:
    """OpenRLHF divides by the steps."""
    steps = settings.args.ckpt.save_steps
    if steps >= 1 or steps == -1:
        return None
    return f"{settings.shown('ckpt.save_steps')}: too low; give 1 or more, or -1 for never"


@POSTERIORS.add
def stale_groups_of_unequal_size(settings: Settings) -> Refusal:
    """The groups that are left of a batch would not have its number of rollouts."""
    if settings.args.train.max_lag is None or not settings.strategy.unequal_groups:
        return None
    both = settings.shown(_STRATEGY, "train.max_lag")
    return f"{both}: a stale group would leave its batch short of rollouts; leave one out"


@POSTERIORS.add
def equal_rollouts(settings: Settings) -> Refusal:
    """At temperature 0 the rollouts of a group are equal."""
    if settings.args.rollout.temperature > 0:
        return None
    return f"{settings.shown('rollout.temperature')}: too low; give more than 0"


@POSTERIORS.add
def fewer_generated_than_trained(settings: Settings) -> Refusal:
    """A step would never be full."""
    rollout = settings.args.rollout
    if rollout.vllm_generate_batch_size >= rollout.batch_size:
        return None
    both = settings.shown("rollout.vllm_generate_batch_size", _PROMPTS)
    return f"{both}: steps would be short of rollouts; give as many"


@POSTERIORS.add
def budget_below_a_step(settings: Settings) -> Refusal:
    """The training would end before its first step."""
    budget = settings.args.train.max_rollouts
    if budget is None or budget >= chosen.rollouts_of_a_step(settings.args):
        return None
    flags = settings.shown("train.max_rollouts", _PROMPTS, _GROUP)
    return f"{flags}: less than one step; give more"


@POSTERIORS.add
def step_of_no_whole_batches(settings: Settings) -> Refusal:
    """OpenRLHF drops the rollouts that do not fill an optimizer step."""
    if chosen.rollouts_of_a_step(settings.args) % settings.args.train.batch_size == 0:
        return None
    flags = settings.shown(_PROMPTS, _GROUP, "train.batch_size")
    return f"{flags}: a step's rollouts are no multiple of a batch, {_VANISH}"


@POSTERIORS.add
def batch_of_no_whole_micro_batches(settings: Settings) -> Refusal:
    """Each rank takes whole micro-batches of a batch."""
    train = settings.args.train
    if train.batch_size % _rows_of_all_ranks(settings.args, train) == 0:
        return None
    flags = settings.shown("train.batch_size", "train.micro_batch_size", NODES, GPUS)
    return f"{flags}: a batch is no multiple of the micro-batches of all ranks, {_VANISH}"


@POSTERIORS.add
def step_of_no_whole_micro_batches(settings: Settings) -> Refusal:
    """Each rank takes whole micro-batches of a step's rollouts."""
    args = settings.args
    if args.train.dynamic_batch_enable:
        return None
    if chosen.rollouts_of_a_step(args) % _rows_of_all_ranks(args, args.rollout) == 0:
        return None
    flags = settings.shown(_PROMPTS, _GROUP, "rollout.micro_batch_size", NODES, GPUS)
    return (
        f"{flags}: a step's rollouts are no multiple of the micro-batches of all ranks, {_VANISH}"
    )


def _rows_of_all_ranks(args: SimpleNamespace, part: SimpleNamespace) -> int:
    """Return the rows of a micro-batch on all ranks; dynamic batches have at least one each."""
    gpus = args.actor.num_nodes * args.actor.num_gpus_per_node
    ranks = gpus // args.ds.ring_attn_size // args.ds.tensor_parallel_size
    rows = 1 if args.train.dynamic_batch_enable else part.micro_batch_size
    return int(ranks * rows)

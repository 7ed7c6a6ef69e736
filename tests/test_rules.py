"""What is refused: alike by the command, TRL, verl and a loop of one's own, and each by a rule that can be found."""

import re
import sys
from dataclasses import dataclass, replace

import pytest

from openrlhf_dbb import Posteriors, estimators
from openrlhf_dbb.core import rules
from openrlhf_dbb.core.advantages import Thinning
from openrlhf_dbb.core.host import Capability, Host
from openrlhf_dbb.core.loop import Loop
from openrlhf_dbb.core.probing import Probing
from openrlhf_dbb.core.replay import Replay
from openrlhf_dbb.core.rules import Plan
from openrlhf_dbb.core.strategies import STRATEGIES, RolloutStrategy, Sampler
from openrlhf_dbb.driver import arguments, checks
from openrlhf_dbb.driver.rules.alone import ALONE
from openrlhf_dbb.driver.rules.places import PLACES
from openrlhf_dbb.driver.rules.posteriors import POSTERIORS
from openrlhf_dbb.driver.rules.replay import REPLAY
from openrlhf_dbb.driver.rules.run import RUN
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.evaluation.training import EVALUATIONS
from openrlhf_dbb.integrations import hosts
from openrlhf_dbb.integrations.shared import Settings
from openrlhf_dbb.platform import cpu, cuda

FORM = "--algo.advantage.estimator"
GROUP = "--rollout.n_samples_per_prompt"
STRATEGY = "--rollout.strategy"
TRAINERS = {"TRL": (hosts.TRL, hosts.TRL_NAMES), "verl": (hosts.VERL, hosts.VERL_NAMES)}


def of_command(ours, group):
    flags = {"estimator": "--estimator", "form": FORM, "strategy": STRATEGY, "thin": "--train.thin"}
    argv = [
        word for name, value in ours.items() if name in flags for word in (flags[name], str(value))
    ]
    memory = ours.get("parameters", {}).get("memory")
    if memory:
        argv += ["--point.memory", memory]
    settings = arguments.parse(["--preset", "tiny", *argv, GROUP, str(group)])
    with pytest.raises(UsageError) as refused:
        checks.check(settings)
    return str(refused.value)


def of_integration(name, ours, group):
    with pytest.raises(ValueError) as refused:
        Settings(**ours).check(*TRAINERS[name], group)
    return str(refused.value)


@pytest.mark.parametrize(
    ("ours", "group", "words"),
    [
        ({"estimator": "point"}, 1, "point.* 2 or more.*auto"),
        ({"estimator": "ema", "form": "rloo"}, 8, "rloo.*ema.*without it.*dr_grpo.*dbb"),
        (
            {"thin": 0.5, "form": "reinforce_baseline"},
            8,
            "thin.* with .*reinforce_baseline.*leave one out",
        ),
        (
            {"estimator": "gaussian", "strategy": "posterior"},
            8,
            "posterior.*forecast.*gaussian.*auto",
        ),
        (
            {"estimator": "point", "parameters": {"memory": "gaussian"}, "strategy": "posterior"},
            8,
            "posterior.*forecast.*gaussian.*memory.*auto",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_alike_by_every_trainer(ours, group, words):
    for line in (
        of_command(ours, group),
        of_integration("TRL", ours, group),
        of_integration("verl", ours, group),
    ):
        assert re.search(words, line) and "\n" not in line


def test_each_trainer_writes_the_settings_as_its_users_do():
    ours = {"estimator": "point"}
    assert re.match(
        r"--estimator point .*--rollout.n_samples_per_prompt 1: .*--estimator auto",
        of_command(ours, 1),
    )
    assert re.match(
        r"estimator='point' with num_generations=1: .*estimator='auto'",
        of_integration("TRL", ours, 1),
    )
    verl = of_integration("verl", ours, 1)
    assert re.match(
        r"algorithm.posterior.estimator=point .*\bactor_rollout_ref.rollout.n=1: ", verl
    )


def test_a_loop_of_ones_own_is_refused_what_an_estimator_cannot_tell(tmp_path):
    columns = (["a", "a"], ["1", "1"])
    with Posteriors.create(
        f"sqlite:///{tmp_path}/a.db", "r", *columns, estimator="ema"
    ) as posteriors:
        with pytest.raises(
            ValueError, match=r"form='rloo' with estimator='ema': .* form='dr_grpo'"
        ):
            posteriors.observe(1, *columns, [1, 0], form="rloo")
        posteriors.observe(1, *columns, [1, 0], form="dr_grpo")


@dataclass(frozen=True)
class Resting(RolloutStrategy):
    """Skips prompts, and judges no group."""

    name = "resting"
    needs_budget = True


class Forgetful(Sampler):
    kept = ("lock",)
    lock = range(3)


@dataclass(frozen=True)
class Forgetting(RolloutStrategy):
    """Keeps what no checkpoint can hold."""

    name = "forgetting"

    def sampler(self, facts):
        return Forgetful(facts)


def test_a_state_that_json_cannot_hold_is_refused_before_the_first_checkpoint():
    line = rules.refusal(Plan(estimators.build("dbb"), strategy=Forgetting()))
    assert re.match(r"strategy='forgetting': .*\brange\b.*JSON.*; use", line)


def test_a_trainer_is_asked_for_what_a_strategy_needs():
    names = hosts.VERL_NAMES
    dbb = estimators.build("dbb")
    poor = Host("a trainer", {Capability.GENERATE_MORE: "its batches are fixed"}, {})
    assert Resting().needs == {Capability.GENERATE_MORE}
    line = rules.refusal(Plan(dbb, strategy=Resting(), host=poor, names=names))
    assert re.search(
        r"strategy='?resting'? .*a trainer .*its batches are fixed; use \S*strategy=",
        line,
    )
    for other in hosts.HOSTS:
        assert rules.refusal(Plan(dbb, strategy=Resting(), host=other)) is None
    for name in ("dynamic", "greso"):
        with pytest.raises(ValueError, match="generates further rollouts"):
            Settings(estimator="dbb", strategy=name).check(poor, names, 8)
    Settings(estimator="dbb", strategy="posterior").check(poor, names, 8)


def test_what_is_replayed_is_asked_of_the_trainer():
    poor = Host("a trainer", {Capability.EXTRA_ROWS: "its step is fixed"}, {})
    plan = Plan(estimators.build("dbb"), host=poor, others=[Replay(samples=8)])
    assert re.match(r"replay=8 needs .* its step is fixed; leave it out", rules.refusal(plan))
    assert rules.refusal(replace(plan, host=hosts.OWN_LOOP)) is None


def test_a_cache_without_what_the_loss_takes_is_refused():
    plan = Plan(
        estimators.build("dbb"), others=[Replay(samples=8)], rows_bring={"images": "images=1"}
    )
    assert re.match("replay=8 with images=1: no images are kept; leave", rules.refusal(plan))


def test_what_judges_groups_is_refused_where_rewards_come_late():
    dbb = estimators.build("dbb")
    late = {"late_rewards": "model=m", "early_rewards": "give a function"}
    for part in ({"strategy": STRATEGIES.build("dynamic")}, {"others": [Probing(0.1)]}):
        assert re.match(
            "model=m with .*: it needs rewards at generation; give a function",
            rules.refusal(Plan(dbb, **part, **late)),
        )
    assert rules.refusal(Plan(dbb, **late)) is None


TINY = ["--preset", "tiny"]
DBB = [*TINY, "--estimator", "dbb"]
NONE = [*TINY, "--estimator", "none"]
REPO = [*TINY, "--method", "repo"]
LORA = [*DBB, "--ds.lora.rank", "8"]
CONSTANT = ["--actor.loss_agg_mode", "seq-mean-token-sum-norm"]
OWN = [
    "--preset",
    "none",
    "--actor.model_name_or_path",
    "m",
    "--data.prompt_dataset",
    "d",
    "--vllm.num_engines",
    "1",
]
MODEL = [*OWN, "--estimator", "gaussian", "--reward.model_name_or_path", "m"]
ONE = [GROUP, "1", "--train.batch_size", "8"]

REFUSED = {  # by the name of a rule of the command: a command line that it refuses, and flags that it names
    "no_model": ([*TINY, "--actor.model_name_or_path", ""], "actor.model_name_or_path"),
    "no_prompts": ([*TINY, "--data.prompt_dataset", ""], "data.prompt_dataset"),
    "name_of_no_folder": ([*TINY, "--run_name", "a/b"], "run_name"),
    "continued_and_begun": ([*TINY, "--resume", "--warm_start", "x"], "resume warm_start"),
    "two_beginnings": (
        [*TINY, "--data.pass_rate_key", "c", "--warm_start", "x"],
        "data.pass_rate_key warm_start",
    ),
    "one_checkpoint": ([*TINY, "--ckpt.max_num", "1"], "ckpt.max_num"),
    "no_adapter_to_save": ([*TINY, "--ckpt.save_adapter"], "ckpt.save_adapter ds.lora.rank"),
    "universal_checkpoint": ([*TINY, "--ds.use_universal_ckpt"], "ds.use_universal_ckpt"),
    "logging_never": ([*TINY, "--logger.logging_steps", "0"], "logger.logging_steps"),
    "two_templates": (
        [*TINY, "--data.input_template", "{}", "--data.apply_chat_template"],
        "data.input_template data.apply_chat_template",
    ),
    "endless_queue": ([*TINY, "--train.async_queue_size", "0"], "train.async_queue_size"),
    "no_engine": ([*TINY, "--vllm.num_engines", "0"], "vllm.num_engines"),
    "policy_and_engines_differ": (
        [*TINY, "--vllm.num_engines", "2"],
        "vllm.num_engines actor.num_gpus_per_node",
    ),
    "adapters_alone": ([*NONE, "--ds.lora.rank", "8"], "ds.lora.rank estimator"),
    "split_adapters": (
        [*LORA, "--ds.tensor_parallel_size", "2"],
        "ds.lora.rank ds.tensor_parallel_size",
    ),
    "adapters_of_4_bits": ([*LORA, "--ds.load_in_4bit"], "ds.lora.rank ds.load_in_4bit"),
    "adapters_sent_by_ray": ([*LORA, "--vllm.sync_with_ray"], "ds.lora.rank vllm.sync_with_ray"),
    "averaged_adapters": ([*LORA, "--train.enable_ema"], "ds.lora.rank train.enable_ema"),
    "sums_of_another_loss": (
        [*DBB, *CONSTANT, "--actor.policy_loss_type", "gspo"],
        "actor.policy_loss_type",
    ),
    "flag_of_ours": ([*NONE, "--train.thin", "0.5"], "train.thin estimator"),
    "strategy_of_ours": ([*NONE, STRATEGY, "greso"], "rollout.strategy estimator"),
    "loss_of_ours": ([*NONE, *CONSTANT], "actor.loss_agg_mode estimator"),
    "form_of_ours": ([*NONE, FORM, "max_rl"], "algo.advantage.estimator estimator"),
    "lag_of_ours": ([*NONE, "--train.max_lag", "0"], "train.max_lag estimator"),
    "top_p_of_ours": ([*NONE, "--eval.top_p", "0.5"], "eval.top_p estimator"),
    "form_without_estimator": ([*DBB, FORM, "reinforce"], "algo.advantage.estimator estimator"),
    "rules_of_its_parts": (
        [*TINY, "--estimator", "point", *ONE],
        "estimator rollout.n_samples_per_prompt",
    ),
    "vllm_log_probs_and_kl": (
        [*DBB, "--train.vllm_log_probs", "--algo.kl.init_coef", "0.1"],
        "train.vllm_log_probs algo.kl.init_coef",
    ),
    "vllm_log_probs_and_correction": (
        [*DBB, "--train.vllm_log_probs", "--algo.advantage.is_correction_level", "token"],
        "train.vllm_log_probs algo.advantage.is_correction_level",
    ),
    "two_strategies": (
        [*DBB, STRATEGY, "greso", "--algo.dynamic_filtering_enable"],
        "rollout.strategy algo.dynamic_filtering_enable",
    ),
    "no_reward": ([*OWN, "--estimator", "dbb"], "reward.remote_url reward.model_name_or_path"),
    "two_rewards": (
        [*DBB, "--reward.model_name_or_path", "m"],
        "reward.remote_url reward.model_name_or_path",
    ),
    "rules_of_evaluations": ([*DBB, "--eval.steps", "0"], "eval.steps"),
    "no_steps_between_checkpoints": ([*DBB, "--ckpt.save_steps", "0"], "ckpt.save_steps"),
    "stale_groups_of_unequal_size": (
        [*DBB, STRATEGY, "allocate", "--train.max_lag", "1"],
        "rollout.strategy train.max_lag",
    ),
    "equal_rollouts": ([*DBB, "--rollout.temperature", "0"], "rollout.temperature"),
    "fewer_generated_than_trained": (
        [*DBB, "--rollout.vllm_generate_batch_size", "32"],
        "rollout.vllm_generate_batch_size rollout.batch_size",
    ),
    "budget_below_a_step": (
        [*DBB, "--train.max_rollouts", "511"],
        "train.max_rollouts rollout.batch_size",
    ),
    "step_of_no_whole_batches": (
        [*DBB, "--train.batch_size", "24"],
        "train.batch_size rollout.batch_size",
    ),
    "batch_of_no_whole_micro_batches": (
        [*DBB, "--train.micro_batch_size", "7"],
        "train.micro_batch_size",
    ),
    "step_of_no_whole_micro_batches": (
        [*DBB, "--rollout.micro_batch_size", "7"],
        "rollout.micro_batch_size",
    ),
    "cache_without_replay": ([*DBB, "--replay.max_age", "3"], "replay.max_age replay.samples"),
    "dynamic_batches": (
        [*REPO, "--train.dynamic_batch_enable"],
        "replay.samples train.dynamic_batch_enable",
    ),
}
RULES = {
    rule.__name__: rule
    for part in (RUN, PLACES, REPLAY, ALONE, POSTERIORS)
    for rule in part.functions
}


@pytest.mark.parametrize("name", RULES)
def test_every_rule_of_the_command_refuses_in_one_line_that_names_its_flags(name):
    argv, flags = REFUSED[name]
    line = RULES[name](arguments.parse(argv))
    assert all(f"--{flag}" in line for flag in flags.split()) and "\n" not in line
    assert re.search(r": .*(give|use|leave|name|change)", line)  # what to do next
    assert RULES[name].__doc__


@pytest.mark.parametrize(
    ("argv", "flags"),
    [
        ([*MODEL, "--estimator", "dbb"], "reward.model_name_or_path estimator"),
        ([*MODEL, "--probe.fraction", "0.1"], "reward.model_name_or_path probe.fraction"),
        (
            [*REPO, "--algo.advantage.is_correction_level", "token"],
            "replay.samples algo.advantage.is_correction_level",
        ),
        ([*REPO, "--algo.kl.use_loss"], "replay.samples algo.kl.use_loss"),
        (
            [*REPO, "--data.max_images_per_prompt", "1"],
            "replay.samples data.max_images_per_prompt",
        ),
        ([*REPO, FORM, "reinforce_baseline"], "replay.samples algo.advantage.estimator"),
        (
            [*DBB, "--train.thin", "1", FORM, "reinforce_baseline"],
            "train.thin algo.advantage.estimator",
        ),
    ],
)
def test_a_part_of_a_training_is_refused_by_the_command_in_the_commands_words(argv, flags):
    with pytest.raises(UsageError) as refused:
        checks.check(arguments.parse(argv))
    line = str(refused.value)
    assert all(f"--{flag}" in line for flag in flags.split()) and "\n" not in line
    assert re.search(r"[:;] .*(give|use|leave)", line)


def test_what_is_trained_is_refused_by_no_rule():
    for argv in (DBB, NONE):
        checks.check(arguments.parse(argv))


def test_rules_have_a_reason_to_read():
    owners = [*estimators.available().values(), *estimators.FORMS.available().values()]
    owners += [*STRATEGIES.available().values(), Replay, Probing, Thinning]
    bases = {base for owner in owners for base in owner.__mro__}
    functions = {rule for base in bases for rule in vars(base).get("rules", ())}
    assert len(functions) >= 10
    functions.update(cpu.CPU.functions, cuda.CUDA.functions, EVALUATIONS.functions)
    assert all(rule.__doc__ for rule in functions)


# A strategy of another package: one file with a flag, a value that follows from others, and a rule

THIRDS = '''
from dataclasses import dataclass, replace

from openrlhf_dbb.core.strategies import RolloutStrategy, parameter


def no_thirds(strategy, plan):
    """A part of a group would be left."""
    if plan.group is None or plan.group % strategy.parts == 0:
        return None
    return f"{strategy.shown(plan)} with {plan.shown('group', plan.group)}: give a multiple of {strategy.parts}"


@dataclass(frozen=True)
class Thirds(RolloutStrategy):
    """Says how large a part of a group is."""

    parts: int = parameter(3, "parts of a group", within="[1, 9]")
    size: int = parameter(0, "rollouts of a part; 0: a whole group over its parts", within="[0, 99]")

    name = "thirds"
    rules = (no_thirds,)

    def derived(self, training):
        if self.size:
            return self
        return replace(self, size=training.group // self.parts)

    def describe(self):
        return f"parts of {self.size}"
'''


@pytest.fixture
def thirds(tmp_path, monkeypatch):
    """The name of a strategy that stands in one file of somebody else."""
    (tmp_path / "my_thirds.py").write_text(THIRDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "my_thirds:Thirds"
    sys.modules.pop("my_thirds", None)


def test_one_file_gives_every_trainer_a_strategys_flag_derivation_and_refusal(thirds, tmp_path):
    ours = {"estimator": "dbb", "strategy": thirds}
    for line in (
        of_command(ours, 8),
        of_integration("TRL", ours, 8),
        of_integration("verl", ours, 8),
    ):
        assert re.search(f"strategy.*{thirds}.* with .*8: give a multiple of 3$", line)
    columns = (["a"], ["1"])

    def loop(rollouts, **parameters):
        store = f"sqlite:///{tmp_path}/{rollouts}{len(parameters)}.db"
        with Posteriors.create(store, "r", *columns, estimator="dbb") as posteriors:
            return Loop(
                posteriors, *columns, None, groups=1, rollouts=rollouts, strategy=thirds,
                strategy_parameters=parameters,
            )  # fmt: skip

    with pytest.raises(ValueError, match="with group=8: give a multiple of 3"):
        loop(8)
    loop(8, parts=4)


def test_what_a_strategy_derives_is_a_value_of_its_flag_in_every_trainer(thirds):
    sizes = ["--train.micro_batch_size", "64", "--rollout.micro_batch_size", "64"]
    argv = [*DBB, STRATEGY, thirds, GROUP, "9", "--train.batch_size", "64", *sizes]
    settings = arguments.parse(argv)
    checks.check(settings)
    assert (
        settings.values["thirds.size"] == settings.args.thirds.size == settings.strategy.size == 3
    )
    assert "thirds" in settings.origin["thirds.size"]
    assert arguments.parse([*argv, "--thirds.size", "5"]).strategy.size == 5
    for name in TRAINERS:
        settings = Settings(estimator="dbb", strategy=thirds, strategy_parameters={"parts": 2})
        checked = settings.check(*TRAINERS[name], 8)
        assert checked.built[1].size == 4
        assert dict(checked.strategy_parameters) == {"parts": 2, "size": 4}


SIZED = '''
from dataclasses import dataclass, replace

from openrlhf_dbb.estimators.registry import parameter
from openrlhf_dbb.estimators.simple import LaplaceSmoothing


@dataclass(frozen=True)
class Sized(LaplaceSmoothing):
    """Says how large a group is."""

    size: int = parameter(0, "rollouts of a group; 0: as trained", within="[0, 99]")

    name = "sized"

    def derived(self, training):
        return self if self.size else replace(self, size=training.group)
'''


@pytest.fixture
def sized(tmp_path, monkeypatch):
    """The name of an estimator that stands in one file of somebody else."""
    (tmp_path / "my_sized.py").write_text(SIZED)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "my_sized:Sized"
    sys.modules.pop("my_sized", None)


def test_what_an_estimator_derives_is_stored_by_every_trainer(sized, tmp_path):
    sizes = ["--train.micro_batch_size", "64", "--rollout.micro_batch_size", "64"]
    argv = ["--preset", "tiny", "--estimator", sized, GROUP, "8", *sizes]
    assert arguments.parse(argv).built_estimator.size == 8
    for name in TRAINERS:
        by_name = Settings(estimator=sized).check(*TRAINERS[name], 8)
        assert by_name.built[0].size == 8
        built = estimators.build(sized)
        assert Settings(estimator=built).check(*TRAINERS[name], 8).built[0].size == 8

    def loop(rollouts, size):
        store = f"sqlite:///{tmp_path}/{rollouts}-{size}.db"
        with Posteriors.create(
            store, "r", ["a"], ["1"], estimator=sized, parameters={"size": size}
        ) as posteriors:
            return Loop(posteriors, ["a"], ["1"], None, groups=1, rollouts=rollouts)

    # The run has stored its estimator before the loop begins. So the loop refuses it and names the values.
    with pytest.raises(ValueError, match=r"sized.*pass parameters=\{'size': 8\} to Posteriors"):
        loop(8, 0)
    loop(8, 8)

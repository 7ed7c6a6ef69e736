"""Training methods: what each recipe sets, what wins over it, what the start prints, and what is refused."""

import dataclasses
import re

import numpy as np
import pytest

from openrlhf_dbb import methods, presets
from openrlhf_dbb.core import strategies
from openrlhf_dbb.core.strategies import Decision, Sampler
from openrlhf_dbb.core.strategies.dynamic import DynamicSampler
from openrlhf_dbb.core.strategies.greso import GresoSampler
from openrlhf_dbb.driver import arguments, checks, flags, printed
from openrlhf_dbb.errors import UsageError

MODEL = [
    "--actor.model_name_or_path", "some/model", "--reward.remote_url", "math_answer", "--vllm.num_engines", "1",
    "--rollout.n_samples_per_prompt", "4", "--data.prompt_dataset", "some/data",
]  # fmt: skip

DATA_AND_REWARD = ["--data.prompt_dataset", "some/data", "--reward.remote_url", "math_answer"]


def parse(*argv):
    return arguments.parse(["--preset", "tiny", *argv])


def look_up(settings, flag):
    value = settings.flags[flag]
    return list(value) if isinstance(value, tuple) else value


RECIPES = {
    "grpo": {
        "rollout.strategy": "plain",
        "algo.advantage.estimator": "group_norm",
        "actor.loss_agg_mode": "seq-mean-token-mean",
        "replay.samples": 0,
    },
    "dr_grpo": {
        "rollout.strategy": "plain",
        "algo.advantage.estimator": "dr_grpo",
        "actor.loss_agg_mode": "seq-mean-token-sum-norm",
        "replay.samples": 0,
    },
    "dapo": {
        "rollout.strategy": "dynamic",
        "dynamic.refill": "one_for_one",
        "algo.advantage.estimator": "group_norm",
        "actor.loss_agg_mode": "token-mean",
        "replay.samples": 0,
    },
    "greso": {
        "rollout.strategy": "greso",
        "greso.p_easy": 0.5,
        "greso.p_hard": 0.5,
        "greso.target_easy": 0.25 / 3,  # 0.25 of all, split 1 : 2
        "greso.target_hard": 0.25 * 2 / 3,
        "greso.step": 0.01,
        "greso.min_p": 0.05,
        "greso.max_p": 0.95,
        "greso.floor": 0.01,
        "greso.safety": 1.25,
        "greso.batch": 96,  # 1.5 and 0.5 times the preset's 64 prompts, as 192 and 64 of 128
        "greso.min_batch": 32,
        "algo.advantage.estimator": "group_norm",
        "actor.loss_agg_mode": "seq-mean-token-mean",
        "replay.samples": 0,
    },
    "repo": {
        "rollout.strategy": "plain",
        "replay.samples": 8,
        "replay.cache": 16,
        "replay.min_cache": 16,
        "replay.select": "reward",
        "replay.normalization": "split",
        "replay.normalizer": "code",
        "replay.coef": 1.0,
        "algo.advantage.estimator": "group_norm",
        "actor.loss_agg_mode": "seq-mean-token-mean",
    },
}


def sizes(settings):
    """Prompts of a step, rollouts of a prompt, rollouts of an optimizer step, passes over the prompts."""
    flags = ("rollout.batch_size", "rollout.n_samples_per_prompt", "train.batch_size", "train.num_episodes")
    return tuple(look_up(settings, flag) for flag in flags)


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        (["--preset", "tiny"], (64 * 8, 1, 256, 4 * 8)),
        (["--actor.model_name_or_path", "some/model"], (128 * 8, 1, 512, 4 * 8)),  # preset default: the paper's sizes
        (["--preset", "tiny", "--rollout.batch_size", "256", "--train.num_episodes", "2"], (256, 1, 256, 2)),
    ],
)
def test_one_rollout_a_prompt_keeps_the_presets_rollouts_and_optimizer_steps(base, expected):
    settings = arguments.parse([*base, "--method", "single", *DATA_AND_REWARD])
    assert sizes(settings) == expected
    recipe = {
        "rollout.strategy": "plain",
        "algo.advantage.estimator": "rloo",
        "actor.loss_agg_mode": "seq-mean-token-mean",
        "actor.eps_clip_low_high": [0.98, 0.98],
        "replay.samples": 0,
    }
    assert {flag: look_up(settings, flag) for flag in recipe} == recipe
    assert (settings.estimator, settings.origin.get("dbb.discount")) == ("auto", None)
    checks.check(settings)


def test_with_dbb_one_rollout_a_prompt_forgets_slower_than_groups():
    settings = parse("--method", "single", "--estimator", "dbb")
    assert (settings.parameters["discount"], settings.origin["dbb.discount"]) == (0.85, "method single")
    assert parse("--method", "single", "--estimator", "dbb", "--dbb.discount", "0.9").parameters["discount"] == 0.9


def test_one_rollout_a_prompt_without_a_preset_has_the_sizes_that_are_given():
    settings = arguments.parse([*MODEL, "--preset", "none", "--method", "single"])
    assert sizes(settings)[1] == 4  # of MODEL: the command line's
    assert not {"rollout.batch_size", "train.num_episodes"} & set(settings.origin)


@pytest.mark.parametrize("base", [["--preset", "tiny"], [*MODEL, "--rollout.batch_size", "64"]], ids=["preset", "none"])
@pytest.mark.parametrize("method", RECIPES)
def test_a_method_sets_what_the_papers_say(method, base):
    settings = arguments.parse([*base, "--method", method, "--rollout.max_new_tokens", "10"])
    expected = RECIPES[method] | {"algo.kl.init_coef": 0.0, "actor.eps_clip_low_high": [0.2, 0.28]}
    assert {flag: look_up(settings, flag) for flag in expected} == expected
    assert (settings.method, settings.estimator) == (method, "point")
    checks.check(settings)


def test_these_are_all():
    assert set(RECIPES) <= set(methods.names())
    known = {action.dest for action in flags.build_parser()._actions}
    for method in methods.names():
        for estimator in ("dbb", "auto", "predicted_prior", "point"):
            recipe = methods.recipe(method, estimator)
            assert set(recipe) <= known
            assert all(value.source for value in recipe.values())
            wide = [0.2, 0.28] if estimator == "point" else [0.98, 0.98]
            assert recipe["actor.eps_clip_low_high"].value == wide


@pytest.mark.parametrize("method", RECIPES)
def test_any_estimator_goes_with_a_method_and_decides_the_clip_range(method):
    settings = parse("--method", method, "--estimator", "dbb")
    clip = {"actor.eps_clip_low_high": [0.98, 0.98]}
    expected = RECIPES[method] | clip
    assert {flag: look_up(settings, flag) for flag in expected} == expected
    assert (settings.estimator, settings.parameters["discount"]) == ("dbb", 0.5)
    checks.check(settings)


def test_the_command_line_wins_over_a_method_and_a_method_over_the_preset():
    settings = parse("--method", "dapo", "--dynamic.refill", "batches", "--actor.eps_clip_low_high", "0.1", "0.3")
    assert (look_up(settings, "dynamic.refill"), look_up(settings, "actor.eps_clip_low_high")) == (
        "batches",
        [0.1, 0.3],
    )
    origins = {
        "dynamic.refill": "command line",
        "actor.loss_agg_mode": "method dapo",
        "train.batch_size": "preset tiny",
    }
    assert {flag: settings.origin[flag] for flag in origins} == origins


def test_a_preset_trains_by_grpo_and_its_own_estimator_unless_told_otherwise():
    for preset in presets.names():
        settings = arguments.parse(["--preset", preset])
        assert (settings.method, settings.estimator) == ("grpo", "dbb")
    assert arguments.parse(MODEL).method == arguments.parse([*MODEL, "--estimator", "point"]).method == "grpo"
    alone = arguments.parse([*MODEL, "--estimator", "none"])
    assert (alone.method, look_up(alone, "algo.kl.init_coef")) == ("none", 0.01)  # OpenRLHF's


def test_no_method_leaves_everything_to_the_flags():
    settings = parse("--method", "none")
    assert (settings.method, settings.estimator) == ("none", "dbb")
    openrlhf = {"actor.loss_agg_mode": "token-mean", "algo.kl.init_coef": 0.01, "actor.eps_clip_low_high": [0.2, 0.2]}
    assert {flag: look_up(settings, flag) for flag in openrlhf} == openrlhf
    assert look_up(settings, "algo.advantage.estimator") == "group_norm"  # an estimator needs a form
    checks.check(settings)


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        ([], "dbb-tiny"),
        (["--method", "grpo"], "point-tiny"),
        (["--method", "dapo"], "dapo-point-tiny"),
        (["--method", "dr_grpo", "--estimator", "dbb"], "dr_grpo-dbb-tiny"),
        (["--method", "none"], "dbb-tiny"),
    ],
)
def test_a_run_is_named_after_its_method_unless_it_is_grpo(argv, name):
    assert re.fullmatch(name + r"-\d{8}-\d{6}", parse(*argv).run_name)


def test_openrlhfs_switch_asks_for_dynamic_sampling_within_its_range():
    settings = parse("--algo.dynamic_filtering_enable")
    assert look_up(settings, "rollout.strategy") == "dynamic"
    assert settings.origin["rollout.strategy"] == "--algo.dynamic_filtering_enable"
    scores = np.array([-1.0, 1.0])  # they differ, but 0 is not above 0
    assert strategies.build(settings.args).judge(0, scores) is Decision.REPLACE
    assert strategies.build(parse("--rollout.strategy", "dynamic").args).judge(0, scores) is Decision.TRAIN
    wider = ["--algo.dynamic_filtering_enable", "--algo.dynamic_filtering_range", "-1", "1"]
    assert strategies.build(parse(*wider).args).judge(0, scores) is Decision.TRAIN


def test_the_strategy_is_built_from_its_flags():
    assert type(strategies.build(parse().args)) is Sampler
    one = strategies.build(parse("--method", "dapo").args)
    assert (type(one), one.round_size(5), one.judge(0, np.ones(8))) == (DynamicSampler, 5, Decision.REPLACE)
    many = strategies.build(parse("--method", "dapo", "--dynamic.refill", "batches", "--dynamic.multiple", "2").args)
    assert (many.round_size(5), many.judge(0, np.ones(8))) == (2 * 64, Decision.DISCARD)
    argv = ["--method", "greso", "--greso.p_easy", "0.25", "--greso.floor", "0.125", "--greso.batch", "80"]
    greso = strategies.build(parse(*argv).args)
    assert (type(greso), greso.round_size(5)) == (GresoSampler, 80)
    greso.judge(0, np.ones(8))
    assert greso.probability(0) == 0.25
    greso.judge(0, np.ones(8))
    assert greso.probability(0) == 0.125


def test_gresos_random_numbers_follow_the_seed():
    def draws(*argv):
        made = strategies.build(parse("--method", "greso", *argv).args)
        made.judge(0, np.ones(8))
        return [made.rollouts(0) for _ in range(64)]

    assert draws() == draws() != draws("--train.seed", "7")


PLAIN, FORM = "all prompts, all groups", "advantage (X - p) / sqrt(variance)"
REPLAY = "replay of 8 of 16 cached rollouts a prompt (reward, split normalisation, code normaliser)"


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ([], f"grpo: {PLAIN}; estimator dbb; {FORM}; loss seq-mean-token-mean; clip 0.98 0.98; no KL"),
        (
            ["--method", "dr_grpo"],
            f"dr_grpo: {PLAIN}; estimator point; advantage X - p; loss seq-mean-token-sum-norm (L = 10); "
            "clip 0.2 0.28; no KL",
        ),
        (
            ["--algo.advantage.estimator", "reinforce_baseline", "--algo.advantage.no_std_norm"],
            f"grpo: {PLAIN}; estimator dbb; advantage X - p, whitened over the tokens of the batch without dividing by "
            "the deviation; loss seq-mean-token-mean; clip 0.98 0.98; no KL",
        ),
        (
            ["--method", "dapo", "--reward.overlong_buffer_len", "4", "--algo.kl.init_coef", "0.01"],
            f"dapo: dynamic sampling, one for one; estimator point; {FORM}; loss token-mean; clip 0.2 0.28; KL 0.01; "
            "overlong penalty over the last 4 tokens",
        ),
        (
            ["--method", "dapo", "--dynamic.refill", "batches"],
            f"dapo: dynamic sampling in generation batches of 3 x batch, at most 10 a step; estimator point; {FORM}; "
            "loss token-mean; clip 0.2 0.28; no KL",
        ),
        (
            ["--method", "greso"],
            f"greso: GRESO's pre-rollout filtering; estimator point; {FORM}; loss seq-mean-token-mean; clip 0.2 0.28; "
            "no KL",
        ),
        (
            ["--method", "repo"],
            f"repo: {PLAIN}; estimator point; {FORM}; loss seq-mean-token-mean; clip 0.2 0.28; no KL; {REPLAY}",
        ),
        (
            ["--method", "single"],
            f"single: {PLAIN}, one rollout a prompt; estimator auto; advantage X - (p without X); "
            "loss seq-mean-token-mean; clip 0.98 0.98; no KL",
        ),
    ],
)
def test_the_start_tells_what_is_trained_piece_by_piece(argv, text):
    settings = parse(*argv)
    assert methods.describe(settings.method, settings.args, settings.estimator) == text
    assert f"method     {text}" in printed.configuration(settings, None).splitlines()


def test_what_differs_from_the_method_as_published_is_marked():
    changed = ["--method", "dapo", "--actor.loss_agg_mode", "seq-mean-token-mean", "--dynamic.max_rounds", "0"]
    lines = printed.configuration(parse(*changed), None).splitlines()
    assert " * --actor.loss_agg_mode seq-mean-token-mean  [command line]  paper: token-mean" in lines
    assert "   --rollout.strategy dynamic  [method dapo]" in lines
    assert "   --dynamic.max_rounds 0  [command line]" in lines  # the recipe leaves it open


BATCHES = ["--rollout.n_samples_per_prompt", "1", "--train.batch_size", "64", "--estimator", "dbb"]
CONSTANT = ["--actor.loss_agg_mode", "seq-mean-token-sum-norm"]


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (
            ["--method", "dap"],
            "unknown --method 'dap', did you mean dapo?; known: dapo, dr_grpo, greso, grpo, repo, single, none (the",
        ),
        (
            ["--method", "dapo", *BATCHES],
            "--rollout.strategy dynamic looks for groups with different rewards; a group of "
            "--rollout.n_samples_per_prompt 1 never has them; give 2 or more, or --rollout.strategy plain",
        ),
        (["--method", "greso", *BATCHES], "--rollout.strategy greso looks for groups"),
        (
            ["--method", "dapo", "--reward.remote_url", "", "--eval.dataset", ""],
            "--rollout.strategy dynamic needs rewards at generation; give --reward.remote_url",
        ),
        (
            ["--rollout.strategy", "dyn"],
            f"--rollout.strategy: unknown rollout strategy 'dyn'; known: {', '.join(strategies.available())}, ",
        ),
        (["--method", "dapo", "--dynamic.multiple", "0"], "--dynamic.multiple 0 is below 1"),
        (["--method", "dapo", "--dynamic.max_rounds", "-1"], "--dynamic.max_rounds -1 is below 0"),
        (
            ["--method", "greso", "--algo.dynamic_filtering_enable"],
            "--algo.dynamic_filtering_enable asks for another --rollout.strategy than greso; give one",
        ),
        (["--method", "greso", "--greso.p_easy", "0"], "--greso.p_easy 0 is not in (0, 1]"),
        (["--method", "greso", "--greso.p_hard", "1.5"], "--greso.p_hard 1.5 is not in (0, 1]"),
        (["--method", "greso", "--greso.min_p", "-1"], "--greso.min_p -1 is not in (0, 1]"),
        (["--method", "greso", "--greso.max_p", "nan"], "--greso.max_p nan is not in (0, 1]"),
        (["--method", "greso", "--greso.floor", "0"], "--greso.floor 0 is not in (0, 1]"),
        (["--method", "greso", "--greso.target_easy", "0"], "--greso.target_easy 0 is not in (0, 1)"),
        (["--method", "greso", "--greso.target_hard", "1"], "--greso.target_hard 1 is not in (0, 1)"),
        (["--method", "greso", "--greso.step", "1"], "--greso.step 1 is not in (0, 1)"),
        (["--method", "greso", "--greso.min_p", "0.96"], "--greso.min_p 0.96 is above --greso.max_p 0.95"),
        (["--method", "greso", "--greso.safety", "0.9"], "--greso.safety 0.9 is below 1: rounds would ask for fewer"),
        (["--method", "greso", "--greso.safety", "nan"], "--greso.safety nan is below 1"),
        (["--method", "greso", "--greso.batch", "0"], "--greso.batch 0 is below 1"),
        (["--method", "greso", "--greso.min_batch", "0"], "--greso.min_batch 0 is below 1"),
        (["--replay.samples", "-1"], "--replay.samples -1 is below 1"),
        (["--method", "repo", "--replay.cache", "0"], "--replay.cache 0 is below 1"),
        (["--method", "repo", "--replay.min_cache", "0"], "--replay.min_cache 0 is below 1"),
        (
            ["--method", "repo", "--replay.samples", "17"],
            "--replay.samples 17 and --replay.min_cache 16 cannot exceed --replay.cache 16, the rollouts that are kept",
        ),
        (["--method", "repo", "--replay.cache", "15"], "--replay.min_cache 16 cannot exceed --replay.cache 15"),
        (
            ["--method", "repo", "--replay.coef", "0"],
            "--replay.coef 0 is not above 0; --replay.samples 0 turns replay off",
        ),
        (["--method", "repo", "--replay.coef", "nan"], "--replay.coef nan is not above 0"),
        (
            ["--method", "repo", "--estimator", "dbb", "--replay.normalization", "mixed"],
            "--replay.normalization mixed takes mean and deviation from new and replayed rewards together, where "
            "--estimator dbb has its own; use split, or --estimator point",
        ),
        (
            ["--method", "dapo", "--replay.samples", "8", "--replay.normalizer", "formula"],
            "--replay.normalizer formula weighs rollouts, --actor.loss_agg_mode token-mean weighs tokens; "
            "use seq-mean-token-mean, or --replay.normalizer code",
        ),
        (
            ["--method", "repo", "--algo.advantage.is_correction_level", "token"],
            "--algo.advantage.is_correction_level does not go with --replay.samples 8: no log-probs of vLLM are kept",
        ),
        (
            ["--method", "repo", "--algo.kl.use_loss"],
            "--algo.kl.use_loss does not go with --replay.samples 8: no log-probs of the reference model are kept",
        ),
        (
            ["--method", "repo", "--data.max_images_per_prompt", "1"],
            "--data.max_images_per_prompt does not go with --replay.samples 8: no images are kept; leave one out",
        ),
        (
            [*CONSTANT, "--actor.policy_loss_type", "gspo"],
            "sums over tokens, --actor.policy_loss_type gspo has one ratio a sequence; use ppo",
        ),
        (
            ["--train.max_rollouts", "511"],
            "--train.max_rollouts 511 is less than one step: --rollout.batch_size 64 x 8 = 512 rollouts; raise it",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(argv, line):
    with pytest.raises(UsageError) as caught:
        checks.check(parse(*argv))
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_replay_and_micro_batches_of_their_own_exclude_each_other():
    settings = parse("--method", "repo", "--train.dynamic_batch_enable")
    with pytest.raises(UsageError, match=r"--train.dynamic_batch_enable does not go with --replay.samples 8: it makes"):
        checks.check(dataclasses.replace(settings, on_cpu=False))  # without CUDA the flag itself is refused


def test_a_loss_over_a_constant_length_needs_one():
    with pytest.raises(UsageError, match=r"divides by a length; give --rollout.max_new_tokens"):
        checks.check(arguments.parse([*MODEL, "--method", "dr_grpo"]))
    checks.check(arguments.parse([*MODEL, "--method", "dr_grpo", "--rollout.max_new_tokens", "300"]))


@pytest.mark.parametrize(
    ("argv", "flag"),
    [
        (["--method", "dapo"], "--rollout.strategy dynamic"),
        (["--method", "greso"], "--rollout.strategy greso"),
        (["--rollout.strategy", "greso", "--algo.dynamic_filtering_enable"], "--rollout.strategy greso"),
        (["--method", "repo"], "--replay.samples 8"),
        (["--method", "dr_grpo"], "--actor.loss_agg_mode seq-mean-token-sum-norm"),
        (["--train.max_rollouts", "512"], "--train.max_rollouts 512"),
    ],
)
def test_openrlhf_alone_has_only_its_own_pieces(argv, flag):
    with pytest.raises(UsageError) as caught:
        checks.check(parse("--estimator", "none", *argv))
    expected = (
        f"{flag} is not OpenRLHF's, which --estimator none leaves as it is; use --estimator point, its group mean"
    )
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    "argv",
    [
        ["--train.max_rollouts", "512"],
        ["--method", "dapo", "--replay.samples", "16", "--replay.normalizer", "code"],
        ["--method", "greso", "--greso.safety", "1", "--greso.p_easy", "1", "--greso.min_p", "0.95"],
        ["--method", "repo", "--replay.normalization", "mixed", "--replay.normalizer", "formula"],
        ["--method", "dr_grpo", "--replay.samples", "1", "--replay.min_cache", "1"],
        ["--estimator", "none", "--algo.dynamic_filtering_enable"],
    ],
)
def test_what_works_is_let_through(argv):
    checks.check(parse(*argv))

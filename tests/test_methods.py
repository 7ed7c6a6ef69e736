"""Training methods: what each recipe sets, what wins over it, what the start prints, and what is refused."""

import numpy as np
import pytest

from openrlhf_dbb import chosen, methods
from openrlhf_dbb.core.strategies import Decision
from openrlhf_dbb.driver import arguments, checks

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


@pytest.mark.parametrize("method", methods.names())
def test_a_method_sets_its_flags_and_passes_all_checks_with_its_own_estimator(method):
    settings = parse("--method", method)
    assert settings.estimator == methods.default_estimator(method)
    assert {settings.origin[flag] for flag in methods.recipe(method, settings.estimator)} == {
        f"method {method}"
    }
    checks.check(settings)


@pytest.mark.parametrize(
    ("method", "estimator", "clip"),
    [
        ("grpo", "point", [0.2, 0.28]),
        ("grpo", "dbb", [0.98, 0.98]),
        ("centered", "dbb", [0.2, 0.28]),
    ],
)
def test_the_estimator_decides_the_clip_range_unless_the_method_centres(method, estimator, clip):
    settings = parse("--method", method, "--estimator", estimator)
    assert look_up(settings, "actor.eps_clip_low_high") == clip


def test_the_start_says_below_what_advantages_are_thinned():
    said = [
        methods.describe("grpo", parse(*flags).args, "dbb")
        for flags in ([], ["--train.thin", "0.5"])
    ]
    assert ["thinned below 0.5;" in text for text in said] == [False, True]


def sizes(settings):
    """Prompts of a step, rollouts of a prompt, rollouts of an optimizer step, passes over the prompts."""
    flags = (
        "rollout.batch_size",
        "rollout.n_samples_per_prompt",
        "train.batch_size",
        "train.num_episodes",
    )
    return tuple(look_up(settings, flag) for flag in flags)


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        (["--preset", "tiny"], (64 * 8, 1, 256, 4 * 8)),
        (
            ["--actor.model_name_or_path", "some/model"],
            (128 * 8, 1, 512, 4 * 8),
        ),  # preset default: the paper's sizes
        (
            ["--preset", "tiny", "--rollout.batch_size", "256"],
            (256, 1, 256, 32),
        ),  # the command line wins
    ],
)
def test_one_rollout_a_prompt_keeps_the_presets_rollouts_and_optimizer_steps(base, expected):
    settings = arguments.parse([*base, "--method", "single", *DATA_AND_REWARD])
    assert sizes(settings) == expected
    assert (settings.estimator, settings.origin.get("dbb.discount")) == ("auto", None)
    checks.check(settings)


def test_one_rollout_a_prompt_has_a_discount_of_its_own_and_without_a_preset_the_sizes_that_are_given():
    settings = parse("--method", "single", "--estimator", "dbb")
    assert (settings.parameters["discount"], settings.origin["dbb.discount"]) == (
        0.85,
        "method single",
    )
    settings = arguments.parse([*MODEL, "--preset", "none", "--method", "single"])
    assert sizes(settings)[1] == 4  # of MODEL: the command line's
    assert not {"rollout.batch_size", "train.num_episodes"} & set(settings.origin)


def test_without_a_method_openrlhf_trains_by_its_flags():
    alone = arguments.parse([*MODEL, "--estimator", "none"])
    assert (alone.method, look_up(alone, "algo.kl.init_coef")) == ("none", 0.01)  # OpenRLHF's
    settings = parse("--method", "none")
    assert (settings.method, settings.estimator) == ("none", "dbb")
    openrlhf = {
        "actor.loss_agg_mode": "token-mean",
        "algo.kl.init_coef": 0.01,
        "actor.eps_clip_low_high": [0.2, 0.2],
    }
    assert {flag: look_up(settings, flag) for flag in openrlhf} == openrlhf
    # An estimator needs a form
    assert look_up(settings, "algo.advantage.estimator") == "group_norm"
    checks.check(settings)


def test_openrlhfs_switch_asks_for_dynamic_sampling_within_its_range():
    def decided(settings):
        scores = np.array([-1.0, 1.0])  # they differ, but 0 is not above 0
        return settings.strategy.sampler(chosen.facts(settings.args)).judge(0, scores)

    settings = parse("--algo.dynamic_filtering_enable")
    assert look_up(settings, "rollout.strategy") == "dynamic"
    assert settings.origin["rollout.strategy"] == "--algo.dynamic_filtering_enable"
    assert decided(settings) is Decision.REPLACE
    assert decided(parse("--rollout.strategy", "dynamic")) is Decision.TRAIN
    wider = ["--algo.dynamic_filtering_enable", "--algo.dynamic_filtering_range", "-1", "1"]
    assert decided(parse(*wider)) is Decision.TRAIN

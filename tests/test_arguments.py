"""The command line: OpenRLHF's flags untouched, presets beneath, ours beside; combinations that are refused."""

import argparse
import os
import runpy
import shlex
import sys
from dataclasses import dataclass
from operator import attrgetter
from types import SimpleNamespace

import pytest

from openrlhf_dbb import estimators, upstream
from openrlhf_dbb.driver import arguments, checks, flags, printed
from openrlhf_dbb.driver.prepare import Prepared
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.platform import cpu

ON_CPU = cpu.active()
MODEL = [
    "--actor.model_name_or_path",
    "some/model",
    "--reward.remote_url",
    "math_answer",
    "--vllm.num_engines",
    "1",
]


# The time of day; loss aggregation, advantage forms, 32 bits without CUDA; our texts of the most used flags.
CHANGED = {
    ("logger.wandb.run_name", "default"),
    ("actor.loss_agg_mode", "choices"),
    ("actor.loss_agg_mode", "help"),
    ("algo.advantage.estimator", "choices"),
}
for flag in flags.MOST_USED:
    CHANGED.add((flag, "help"))
if ON_CPU:
    CHANGED.add(("ds.param_dtype", "choices"))
    CHANGED.add(("ds.param_dtype", "help"))


def parse(*argv, **options):
    return arguments.parse(list(argv), **options)


@pytest.fixture(scope="module")
def openrlhf_parser():
    """The parser that OpenRLHF's own command builds when it is run."""
    cpu.prepare_driver()
    caught = []

    class Caught(Exception):
        pass

    def parse_args(self, *_):
        caught.append(self)
        raise Caught

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
        with pytest.raises(Caught):
            runpy.run_module(f"openrlhf.{upstream.COMMAND}", run_name="__main__")
    return caught[0]


def test_every_openrlhf_flag_keeps_its_name_default_and_meaning(openrlhf_parser):
    ours = {
        tuple(action.option_strings): action
        for action in arguments.build_parser([arguments.HELP_ALL])._actions
    }
    assert len(openrlhf_parser._actions) > 150
    for theirs in openrlhf_parser._actions:
        mine = ours[tuple(theirs.option_strings)]
        for attribute in (
            "dest",
            "default",
            "type",
            "nargs",
            "choices",
            "help",
            "const",
            "required",
        ):
            if (theirs.dest, attribute) not in CHANGED:
                assert getattr(mine, attribute) == getattr(theirs, attribute), (
                    theirs.dest,
                    attribute,
                )
        assert type(mine) is type(theirs)


def differing(names, one, other):
    """The flags whose values differ between two trees of arguments."""
    return {name for name in names if attrgetter(name)(one) != attrgetter(name)(other)}


def test_without_a_preset_everything_is_as_openrlhf_has_it(openrlhf_parser):
    settings = parse("--preset", "none", *MODEL)
    mine = settings.openrlhf_args()
    theirs = openrlhf_parser.parse_args(
        [w.replace("math_answer", mine.reward.remote_url[0]) for w in MODEL]
    )
    flags_of_theirs = list(vars(theirs))
    assert len(flags_of_theirs) > 150
    theirs = upstream.finish_arguments(theirs)
    changed = differing(flags_of_theirs, mine, theirs)
    assert changed == differing(flags_of_theirs, settings.args, theirs)
    for flag in arguments.OUTPUTS:  # the same folders, wherever an actor runs
        folder = attrgetter(flag)(theirs)
        assert attrgetter(flag)(mine) == (folder and os.path.abspath(folder))
    allowed = {"logger.wandb.run_name", *arguments.OUTPUTS}
    if ON_CPU:
        allowed.update(cpu.FLAG_DEFAULTS)
    assert changed <= allowed


def test_prompts_are_shared_in_generation_but_for_rollouts_that_outlive_their_weights():
    def caches(*flags):
        return parse(*MODEL, *flags).args.vllm.enable_prefix_caching

    partial = ("--train.async_enable", "--no-train.colocate_all", "--train.partial_rollout_enable")
    assert (caches(), caches(*partial), caches(*partial, "--vllm.enable_prefix_caching")) == (
        True,
        False,
        True,
    )


def test_preset_method_estimator_and_form_are_chosen_where_a_command_line_leaves_them_open():
    def chosen(*argv):
        settings = parse(*argv)
        return (
            settings.preset,
            settings.method,
            settings.estimator,
            settings.args.algo.advantage.estimator,
        )

    group = [*MODEL, "--preset", "none", "--rollout.n_samples_per_prompt", "4"]
    assert chosen(*MODEL) == ("default", "grpo", "point", "group_norm")
    assert chosen(*MODEL, "--preset", "tiny") == ("tiny", "grpo", "dbb", "group_norm")
    assert chosen(*MODEL, "--estimator", "none") == ("none", "none", "none", "gae")
    assert chosen(*group) == ("none", "none", "none", "gae")
    assert chosen(*group, "--estimator", "dbb") == ("none", "grpo", "dbb", "group_norm")
    form = ["--algo.advantage.estimator", "dr_grpo"]
    assert chosen(*group, *form, "--estimator", "dbb") == ("none", "grpo", "dbb", "dr_grpo")
    if ON_CPU:  # with CUDA the bare command is the paper's setting
        assert chosen() == ("smollm2", "grpo", "point", "group_norm")
        assert chosen("--estimator", "dbb") == ("smollm2", "grpo", "dbb", "group_norm")


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--estimater", "dbb"], r"--estimater\b.*--estimator\b"),
        (["--preset", "tiny", "--dbb.discount", "1.5"], r"--dbb.discount.* 1.5 .*\(0, 1\]"),
        (["--preset", "tiny", "--reward.remote_url", "matth"], r"'matth' .*URL.*\.py file"),
        (["--preset", "tinny"], r"--preset 'tinny'.*\btiny\b.*: default, "),
        (["--estimator", "dbbb"], r"estimator 'dbbb'.*\bdbb\b"),
        (
            ["--preset", "tiny", "--rollout.strategy", "math:sqrt"],
            "^--rollout.strategy: .*math:sqrt.* not a subclass",
        ),
        (
            [
                "--estimator",
                "none",
                "--actor.model_name_or_path",
                "m",
                "--data.prompt_dataset",
                "d",
            ],
            r"--critic.model_name_or_path None.*: AttributeError: .*args.reward",
        ),
        (
            ["--preset", "tiny", "--rollout.micro_batch_size", "999"],
            r"--rollout.n_samples_per_prompt 8, --rollout.batch_size 64, --rollout.micro_batch_size 999, .*; change",
        ),
    ],
)
def test_a_mistyped_command_line_gets_one_line_that_helps(argv, problem):
    with pytest.raises(UsageError, match=problem) as caught:
        parse(*argv)
    assert "\n" not in str(caught.value)


URLS = (
    "https://hunter2@h/score,http://u:se/hunter2@x@h/score?token=hunter2&n=1,http://h/score#hunter2"
)


@pytest.fixture(params=["postgresql://u:a hunter2@h/db", "password=hunter2"])
def with_secrets(request):
    """An address of a store with a password, and settings with it and with further ones."""
    store = request.param
    return store, parse(
        "--preset", "tiny", f"--store.url={store}", "--warm_start", "x", f"--warm_start_url={store}",
        "--logger.wandb.key=hunter2",
        "--reward.remote_url", URLS, "--data.prompt_dataset", "s3://k:hunter2@b/a.jsonl",
        "--eval.dataset", "https://h/b.jsonl?sig=hunter2", "--data.task_instruction", "?x=1 to me@h & co",
    )  # fmt: skip


def test_no_secret_reaches_openrlhfs_arguments_or_the_stored_configuration(with_secrets):
    store, settings = with_secrets
    assert "store" not in settings.openrlhf_args().__dict__
    prepared = Prepared(settings, prompts=None)
    for text in (
        repr(settings),
        repr(settings.flags),
        settings.command,
        printed.configuration(settings),
        printed.plan(prepared),
    ):
        assert "hunter2" not in text
    assert settings.args.store.url == store
    assert settings.args.reward.remote_url == URLS.split(",")


def test_a_stored_command_has_all_but_its_secrets(with_secrets):
    _, settings = with_secrets
    words = shlex.split(settings.command)
    expected = "--preset tiny --store.url *** --warm_start x --warm_start_url ***"
    assert words[2:10] == expected.split()
    assert words[-7:] == [
        "https://***@h/score,http://***@h/score?***,http://h/score#***", "--data.prompt_dataset", "s3://***@b/a.jsonl",
        "--eval.dataset", "https://h/b.jsonl?***", "--data.task_instruction", "?x=1 to me@h & co",
    ]  # fmt: skip
    assert settings.flags["data.task_instruction"] == words[-1]
    assert settings.flags["data.input_key"] == "input"


def test_openrlhf_sends_no_secret_to_its_tracker_and_prints_none(monkeypatch, capsys):
    from openrlhf.utils.logging_utils import WandbLogger

    from openrlhf_dbb.driver.light_backend import LightBackend

    words = [
        "--preset",
        "tiny",
        "--logger.wandb.key",
        "hunter2",
        "--reward.remote_url",
        URLS,
        "--store.url",
        "hunter2",
    ]
    args = parse(*words).openrlhf_args()
    sent = []
    tracker = SimpleNamespace(
        api=type("Api", (), {"api_key": property(lambda _: os.environ.get("WANDB_API_KEY"))})(),
        define_metric=lambda *_, **__: None, Table=lambda columns: None,
        init=lambda config, **_: sent.append((os.environ["WANDB_API_KEY"], repr(config) + repr(sys.argv))),
    )  # fmt: skip
    monkeypatch.setenv("WANDB_API_KEY", "")
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.setitem(sys.modules, "wandb", tracker)
    monkeypatch.setattr(sys, "argv", ["train", *words])
    upstream.mask_trackers()
    upstream.mask_trackers()
    WandbLogger(args)
    [(key, config)] = sent
    assert key == "hunter2" and "hunter2" not in config and "https://***@h/score" in config
    LightBackend(args).print(args)
    assert "hunter2" not in capsys.readouterr().out and args.logger.wandb.key == "hunter2"


def test_openrlhf_gets_a_copy_of_the_settings():
    settings = parse("--preset", "tiny")
    copy = settings.openrlhf_args()
    copy.rollout.batch_size = 1
    copy.actor.eps_clip_low_high.append(3)
    assert settings.args.rollout.batch_size == 64
    assert settings.args.actor.eps_clip_low_high == [0.98, 0.98]


def test_values_follow_from_flags_of_the_command_line():
    flags = ["--preset", "tiny", "--actor.eps_clip", "0.1", "--rollout.top_p", "0.9"]
    settings = parse(*flags)
    assert (settings.args.actor.eps_clip_low_high, settings.args.eval.top_p) == ([0.1, 0.1], 0.9)
    assert settings.origin["actor.eps_clip_low_high"] == "--actor.eps_clip"
    assert parse(*flags, "--eval.top_p", "0.5").args.eval.top_p == 0.5


def test_the_launchers_rank_arguments_are_harmless():
    settings = parse("--local_rank=1", "--preset", "tiny", world_size=2)
    assert settings.args.local_rank == -1
    if ON_CPU:
        assert (settings.args.actor.num_gpus_per_node, settings.args.vllm.num_engines) == (2, 2)


def test_another_openrlhf_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(upstream, "CHECKED_VERSIONS", ("0.0.1",))
    with pytest.raises(UsageError, match=r"openrlhf 0.11.2 .* 0.0.1\b"):
        parse()


OWN_PRESET = """
extends = "default"
[flags]
estimator = "dbb"
actor.adam.lr = 2e-6
rollout.batch_size = 32
"train.batch_size" = 256
[flags.eval]
temperature = 0.5
[estimator.dbb]
dbb.discount = 0.9
[estimator.point]
rollout.n_samples_per_prompt = 4
"""


def test_a_preset_of_ones_own_is_a_file(tmp_path):
    (tmp_path / "mine.toml").write_text(OWN_PRESET)
    settings = parse("--preset", f"{tmp_path}/mine.toml", *MODEL[:4], "--rollout.batch_size", "64")
    args = settings.args
    assert (args.actor.adam.lr, args.rollout.batch_size, args.train.batch_size) == (2e-6, 64, 256)
    assert (args.eval.temperature, settings.parameters["discount"], args.train.num_episodes) == (
        0.5,
        0.9,
        4,
    )
    assert settings.origin["actor.adam.lr"] == f"preset {tmp_path}/mine.toml"
    assert (
        settings.origin["train.num_episodes"]
        == settings.origin["actor.adam.betas"]
        == "preset default"
    )
    assert settings.run_name.startswith("dbb-mine-20")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[flags]\nactor.adam.lr = ", "cannot be read: "),
        ("[flag]\nactor.adam.lr = 1e-6", r"'flag'.*\bflags\b"),
        ("[flags]\nactor.adm.lr = 1e-6", "--actor.adm.lr to 1e-06: .*--actor.adam.lr"),
        ("[fp32]\nactor.adm.lr = 1e-6", "--actor.adm.lr to 1e-06: .*--actor.adam.lr"),
        ("[fp32]\nactor.adam.lr = 'high'", "--actor.adam.lr to 'high': .*invalid float"),
        ("[flags]\nactor.optim = 'adm'", "--actor.optim to 'adm': .*choose from"),
    ],
)
def test_a_faulty_preset_file_gets_one_clear_line(tmp_path, text, problem):
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(UsageError, match=problem) as caught:
        parse("--preset", f"{tmp_path}/mine.toml", *MODEL[:4])
    assert f"{tmp_path}/mine.toml" in str(caught.value) and "\n" not in str(caught.value)


DATA = [
    "--data.prompt_dataset",
    "some/data",
    "--data.label_key",
    "label",
    "--rollout.n_samples_per_prompt",
    "8",
]
OWN = ["--preset", "none", "--actor.model_name_or_path", "m", "--vllm.num_engines", "1", *DATA]
FORM = "--algo.advantage.estimator"
GROUP = "--rollout.n_samples_per_prompt"


@dataclass(frozen=True)
class Median(estimators.get("point")):
    name = "median"

    def group_weight(self, state, rewards_P_G):
        return None


MEDIAN = f"{__name__}:Median"


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--preset", "none"], "^--actor.model_name_or_path: missing"),
        pytest.param(
            ["--preset", "qwen3-1.7b"],
            "^--preset qwen3-1.7b needs CUDA.*; use --preset",
            marks=pytest.mark.skipif(not cpu.active(), reason="with CUDA it can be trained"),
        ),
        (["--run_name=a/b"], "--run_name.*: it names folders; use"),
        (["--run_name=.."], "--run_name.*: it names folders; use"),
        (["--run_name=-x"], "--run_name.*: it names folders; use"),
        ([f"--run_name={'a' * 201}"], "--run_name.*: it names folders; use"),
        (["--resume", "--warm_start", "x"], "^--resume with --warm_start x: "),
        (["--vllm.num_engines", "2"], "--vllm.num_engines 2 with --vllm.tensor_parallel_size 1: "),
        (
            ["--estimator", "none", "--probe.fraction", "0.1"],
            "^--probe.fraction 0.1 with --estimator none: ",
        ),
        (["--estimator", MEDIAN, FORM, "rloo"], f"{FORM} rloo with --estimator {MEDIAN}: "),
        (
            ["--estimator", "point", GROUP, "1", "--train.batch_size", "8"],
            f"--estimator point with {GROUP} 1: .* 2 or more",
        ),
        (
            [
                "--rollout.strategy",
                "posterior",
                "--estimator",
                "point",
                "--point.memory",
                "gaussian",
            ],
            "--rollout.strategy posterior: .*gaussian.*; use --estimator point with",
        ),
        (
            [*OWN, "--reward.model_name_or_path", "m"],
            "^--reward.model_name_or_path m with --estimator dbb: ",
        ),
        (
            [*OWN, "--reward.model_name_or_path", "m", "--estimator", "point"],
            "^--reward.model_name_or_path m with --estimator point: ",
        ),
        (["--eval.steps", "0"], "^--eval.steps 0: .*1 or more, or -1"),
        (
            ["--train.max_rollouts", "511"],
            f"^--train.max_rollouts 511 with --rollout.batch_size 64 with {GROUP} 8: ",
        ),
        (["--replay.samples", "17"], "--replay.samples = 17 is more than .*16 .*replay.cache"),
        (["--replay.samples", "-1"], r"--replay.samples = -1 .*\[0, inf\)"),
        (["--replay.cache", "8"], "^--replay.cache 8 with --replay.samples 0: .*; give"),
        (
            ["--estimator", "none", "--replay.samples", "8"],
            "^--replay.samples 8 with --estimator none: ",
        ),
        (
            ["--method", "repo", FORM, "reinforce_baseline"],
            f"^--replay.samples 8 with {FORM} reinforce_baseline: ",
        ),
        (
            ["--method", "repo", "--train.dynamic_batch_enable"],
            "^--replay.samples 8 with --train.dynamic_batch_enable",
        ),
        (["--method", "repo", "--algo.kl.use_loss"], "^--replay.samples 8 with --algo.kl.use_loss"),
        (
            ["--method", "repo", "--data.max_images_per_prompt", "1"],
            "^--replay.samples 8 with --data.max_images_per_prompt",
        ),
        (
            ["--method", "repo", "--algo.advantage.is_correction_level", "token"],
            "^--replay.samples 8 with --algo.advantage.is_correction_level",
        ),
        (["--train.batch_size", "24"], f"{GROUP} 8 with --train.batch_size 24: .*no multiple"),
    ],
)
def test_what_would_train_wrongly_or_fail_late_is_refused_in_one_line(argv, problem):
    with pytest.raises(UsageError, match=problem) as refused:
        checks.check(arguments.parse(["--preset", "tiny", "--estimator", "dbb", *argv]))
    assert "\n" not in str(refused.value)


def test_an_estimator_that_cannot_leave_a_rollout_out_takes_other_forms():
    checks.check(arguments.parse(["--preset", "tiny", "--estimator", MEDIAN, FORM, "dr_grpo"]))

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
MODEL = ["--actor.model_name_or_path", "some/model", "--reward.remote_url", "math_answer", "--vllm.num_engines", "1"]


# The time of day; loss aggregation, advantage forms, 32 bits without CUDA; our texts of the most used flags.
CHANGED = {("logger.wandb.run_name", "default"), ("actor.loss_agg_mode", "choices"), ("actor.loss_agg_mode", "help")}
CHANGED |= {("algo.advantage.estimator", "choices"), *((flag, "help") for flag in flags.MOST_USED)}
if ON_CPU:
    CHANGED |= {("ds.param_dtype", "choices"), ("ds.param_dtype", "help")}


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
    ours = {tuple(action.option_strings): action for action in arguments.build_parser([arguments.HELP_ALL])._actions}
    compared = 0
    for theirs in openrlhf_parser._actions:
        mine = ours[tuple(theirs.option_strings)]
        for attribute in ("dest", "default", "type", "nargs", "choices", "help", "const", "required"):
            if (theirs.dest, attribute) not in CHANGED:
                assert getattr(mine, attribute) == getattr(theirs, attribute), (theirs.dest, attribute)
        assert type(mine) is type(theirs)
        compared += 1
    assert compared > 150


def test_without_a_preset_everything_is_as_openrlhf_has_it(openrlhf_parser):
    settings = parse("--preset", "none", *MODEL)
    mine = settings.openrlhf_args()
    theirs = openrlhf_parser.parse_args([w.replace("math_answer", mine.reward.remote_url[0]) for w in MODEL])
    flags_of_theirs = list(vars(theirs))
    theirs = upstream.finish_arguments(theirs)
    changed = {flag for flag in flags_of_theirs if attrgetter(flag)(mine) != attrgetter(flag)(theirs)}
    assert changed == {flag for flag in flags_of_theirs if attrgetter(flag)(settings.args) != attrgetter(flag)(theirs)}
    for flag in arguments.OUTPUTS:  # the same folders, wherever an actor runs
        folder = attrgetter(flag)(theirs)
        assert attrgetter(flag)(mine) == (folder and os.path.abspath(folder))
    changed -= {"logger.wandb.run_name", *arguments.OUTPUTS}
    assert changed <= (set(cpu.FLAG_DEFAULTS) if ON_CPU else set())
    assert len(flags_of_theirs) > 150


def test_prompts_are_shared_in_generation_but_for_rollouts_that_outlive_their_weights():
    def caches(*flags):
        return parse(*MODEL, *flags).args.vllm.enable_prefix_caching

    partial = ("--train.async_enable", "--no-train.colocate_all", "--train.partial_rollout_enable")
    assert (caches(), caches(*partial), caches(*partial, "--vllm.enable_prefix_caching")) == (True, False, True)


def test_what_a_command_line_leaves_open():
    def chosen(*argv):
        settings = parse(*argv)
        return settings.preset, settings.method, settings.estimator, settings.args.algo.advantage.estimator

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
    ("argv", "line"),
    [
        (["--estimater", "dbb"], r"unknown flag --estimater, did you mean --estimator\?"),
        (["--preset", "tiny", "--dbb.discount", "1.5"], r"--dbb.discount.* 1.5 .*\(0, 1\]"),
        (["--preset", "tiny", "--reward.remote_url", "matth"], r"'matth' is neither a URL, a .py file nor"),
        (["--preset", "tinny"], r"unknown --preset 'tinny', did you mean tiny\?; known: default, "),
        (["--estimator", "dbbb"], r"unknown estimator 'dbbb'; known: .*, did you mean dbb\?"),
        (["--preset", "tiny", "--rollout.strategy", "math:sqrt"], "^--rollout.strategy: .*math:sqrt.* not a subclass"),
        (
            ["--estimator", "none", "--actor.model_name_or_path", "m", "--data.prompt_dataset", "d"],
            r"OpenRLHF cannot work with --critic.model_name_or_path None.*: AttributeError: .*, at: .*args.reward",
        ),
        (
            ["--preset", "tiny", "--rollout.micro_batch_size", "999"],
            r"--rollout.n_samples_per_prompt 8, --rollout.batch_size 64, --rollout.micro_batch_size 999, .*: The "
            r"number of sample batches must be greater than .* actor processes.; change one of them",
        ),
    ],
)
def test_a_mistyped_command_line_gets_one_line_that_helps(argv, line):
    with pytest.raises(UsageError, match=line) as caught:
        parse(*argv)
    assert "\n" not in str(caught.value)


URLS = "https://hunter2@h/score,http://u:se/hunter2@x@h/score?token=hunter2&n=1,http://h/score#hunter2"


@pytest.mark.parametrize("store", ["postgresql://u:a hunter2@h/db", "password=hunter2"])
def test_no_secret_reaches_openrlhfs_arguments_or_the_stored_configuration(store):
    settings = parse(
        "--preset", "tiny", f"--store.url={store}", "--warm_start", "x", f"--warm_start_url={store}",
        "--logger.wandb.key=hunter2",
        "--reward.remote_url", URLS, "--data.prompt_dataset", "s3://k:hunter2@b/a.jsonl",
        "--eval.dataset", "https://h/b.jsonl?sig=hunter2", "--data.task_instruction", "?x=1 to me@h & co",
    )  # fmt: skip
    assert "store" not in settings.openrlhf_args().__dict__
    assert "hunter2" not in repr(settings.flags) + settings.command
    words = shlex.split(settings.command)
    assert words[2:10] == ["--preset", "tiny", "--store.url", "***", "--warm_start", "x", "--warm_start_url", "***"]
    assert words[-7:] == [
        "https://***@h/score,http://***@h/score?***,http://h/score#***", "--data.prompt_dataset", "s3://***@b/a.jsonl",
        "--eval.dataset", "https://h/b.jsonl?***", "--data.task_instruction", "?x=1 to me@h & co",
    ]  # fmt: skip
    assert settings.flags["data.task_instruction"] == words[-1] and settings.flags["data.input_key"] == "input"
    assert "hunter2" not in repr(settings)
    assert "hunter2" not in printed.configuration(settings) + printed.plan(Prepared(settings, prompts=None))
    assert settings.args.store.url == store and settings.args.reward.remote_url == URLS.split(",")


def test_openrlhf_sends_no_secret_to_its_tracker_and_prints_none(monkeypatch, capsys):
    from openrlhf.utils.logging_utils import WandbLogger

    from openrlhf_dbb.driver.light_backend import LightBackend

    words = ["--preset", "tiny", "--logger.wandb.key", "hunter2", "--reward.remote_url", URLS, "--store.url", "hunter2"]
    args, sent = parse(*words).openrlhf_args(), []
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
    with pytest.raises(UsageError, match=r"openrlhf 0.11.2 is installed, but openrlhf_dbb was checked on 0.0.1 only"):
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
    assert (args.eval.temperature, settings.parameters["discount"], args.train.num_episodes) == (0.5, 0.9, 4)
    assert settings.origin["actor.adam.lr"] == f"preset {tmp_path}/mine.toml"
    assert settings.origin["train.num_episodes"] == settings.origin["actor.adam.betas"] == "preset default"
    assert settings.run_name.startswith("dbb-mine-20")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[flags]\nactor.adam.lr = ", r"cannot be read: Invalid value \(at "),
        ("[flag]\nactor.adam.lr = 1e-6", r"has 'flag'; allowed: description, extends, needs_cuda, flags, "),
        ("[flags]\nactor.adm.lr = 1e-6", r"sets --actor.adm.lr to 1e-06: .*, did you mean --actor.adam.lr\?"),
        ("[flags]\nactor.optim = 'adm'", r"sets --actor.optim to 'adm': .* invalid choice: 'adm' \(choose from"),
    ],
)
def test_a_faulty_preset_file_gets_one_clear_line(tmp_path, text, line):
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(UsageError, match=line) as caught:
        parse("--preset", f"{tmp_path}/mine.toml", *MODEL[:4])
    assert f"{tmp_path}/mine.toml" in str(caught.value) and "\n" not in str(caught.value)


DATA = ["--data.prompt_dataset", "some/data", "--data.label_key", "label", "--rollout.n_samples_per_prompt", "8"]
OWN = ["--preset", "none", "--actor.model_name_or_path", "m", "--vllm.num_engines", "1", *DATA]
FORM, GROUP = "--algo.advantage.estimator", "--rollout.n_samples_per_prompt"


@dataclass(frozen=True)
class Median(estimators.get("point")):
    name = "median"

    def group_weight(self, state, rewards_P_G):
        return None


MEDIAN = f"{__name__}:Median"


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--preset", "none"], "--actor.model_name_or_path: missing"),
        pytest.param(["--preset", "qwen3-1.7b"], "--preset qwen3-1.7b needs CUDA, and there is none here; use --preset",
                     marks=pytest.mark.skipif(not cpu.active(), reason="with CUDA it can be trained")),
        *(([f"--run_name={name}"], ": it names folders; use") for name in ("a/b", "..", "-x", "a" * 201)),
        (["--resume", "--warm_start", "x"], "--resume with --warm_start x: one continues a run"),
        (["--vllm.num_engines", "2"], "--vllm.num_engines 2 with --vllm.tensor_parallel_size 1: the policy and vLLM"),
        (["--estimator", "none", "--probe.fraction", "0.1"], "--probe.fraction 0.1 with --estimator none: OpenRLHF"),
        (["--estimator", MEDIAN, FORM, "rloo"], f"{FORM} rloo with --estimator {MEDIAN}: the form scores a rollout by"),
        (["--estimator", "point", GROUP, "1", "--train.batch_size", "8"], f"point with {GROUP} 1: it needs 2 or more"),
        (["--rollout.strategy", "posterior", "--estimator", "point", "--point.memory", "gaussian"],
         "posterior: it draws prompts by a forecast, and gaussian makes none; use --estimator point with"),
        ([*OWN, "--reward.model_name_or_path", "m"], "--reward.model_name_or_path m with --estimator dbb: a model"),
        ([*OWN, "--reward.model_name_or_path", "m", "--estimator", "point"],
         "--reward.model_name_or_path m with --estimator point: a model"),
        (["--eval.steps", "0"], "--eval.steps 0: too low; give 1 or more, or -1 for never"),
        (["--train.max_rollouts", "511"], f"--train.max_rollouts 511 with --rollout.batch_size 64 with {GROUP} 8: l"),
        (["--replay.samples", "17"], "--replay.samples = 17 is more than the 16 rollouts that replay.cache keeps"),
        (["--replay.samples", "-1"], "--replay.samples = -1 is not in [0, inf)"),
        (["--replay.cache", "8"], "--replay.cache 8 with --replay.samples 0: nothing is replayed; give"),
        (["--estimator", "none", "--replay.samples", "8"], "--replay.samples 8 with --estimator none: OpenRLHF"),
        (["--method", "repo", FORM, "reinforce_baseline"], f"--replay.samples 8 with {FORM} reinforce_baseline: rep"),
        *((["--method", "repo", *flags], f"--replay.samples 8 with {flags[0]}") for flags in (
            ["--train.dynamic_batch_enable"], ["--algo.kl.use_loss"], ["--data.max_images_per_prompt", "1"],
            ["--algo.advantage.is_correction_level", "token"],
        )),
        (["--train.batch_size", "24"], f"{GROUP} 8 with --train.batch_size 24: a step's rollouts are no multiple"),
    ],
)  # fmt: skip
def test_what_would_train_wrongly_or_fail_late_is_refused_in_one_line(argv, line):
    with pytest.raises(UsageError) as refused:
        checks.check(arguments.parse(["--preset", "tiny", "--estimator", "dbb", *argv]))
    assert line in str(refused.value) and "\n" not in str(refused.value)


def test_an_estimator_that_cannot_leave_a_rollout_out_takes_other_forms():
    checks.check(arguments.parse(["--preset", "tiny", "--estimator", MEDIAN, FORM, "dr_grpo"]))

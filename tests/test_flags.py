"""Combinations of flags that are refused."""

from dataclasses import dataclass

import pytest

from openrlhf_dbb import estimators
from openrlhf_dbb.driver import arguments, checks
from openrlhf_dbb.errors import UsageError


def check(*argv):
    checks.check(arguments.parse(["--preset", "tiny", "--estimator", "dbb", *argv]))


ASYNC, AHEAD = "--train.async_enable", "--rollout.vllm_generate_batch_size"
DATA = ["--data.prompt_dataset", "some/data", "--data.label_key", "label", "--rollout.n_samples_per_prompt", "8"]
MODEL = ["--actor.model_name_or_path", "m"]


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--preset", "none"], "--actor.model_name_or_path is missing"),
        *(
            ([f"--run_name={name}"], "names folders: use letters, digits and . _ + - only, not only dots")
            for name in ("a/b", "..", "-x", "a\n", "\u6f22" * 67)
        ),
        (["--resume", "--warm_start", "x"], "--resume continues a run, --warm_start begins a new one"),
        (["--ds.lora.rank", "8", "--estimator", "none"], "--ds.lora.rank 8 does not go with --estimator none"),
        (["--vllm.num_engines", "2"], "--train.colocate_all: the policy has 1 GPUs"),
        *((["--estimator", "none", *flag], f"{flag[0]} ") for flag in (
            ["--rollout.strategy", "dynamic"], ["--probe.fraction", "0.1"], ["--warm_start", "x"],
        )),
        (["--algo.advantage.estimator", "gae"], "--algo.advantage.estimator gae has no place for an estimator"),
        (["--algo.advantage.estimator", "reinforce_baseline", "--method", "repo"],
         "--replay.samples 8 does not go with --algo.advantage.estimator reinforce_baseline: replays are not whitened"),
        (["--estimator", "point", "--rollout.n_samples_per_prompt", "1", "--train.batch_size", "8"],
         "--estimator point needs --rollout.n_samples_per_prompt 2 or more, got 1"),
        (["--rollout.strategy", "posterior", "--estimator", "point", "--point.memory", "gaussian"],
         "posterior draws prompts by a forecast, and gaussian makes none; use --estimator point with --point.memory"),
        (["--reward.model_name_or_path", "m"], "--reward.model_name_or_path m is not asked where --reward.remote_url"),
        (["--preset", "none", *MODEL, "--vllm.num_engines", "1", "--reward.model_name_or_path", "m", *DATA],
         "--reward.model_name_or_path m gives any real number, --estimator dbb takes scores of 0 to 1"),
        (["--eval.steps", "0"], "--eval.steps 0 is too low; give 1 or more, or -1 for never"),
        ([ASYNC, AHEAD, "63"], f"{AHEAD} 63 is less than --rollout.batch_size 64"),
        (["--train.batch_size", "24"], "= 512 is not a multiple of --train.batch_size = 24"),
    ],
)  # fmt: skip
def test_what_would_train_wrongly_or_fail_late_is_refused_in_one_line(argv, line):
    with pytest.raises(UsageError) as refused:
        check(*argv)
    assert line in str(refused.value) and "\n" not in str(refused.value)


@dataclass(frozen=True)
class Median(estimators.get("point")):
    name = "median"

    def group_weight(self, state, rewards_P_G):
        return None


def test_rloo_needs_an_estimator_that_can_leave_a_rollout_out():
    given = ["--estimator", f"{__name__}:Median", "--algo.advantage.estimator"]
    with pytest.raises(UsageError, match=r"--algo.advantage.estimator rloo scores a rollout by the mean without it"):
        check(*given, "rloo")
    check(*given, "dr_grpo")

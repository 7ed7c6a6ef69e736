"""Combinations of flags that are refused."""

from dataclasses import dataclass

import pytest

from openrlhf_dbb import estimators
from openrlhf_dbb.driver import arguments, checks
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.platform import cpu

DATA = ["--data.prompt_dataset", "some/data", "--data.label_key", "label", "--rollout.n_samples_per_prompt", "8"]
OWN = ["--preset", "none", "--actor.model_name_or_path", "m", "--vllm.num_engines", "1", *DATA]
FORM, GROUP, AHEAD = (
    "--algo.advantage.estimator",
    "--rollout.n_samples_per_prompt",
    "--rollout.vllm_generate_batch_size",
)


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
        *(
            ([f"--run_name={name}"], ": it names folders; use letters, digits and . _ + -, no - first, at most 200 ")
            for name in ("a/b", "..", "-x", "a\n", "\u6f22" * 67)
        ),
        (["--resume", "--warm_start", "x"], "--resume with --warm_start x: one continues a run"),
        (["--ds.lora.rank", "8", "--estimator", "none"], "--ds.lora.rank 8 with --estimator none: vLLM"),
        (["--vllm.num_engines", "2"], "--vllm.num_engines 2 with --vllm.tensor_parallel_size 1: the policy and vLLM"),
        *((["--estimator", "none", *flag], f"{' '.join(flag)} with --estimator none: OpenRLHF alone") for flag in (
            ["--rollout.strategy", "dynamic"], ["--probe.fraction", "0.1"], ["--warm_start", "x"],
        )),
        ([FORM, "gae"], f"{FORM} gae: it has no place for an estimator"),
        (["--estimator", MEDIAN, FORM, "rloo"], f"{FORM} rloo with --estimator {MEDIAN}: the form scores a rollout by"),
        (["--estimator", "point", GROUP, "1", "--train.batch_size", "8"], f"point with {GROUP} 1: it needs 2 or more"),
        (["--rollout.strategy", "posterior", "--estimator", "point", "--point.memory", "gaussian"],
         "posterior: it draws prompts by a forecast, and gaussian makes none; use --estimator point with"),
        (["--method", "dapo", "--estimator", "dbb", GROUP, "1"], f"dynamic with {GROUP} 1: it looks for groups with"),
        (["--reward.model_name_or_path", "m"], "--reward.model_name_or_path m with --reward.remote_url "),
        ([*OWN, "--reward.model_name_or_path", "m"], "--reward.model_name_or_path m with --estimator dbb: a model"),
        (["--eval.steps", "0"], "--eval.steps 0: too low; give 1 or more, or -1 for never"),
        (["--train.async_enable", AHEAD, "63"], f"{AHEAD} 63 with --rollout.batch_size 64: steps would be short"),
        (["--train.max_rollouts", "511"], f"--train.max_rollouts 511 with --rollout.batch_size 64 with {GROUP} 8: l"),
        (["--train.batch_size", "24"], f"{GROUP} 8 with --train.batch_size 24: a step's rollouts are no multiple"),
    ],
)  # fmt: skip
def test_what_would_train_wrongly_or_fail_late_is_refused_in_one_line(argv, line):
    with pytest.raises(UsageError) as refused:
        checks.check(arguments.parse(["--preset", "tiny", "--estimator", "dbb", *argv]))
    assert line in str(refused.value) and "\n" not in str(refused.value)


def test_an_estimator_that_cannot_leave_a_rollout_out_takes_other_forms():
    checks.check(arguments.parse(["--preset", "tiny", "--estimator", MEDIAN, FORM, "dr_grpo"]))

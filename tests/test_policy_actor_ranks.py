"""The policy actor on DeepSpeed itself, on one and two ranks: each shortcut takes the step that it is short for."""

import json
import operator
import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from openrlhf_dbb import tiny
from openrlhf_dbb.platform import cpu

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not cpu.active(), reason="the ranks would share a GPU, which NCCL refuses"),
]

TESTS = Path(__file__).parent
BEGIN = """
import os
answers = os.dup(1)
os.dup2(2, 1)  # DeepSpeed and OpenRLHF print
from openrlhf_dbb.platform import machine
machine.add_shims()
import on_ranks
on_ranks.serve(answers)
"""


class Ranks:
    """Processes of one torch group, which live until all tests are done: their imports take longer than a test."""

    def __init__(self, count, folder):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            place = [str(count), str(free.getsockname()[1]), str(folder / "model")]
        paths = f"{TESTS}:{TESTS.parent}:{os.environ.get('PYTHONPATH', '')}"
        self._log = folder / f"{count} ranks"
        with self._log.open("w") as log:
            self.processes = [
                subprocess.Popen(
                    [sys.executable, "-c", BEGIN, str(rank), *place], text=True,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                    env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
                )
                for rank in range(count)
            ]  # fmt: skip

    def ask(self, name, flags):
        """Call a function of ``on_ranks`` on each rank; their answers. After a failure all of them have ended."""
        alarm = threading.Timer(300, self.end)
        alarm.start()
        for process in self.processes:
            print(json.dumps([name, flags]), file=process.stdin, flush=True)
        answers = [process.stdout.readline() for process in self.processes]
        alarm.cancel()
        if not all(answers):
            self.end()
            pytest.fail(self._log.read_text()[-4000:])
        return list(map(json.loads, answers))

    def end(self):
        for process in self.processes:
            process.kill()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Function: call a function of ``on_ranks`` with these flags on one or two ranks; the answer of each."""
    folder = tmp_path_factory.mktemp("ranks")
    started = {}
    tiny.build_model(0).save_pretrained(folder / "model")
    tiny.build_tokenizer().save_pretrained(folder / "model")

    def call(count, name, *flags):
        group = started.pop(count, None) or Ranks(count, folder)
        common = [
            "--preset", "none", "--estimator", "none", "--actor.model_name_or_path", str(folder / "model"),
            "--actor.num_gpus_per_node", str(count), "--actor.lr_warmup_ratio", "0", "--algo.kl.init_coef", "0",
            "--train.micro_batch_size", "2", "--reward.remote_url", "math_answer", "--rollout.batch_size", str(count),
        ]  # fmt: skip
        answers = group.ask(name, [*common, *map(str, flags)])
        started[count] = group  # not after a failure
        return answers

    yield call
    for group in started.values():
        group.end()


SMALL = ["--rollout.n_samples_per_prompt", 4, "--train.batch_size", 4]


@pytest.mark.parametrize(("count", "stage"), [(1, 0), (2, 1), (1, 2), (2, 3)])
def test_a_step_is_openrlhfs_for_every_loss_and_zero_stage(ranks, count, stage):
    flags = [
        "--rollout.n_samples_per_prompt", 8, "--train.batch_size", 8 * count, "--rollout.max_new_tokens", 5,
        "--ds.zero_stage", stage, "--ds.param_dtype", "fp32", "--actor.adam.lr", 1, "--actor.adam.eps", 100,
    ]  # fmt: skip  # a step is a gradient / 100
    for results in ranks(count, "openrlhfs", *flags):
        for (theirs, their_weights, their_tokens), (status, weights, computed) in results:
            assert status == pytest.approx(theirs, rel=1e-4, abs=1e-6)
            assert weights == pytest.approx(their_weights, rel=1e-6, abs=1e-5)
            assert computed < their_tokens


def test_log_probs_are_computed_of_rows_of_a_length(ranks):
    flags = [
        "--rollout.micro_batch_size",
        2,
        "--ds.param_dtype",
        "fp32",
        "--ds.attn_implementation",
        "sdpa",
    ]
    [found] = ranks(1, "log_probs", *SMALL, *flags)
    # Rows of 8 and 5 tokens and of 8 and 4, of which the last predicts none: 2 * 7 twice, or 7 and 2 * 4, since
    # those of 8 tokens are equal.
    assert found == {"same": [True, True], "tokens": [28, 15]}


def check_same_step(other, padded):
    """Two actors began with the same weights, had the same gradient and have moved by the same step."""
    assert other["before"] == pytest.approx(padded["before"], rel=1e-5)
    moved = padded["after"] - padded["before"]
    assert other["after"] - other["before"] == pytest.approx(moved, rel=1e-2)
    assert other["grad_norm"] == pytest.approx(padded["grad_norm"], rel=1e-4)


@pytest.mark.parametrize(
    ("stage", "loss"),
    [
        (1, "seq-mean-token-mean"),
        (3, "seq-mean-token-mean"),
        (2, "seq-mean-token-mean"),
        (2, "token-mean"),
        (2, "seq-mean-token-sum-norm"),
    ],
)
def test_packed_and_dynamic_batches_take_the_same_step(ranks, stage, loss):
    # 16 rows on two ranks, all of them one optimizer step. A step of Adam is a hundredth of the gradient.
    found, _ = ranks(
        2, "packed", "--rollout.n_samples_per_prompt", 8, "--train.batch_size", 16, "--rollout.micro_batch_size", 8,
        "--rollout.max_new_tokens", 11, "--actor.adam.lr", 1, "--actor.adam.eps", 100, "--actor.max_norm", 0,
        "--ds.zero_stage", stage, "--actor.loss_agg_mode", loss,
    )  # fmt: skip
    padded = found["padded"]
    packed = found["packed"]
    dynamic = found["dynamic"]
    assert abs(padded["after"] - padded["before"]) > 1e-2
    if loss == "seq-mean-token-mean":
        # As OpenRLHF configures ZeRO 1 and 2, they keep the last micro-batch alone: 1.589.
        assert padded["grad_norm"] == pytest.approx(3.998, abs=1e-3)
    check_same_step(packed, padded)
    check_same_step(dynamic, padded)
    # 8 rows of 62 tokens: 4 padded micro-batches of 2 rows; 3 dynamic ones of at most 24 tokens.
    counts = operator.itemgetter("rows", "micro-batches")
    assert (counts(padded), padded["steps"]) == ((8, 4), 1)
    assert (counts(packed), packed["steps"]) == ((8, 4), 1)
    assert counts(dynamic) == (8, 3)


def test_extra_rows_of_one_rank_alone_ride_along_in_the_same_steps(ranks):
    # 16 rows on two ranks, 8 a step, 2 a micro-batch: two steps of two micro-batches.
    first, second = ranks(
        2, "extra_rows", "--rollout.n_samples_per_prompt", 8, "--train.batch_size", 8, "--rollout.micro_batch_size", 2,
        "--ds.zero_stage", 3,
    )  # fmt: skip
    assert sorted(first["rows"]) == [3, 3, 3, 4]  # two fresh rows and one or two extra ones
    assert second["rows"] == [2, 2, 2, 2]
    assert first["same"] == second["same"]
    assert (first["steps"], second["steps"]) == (2, 2)


def test_an_extra_row_weighs_as_much_as_a_fresh_one_and_is_trained_on_once(ranks):
    flags = [
        "--rollout.micro_batch_size",
        2,
        "--rollout.max_new_tokens",
        11,
        "--ds.param_dtype",
        "fp32",
    ]
    step = [
        "--actor.loss_agg_mode",
        "seq-mean-token-sum-norm",
        "--actor.adam.lr",
        1,
        "--actor.adam.eps",
        100,
    ]
    [found] = ranks(1, "extra_as_fresh", *SMALL, *flags, *step)
    assert (found["steps"], found["rows"]) == ([1, 1], [2, 2])
    assert found["difference"] < 1e-3 * found["moved"]


@pytest.mark.parametrize(("more", "trained"), [([], 116_160), (["--ds.lora.rank", 2], 2 * 2688)])
def test_a_checkpoint_in_fp32_continues_exactly(ranks, tmp_path, more, trained):
    flags = ["--ds.param_dtype", "fp32", "--actor.adam.lr", 1e-3, "--ckpt.path", tmp_path, *more]
    [found] = ranks(1, "checkpoint", *SMALL, *flags)
    assert (found["dtypes"], found["moved"]) == (["torch.float32"], True)
    assert found["resumed"] == [True, True, 2]  # one step before the checkpoint, one after
    assert found["trained"] == found["moments"] == trained  # Adam keeps nothing for a frozen weight


def test_a_policy_that_sleeps_between_its_steps_trains_the_same_in_every_zero_stage(
    ranks, tmp_path
):
    [found] = ranks(
        1,
        "sleep",
        *SMALL,
        "--ds.param_dtype",
        "bf16",
        "--actor.adam.lr",
        1e-2,
        "--ckpt.path",
        tmp_path,
    )
    # A checkpoint holds the buffers that ZeRO 3 sleeps in; loaded onto a GPU, they would hold the sleeping Adam there.
    as_it_is = {"same": True, "kept": ["exp_avg", "exp_avg_sq", "step"], "resumed": True}
    assert found == {"1": as_it_is, "2": as_it_is, "3": as_it_is}


@pytest.mark.parametrize(
    ("count", "more"),
    [
        (2, ["--ds.zero_stage", 2, "--ds.param_dtype", "bf16"]),
        (2, ["--ds.zero_stage", 3]),
        (1, ["--ds.lora.rank", 2]),
    ],
)
def test_the_longest_micro_batch_is_tried_without_a_trace(ranks, count, more):
    answers = ranks(
        count, "trial", "--rollout.n_samples_per_prompt", 8, "--data.max_len", 32, "--train.batch_size", 4 * count,
        "--actor.adam.lr", 1e-3, "--rollout.micro_batch_size", 2, "--actor.gradient_checkpointing_enable",
        "--ds.lora.dropout", 0.5, *more,
    )  # fmt: skip
    for found in answers:
        assert (found["same"], found["trained"]) == (True, [True, True])
        assert found["longest"] == [
            2,
            32,
            True,
        ]  # --train.micro_batch_size rows of --data.max_len tokens
        assert re.match(r"--train.micro_batch_size 2: 2 rows of 32 tokens\b", found["line"])
        assert [(line or "")[:45] for line in found["nan"]] == [
            "a gradient of the policy is infinite or NaN; "
        ] * 2


@pytest.mark.parametrize("more", [[], ["--ds.zero_stage", 3], ["--ds.lora.rank", 2]])
def test_engines_on_shared_gpus_get_whole_weights_from_each_rank_in_a_few_messages(ranks, more):
    first, second = ranks(2, "shared", *SMALL, *more)
    assert first["same"] == {"GPU 0": True, "GPU 1": True}
    assert 1 < first["messages"] < first["weights"]
    assert first["adapters"] == 0  # merged
    assert second["messages"] == 0  # the first rank alone calls the engines


def test_one_rank_sums_no_gradients_with_itself(ranks):
    [found] = ranks(
        1,
        "alone",
        *SMALL,
        "--ds.zero_stage",
        0,
        "--ds.param_dtype",
        "bf16",
        "--actor.adam.lr",
        1e-2,
    )
    assert found == {"reduces": False, "same": True, "moved": True}


def test_without_zero_a_gradient_in_float32_is_clipped_and_its_norm_is_logged(ranks):
    flags = [
        "--ds.param_dtype",
        "fp32",
        "--actor.adam.eps",
        100,
        "--actor.adam.lr",
        1,
        "--actor.max_norm",
        0.01,
    ]
    [[(norms, weights), (zero_norms, zero_weights)]] = ranks(1, "clipped", *SMALL, *flags)
    assert norms == pytest.approx(zero_norms, rel=1e-4) and min(norms) > 0.01
    assert weights == pytest.approx(zero_weights, rel=1e-6, abs=1e-6)

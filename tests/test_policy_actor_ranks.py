"""The policy actor itself, on DeepSpeed and on two ranks of which one has replays."""

import json
import os
import socket
import subprocess
import sys

import numpy as np
import pytest

from openrlhf_dbb import tiny
from openrlhf_dbb.platform import cpu

PROGRAM = """
import json, sys
from openrlhf_dbb.driver import arguments
from openrlhf_dbb.platform import cpu

rank, port, model = int(sys.argv[1]), sys.argv[2], sys.argv[3]
args = arguments.parse(sys.argv[4:], world_size=2).args
import torch
from openrlhf.trainer.ppo_utils.experience import Experience, split_experience_batch

from openrlhf_dbb.driver.light_backend import backend as strategy
from openrlhf_dbb.actors.policy_actor import PolicyActor

actor = PolicyActor(2, rank, "127.0.0.1", port)
actor.init_model_from_pretrained(strategy(args, on_cpu=True), model, max_steps=10)

prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
first = actor.prompt_features(prompts[::-1] if rank else prompts)
again = actor.prompt_features(prompts)
features = {"first": first.tolist(), "again": again.tolist(), "trains": actor.actor.training}

def rollouts(rows, advantage):
    tokens = torch.randint(0, 14, (rows, 8), generator=torch.Generator().manual_seed(rank))
    actions = torch.arange(7).expand(rows, 7) > 2
    advantages = torch.full((rows, 7), advantage)
    made = Experience(sequences=tokens, attention_mask=torch.ones_like(tokens), action_mask=actions,
                      advantages=advantages, returns=advantages.clone(), info={"reward": torch.ones(rows)})
    made.action_log_probs = actor.forward(tokens, actions, made.attention_mask)
    return made

replays = split_experience_batch(rollouts(5, -1.0)) if rank == 0 else []
actor.append(rollouts(8, 1.0))
actor.execute_batch("append_replays", {"experience": [replays]}, 0, 1)
sizes = []
actor.trainer.actor.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
actor.fit()
weights = sum(parameter.double().abs().sum().item() for parameter in actor.actor.parameters())
print(json.dumps({
    "loss": type(actor.trainer.actor_loss_fn).__name__, "length": actor.trainer.actor_loss_fn.length,
    "steps": actor.actor.model.global_steps, "rows": sizes, "weights": weights, "features": features,
}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not cpu.active(), reason="its two ranks would share a GPU, which NCCL refuses")
def test_two_ranks_read_prompts_alike_and_take_the_same_steps_with_and_without_replays(two_ranks, tmp_path):
    tiny.build_model(0).save_pretrained(tmp_path)
    tiny.build_tokenizer().save_pretrained(tmp_path)
    # 16 rows on two ranks, 8 a step, 2 a micro-batch: two steps of two micro-batches.
    flags = {
        "preset": "none",
        "estimator": "none",
        "actor.model_name_or_path": tmp_path,
        "rollout.batch_size": 2,
        "rollout.n_samples_per_prompt": 8,
        "train.batch_size": 8,
        "train.micro_batch_size": 2,
        "actor.loss_agg_mode": "seq-mean-token-sum-norm",
        "rollout.max_new_tokens": 6,
        "actor.num_gpus_per_node": 2,
        "actor.lr_warmup_ratio": 0,
        "algo.kl.init_coef": 0,
        "ds.zero_stage": 3,
        "rollout.micro_batch_size": 2,
        "reward.remote_url": "math_answer",
    }
    arguments = [str(part) for flag, value in flags.items() for part in (f"--{flag}", value)]
    first, second = two_ranks(PROGRAM, str(tmp_path), *arguments)
    one, other = first.pop("features"), second.pop("features")
    np.testing.assert_allclose(one["first"], other["first"][::-1], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(one["again"], one["first"], rtol=1e-4, atol=1e-5)
    assert one["trains"] and np.std(one["first"], axis=0).min() > 0
    assert sorted(first.pop("rows")) == [3, 3, 3, 4]  # two fresh rows and one or two replays
    assert second.pop("rows") == [2, 2, 2, 2]
    assert first == second
    assert (first["loss"], first["length"], first["steps"]) == ("ConstantLengthLoss", 6, 2)


EXACT = """
import json, sys
from openrlhf_dbb.platform import cpu
from openrlhf_dbb.driver import arguments

port, model, *flags = sys.argv[1:]
settings = arguments.parse(flags)
import torch
from openrlhf.trainer.ppo_utils.experience import Experience

from openrlhf_dbb.driver.light_backend import backend as strategy
from openrlhf_dbb.actors.policy_actor import PolicyActor

def actor(resume):
    args = settings.with_values({"ds.param_dtype": "fp32", "ckpt.load_enable": resume}, "the test").openrlhf_args()
    made = PolicyActor(1, 0, "127.0.0.1", port)
    made.init_model_from_pretrained(strategy(args, on_cpu=True), model, max_steps=10)
    return made

def train(policy):
    tokens = torch.randint(0, 14, (4, 8), generator=torch.Generator().manual_seed(1))
    actions = torch.arange(7).expand(4, 7) > 2
    rollouts = Experience(sequences=tokens, attention_mask=torch.ones_like(tokens), action_mask=actions,
                          advantages=torch.ones(4, 7), returns=torch.ones(4, 7), info={"reward": torch.ones(4)})
    rollouts.action_log_probs = policy.forward(tokens, actions, rollouts.attention_mask)
    policy.append(rollouts)
    torch.manual_seed(2)  # the order of the rows
    policy.fit()

def weights(policy):
    return torch.cat([each.detach().flatten() for each in policy.actor.model.module.parameters()])

policy = actor(False)
train(policy)
policy.save_checkpoint("one", {})
first = weights(policy)
resumed = actor(True)
same = torch.equal(weights(resumed), first)
train(policy)
train(resumed)
print(json.dumps({
    "dtype": str(first.dtype), "moved": not torch.equal(weights(policy), first),
    "resumed": [same, torch.equal(weights(resumed), weights(policy)), resumed.actor.model.global_steps],
}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not cpu.active(), reason="OpenRLHF has no fp32 with CUDA")
def test_a_checkpoint_in_fp32_continues_exactly(tmp_path):
    tiny.build_model(0).save_pretrained(tmp_path / "start")
    tiny.build_tokenizer().save_pretrained(tmp_path / "start")
    flags = [
        "--preset", "none", "--estimator", "none", "--actor.model_name_or_path", str(tmp_path / "start"),
        "--rollout.batch_size", "1", "--rollout.n_samples_per_prompt", "4", "--train.batch_size", "4",
        "--train.micro_batch_size", "2", "--actor.lr_warmup_ratio", "0", "--actor.adam.lr", "1e-3",
        "--algo.kl.init_coef", "0", "--reward.remote_url", "math_answer", "--ckpt.path", str(tmp_path / "checkpoints"),
    ]  # fmt: skip
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    done = subprocess.run(
        [sys.executable, "-c", EXACT, port, str(tmp_path / "start"), *flags],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "dtype": "torch.float32",
        "moved": True,
        "resumed": [True, True, 2],  # one step before the checkpoint, one after
    }

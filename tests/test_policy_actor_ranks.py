"""The policy actor itself, on DeepSpeed and on two ranks of which one has replays."""

import pytest
from trainings import RANK, rank_arguments

from openrlhf_dbb.platform import cpu

ROLLOUTS = """
def rollouts(policy, rows, advantage):
    tokens = torch.randint(0, 14, (rows, 8), generator=torch.Generator().manual_seed(rank))
    actions = torch.arange(7).expand(rows, 7) > 2
    advantages = torch.full((rows, 7), advantage)
    made = Experience(sequences=tokens, attention_mask=torch.ones_like(tokens), action_mask=actions,
                      advantages=advantages, returns=advantages.clone(), info={"reward": torch.ones(rows)})
    made.action_log_probs = policy.forward(tokens, actions, made.attention_mask)
    return made

def train(policy):
    policy.append(rollouts(policy, 4, 1.0))
    torch.manual_seed(2)  # the order of the rows
    policy.fit()
"""

REPLAYS = """
found = []
for longest_shared in (0, 2**31):  # a prompt once more for each row, or once
    policy = actor()
    policy.actor.longest_shared = longest_shared
    old = rollouts(policy, 5, -1.0)  # a forward pass under ZeRO-3 needs both ranks
    replays = split_experience_batch(old) if rank == 0 else []
    policy.append(rollouts(policy, 8, 1.0))  # the prompts of the old rows among them
    policy.execute_batch("append_replays", {"experience": [replays]}, 0, 1)
    sizes, computed = [], []
    policy.trainer.actor.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    policy.actor.model.register_forward_pre_hook(lambda _, inputs: computed.append(inputs[0].numel()))
    torch.manual_seed(2)  # the order of the rows
    status = {key: float(value) for key, value in policy.fit().items()}
    weights = sum(parameter.double().abs().sum().item() for parameter in policy.actor.parameters())
    found.append({
        "rows": sizes, "computed": sum(computed), "steps": policy.actor.model.global_steps,
        "length": policy.trainer.actor_loss_fn.length, "same": {"weights": weights, **status},
    })
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.skipif(not cpu.active(), reason="its two ranks would share a GPU, which NCCL refuses")
def test_two_ranks_take_the_same_steps_with_and_without_replays(two_ranks, tmp_path):
    # 16 rows on two ranks, 8 a step, 2 a micro-batch: two steps of two micro-batches.
    arguments = rank_arguments(
        tmp_path, 2, "--rollout.batch_size", "2", "--rollout.n_samples_per_prompt", "8", "--train.batch_size", "8",
        "--actor.loss_agg_mode", "seq-mean-token-sum-norm", "--rollout.max_new_tokens", "6", "--ds.zero_stage", "3",
        "--rollout.micro_batch_size", "2",
    )  # fmt: skip
    first, second = two_ranks(RANK + ROLLOUTS + REPLAYS, *arguments)
    for with_replays, without in zip(first, second, strict=True):
        assert sorted(with_replays["rows"]) == [3, 3, 3, 4]  # two fresh rows and one or two replays
        assert without["rows"] == [2, 2, 2, 2]
        assert with_replays["same"] == without["same"]
        assert [(each["length"], each["steps"]) for each in (with_replays, without)] == [(6, 2)] * 2
    alone, once = first
    assert once["same"] == pytest.approx(alone["same"], rel=1e-4, abs=1e-6)
    assert once["computed"] < alone["computed"]


EXACT = """
def fp32(resume):
    return actor({"ds.param_dtype": "fp32", "ckpt.load_enable": resume})

def weights(policy):
    return torch.cat([each.detach().flatten() for each in policy.actor.model.module.parameters()])

policy = fp32(False)
train(policy)
policy.save_checkpoint("one", {})
first = weights(policy)
resumed = fp32(True)
same = torch.equal(weights(resumed), first)
train(policy)
train(resumed)
trained = sum(each.numel() for each in policy.actor.model.module.parameters() if each.requires_grad)
adam = policy.actor.model.optimizer.state_dict()["base_optimizer_state"]["state"]
print(json.dumps({
    "dtype": str(first.dtype), "moved": not torch.equal(weights(policy), first), "trained": trained,
    "moments": sum(state["exp_avg"].numel() for state in adam.values()),
    "resumed": [same, torch.equal(weights(resumed), weights(policy)), resumed.actor.model.global_steps],
}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not cpu.active(), reason="OpenRLHF has no fp32 with CUDA")
@pytest.mark.parametrize(("more", "trained"), [([], 116_160), (["--ds.lora.rank", "2"], 2 * 2688)])
def test_a_checkpoint_in_fp32_continues_exactly(two_ranks, tmp_path, more, trained):
    arguments = rank_arguments(
        tmp_path / "start", 1, "--rollout.batch_size", "1", "--rollout.n_samples_per_prompt", "4",
        "--train.batch_size", "4", "--actor.adam.lr", "1e-3", "--ckpt.path", str(tmp_path / "checkpoints"), *more,
    )  # fmt: skip
    [found] = two_ranks(RANK + ROLLOUTS + EXACT, *arguments, count=1)
    assert (found["dtype"], found["moved"]) == ("torch.float32", True)
    assert found["resumed"] == [True, True, 2]  # one step before the checkpoint, one after
    assert found["trained"] == found["moments"] == trained  # Adam keeps nothing for a frozen weight


SLEEP = """
def log_probs(policy):
    return rollouts(policy, 4, 1.0).action_log_probs.tolist()

found = {}
for stage in (1, 2, 3):
    values = {"ds.zero_stage": stage, "ckpt.path": f"{settings.flags['ckpt.path']}/{stage}"}
    plain, sleeper = actor(values), actor({**values, "ds.enable_sleep": True})  # upstream lets it sleep at once
    before = log_probs(plain)
    for _ in range(2):
        train(plain)
        sleeper.reload_states()
        train(sleeper)
        same = log_probs(plain) == log_probs(sleeper) != before
        sleeper.offload_states()
    sleeper.reload_states()
    sleeper.save_checkpoint("one", {})
    resumed = actor({**values, "ckpt.load_enable": True})
    kept = sorted({key for state in resumed.actor.model.basic_optimizer.state.values() for key in state})
    train(plain)
    train(resumed)
    found[stage] = {"same": same, "kept": kept, "resumed": log_probs(plain) == log_probs(resumed)}
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.skipif(not cpu.active(), reason="over gloo")
def test_a_policy_that_sleeps_between_its_steps_trains_the_same_in_every_zero_stage(two_ranks, tmp_path):
    arguments = rank_arguments(
        tmp_path / "start", 1, "--rollout.batch_size", "1", "--rollout.n_samples_per_prompt", "4", "--ds.param_dtype",
        "bf16", "--train.batch_size", "4", "--actor.adam.lr", "1e-2", "--ckpt.path", str(tmp_path / "checkpoints"),
    )  # fmt: skip
    [found] = two_ranks(RANK + ROLLOUTS + SLEEP, *arguments, count=1)
    # A checkpoint holds the buffers that ZeRO 3 sleeps in; loaded onto a GPU, they would hold the sleeping Adam there.
    as_it_is = {"same": True, "kept": ["exp_avg", "exp_avg_sq", "step"], "resumed": True}
    assert found == {"1": as_it_is, "2": as_it_is, "3": as_it_is}


TRIAL = """
import math
from openrlhf_dbb.errors import RunError

def state(policy):
    engine = policy.actor.model
    weights = [getattr(each, "ds_tensor", each).detach().clone() for each in engine.module.parameters()]
    gradients = sum(each.grad is not None for each in engine.module.parameters())
    counters = engine.micro_steps, engine.global_steps, getattr(engine.optimizer, "micro_step_id", None), gradients
    return [*weights, torch.tensor([each or 0 for each in counters]), torch.get_rng_state()]

def equal(some, others):
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))

def no_memory(*args, **options):
    raise torch.OutOfMemoryError("CUDA out of memory")

tried, other, passes = actor(), actor(), []
tried.actor.register_forward_hook(lambda _, inputs, made: passes.append([*inputs[0].shape, made[0].requires_grad]))
before = state(tried)
tried.try_longest_micro_batch()
found = {"same": equal(before, state(tried)), "longest": passes.pop()}
for policy in (tried, other):
    for _ in range(2):
        policy.append(rollouts(policy, 8, 1.0))
        torch.manual_seed(2)
        policy.fit()
found["trained"] = [equal(state(tried), state(other)), not equal(before[:-2], state(tried)[:-2])]
def line(call):
    try:
        call()
    except RunError as error:
        return str(error)

poison = tried.actor.model.module.get_input_embeddings().register_forward_hook(lambda _, __, made: made * math.nan)
found["nan"] = [line(tried.try_longest_micro_batch)]
poison.remove()
tried.append(rollouts(tried, 8, math.nan))
found["nan"].append(line(tried.fit))
tried.actor.model.module.forward = no_memory
found["line"] = line(tried.try_longest_micro_batch)
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.skipif(not cpu.active(), reason="its two ranks would share a GPU, which NCCL refuses")
@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (2, ["--ds.zero_stage", "2", "--ds.param_dtype", "bf16"]),
        (2, ["--ds.zero_stage", "3"]),
        (1, ["--ds.lora.rank", "2"]),
    ],
)
def test_the_longest_micro_batch_is_tried_without_a_trace(two_ranks, tmp_path, ranks, more):
    arguments = rank_arguments(
        tmp_path, ranks, "--rollout.batch_size", str(ranks), "--rollout.n_samples_per_prompt", "8", "--data.max_len",
        "32", "--train.batch_size", str(4 * ranks), "--actor.adam.lr", "1e-3", "--rollout.micro_batch_size", "2",
        "--actor.gradient_checkpointing_enable", "--ds.lora.dropout", "0.5", *more,
    )  # fmt: skip
    for found in two_ranks(RANK + ROLLOUTS + TRIAL, *arguments, count=ranks):
        assert (found["same"], found["trained"]) == (True, [True, True])
        assert found["longest"] == [2, 32, True]  # --train.micro_batch_size rows of --data.max_len tokens
        assert found["line"].startswith("--train.micro_batch_size 2: 2 rows of 32 tokens do not fit into ")
        assert [(line or "")[:45] for line in found["nan"]] == ["a gradient of the policy is infinite or NaN; "] * 2


ALONE = """
alone, reduced = actor(), actor()
began = [each.detach().clone() for each in alone.actor.parameters()]
found = {"reduces": alone.actor.model.enable_backward_allreduce}
reduced.actor.model.enable_backward_allreduce = True  # as DeepSpeed has it
for policy in (alone, reduced):
    train(policy)
    train(policy)
pairs = zip(alone.actor.parameters(), reduced.actor.parameters(), began, strict=True)
found["same"], found["moved"] = map(all, zip(*((one.equal(two), not one.equal(old)) for one, two, old in pairs)))
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.skipif(not cpu.active(), reason="its two ranks would share a GPU, which NCCL refuses")
def test_one_rank_sums_no_gradients_with_itself(two_ranks, tmp_path):
    arguments = rank_arguments(
        tmp_path, 1, "--rollout.batch_size", "1", "--rollout.n_samples_per_prompt", "4", "--train.batch_size", "4",
        "--ds.zero_stage", "0", "--ds.param_dtype", "bf16", "--actor.adam.lr", "1e-2",
    )  # fmt: skip
    [found] = two_ranks(RANK + ROLLOUTS + ALONE, *arguments, count=1)
    assert found == {"reduces": False, "same": True, "moved": True}

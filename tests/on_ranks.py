"""The functions that test_policy_actor_ranks.py calls on each rank. Each takes a Rank and returns what it found."""

import gc
import json
import math
import os
import sys
from types import SimpleNamespace

import torch
from openrlhf.trainer.ppo_utils.experience import (
    Experience,
    make_experience_batch,
    remove_padding_in_sequences,
    split_experience_batch,
)
from openrlhf.trainer.ray import ppo_actor

from openrlhf_dbb.actors import policy_actor
from openrlhf_dbb.actors.micro_batches import together
from openrlhf_dbb.actors.policy_actor import PolicyActor
from openrlhf_dbb.driver import arguments
from openrlhf_dbb.driver.light_backend import backend
from openrlhf_dbb.errors import RunError
from openrlhf_dbb.platform.weights import merged, unpack

THEIRS = ppo_actor.Actor, ppo_actor.ActorPPOTrainer, ppo_actor.iter_grad_accum_global_norm


class Rank:
    """One of ``count`` processes, with the settings of a command line."""

    def __init__(self, number, count, port, model, flags):
        self.number = number
        self.count = count
        self.port = port
        self.model = model
        self.settings = arguments.parse(flags, world_size=count)

    def actor(self, values=None, cls=PolicyActor):
        """A policy actor of the settings and these values, made as ``cls`` makes it."""
        args = self.settings.with_values(values or {}, "the test").openrlhf_args()
        made = PolicyActor(self.count, self.number, "127.0.0.1", self.port)
        cls.init_model_from_pretrained(made, backend(args), self.model, max_steps=10)
        return made

    def seeded(self):
        return torch.Generator().manual_seed(self.number)

    def rollouts(self, policy, rows, advantage):
        """Rows of four tokens after a prompt of four, with the policy's log-probs."""
        actions = torch.arange(7).expand(rows, 7) > 2
        tokens = torch.randint(0, 14, (rows, 8), generator=self.seeded())
        made = experience(tokens, torch.full((rows,), 8), actions, torch.full((rows, 7), advantage))
        return with_log_probs(policy, made)

    def train(self, policy, rows=4):
        policy.append(self.rollouts(policy, rows, 1.0))
        return fit(policy)


def experience(tokens, lengths, actions, advantages):
    """Rows of so many tokens (B,) of (B, T), some of which (B, T - 1) were generated, with these advantages."""
    return Experience(
        sequences=tokens, attention_mask=(torch.arange(tokens.shape[1])[None] < lengths[:, None]).long(),
        action_mask=actions.long(), advantages=advantages, returns=advantages.clone(),
        response_length=actions.sum(1), total_length=lengths.float(), info={"reward": torch.ones(len(tokens))},
    )  # fmt: skip


def with_log_probs(policy, rows):
    rows.action_log_probs = policy.forward(rows.sequences, rows.action_mask, rows.attention_mask)
    return rows


def fit(policy, *kl):
    torch.manual_seed(2)  # the order of the rows
    return {key: float(value) for key, value in policy.fit(*kl).items()}


def weights(policy):
    """The weights that this rank has; under ZeRO 3 its share of them."""
    return [
        getattr(each, "ds_tensor", each).detach().clone()
        for each in policy.actor.model.module.parameters()
    ]


def equal(some, others):
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def openrlhfs(rank):
    """A step as OpenRLHF takes it and as we do, for each loss: metrics, weights, and the tokens that were computed."""
    every_row = {"actor.entropy_coef": 0.01, "algo.kl.use_loss": True, "algo.kl.init_coef": 0.1}
    losses = [("token-mean", "ppo", {}), ("token-mean", "ppo", every_row)]
    found = []
    if rank.settings.flags["ds.zero_stage"] < 2:  # a loss knows nothing of the stage
        losses += [("seq-mean-token-mean", kind, {}) for kind in ("ppo", "gspo")]
        losses.append(("seq-mean-token-sum-norm", "ppo", {}))
    with torch.compiler.set_stance("force_eager"):  # upstream compiles its entropy
        for mode, kind, more in losses:
            values = {"actor.loss_agg_mode": mode, "actor.policy_loss_type": kind, **more}
            ours = [_step(rank, rank.actor(values), old_log_probs=old) for old in (False, True)]
            if mode == "seq-mean-token-sum-norm":
                # Upstream has no such mode: it is compared with ours, of all rows, since their entropy is logged.
                theirs = _step(
                    rank, rank.actor({**values, "actor.entropy_coef": 0.0}), old_log_probs=True
                )
                theirs[0].pop("entropy_loss")
            else:
                theirs = _step(rank, _plain(rank, values), old_log_probs=True)
            found += [[theirs, each] for each in ours]
    return found


def _plain(rank, values):
    """OpenRLHF's own actor, its wrapper of the model and its trainer."""
    ppo_actor.Actor, ppo_actor.ActorPPOTrainer, iterate = THEIRS

    def in_our_order(batches, strategy, accumulated, *args):  # upstream's metrics depend on it
        rows = [remove_padding_in_sequences(split_experience_batch(batch)) for batch in batches]
        return iterate(together(rows, accumulated, "cpu", 2**31), strategy, accumulated, *args)

    ppo_actor.iter_grad_accum_global_norm = in_our_order
    return rank.actor(values, PolicyActor.__base__)


def _step(rank, policy, *, old_log_probs):
    lengths = torch.tensor([8, 5, 6, 8, 7, 4, 8, 8])
    tokens = torch.randint(0, 14, (8, 8), generator=rank.seeded())
    tokens[:, :4] = tokens[[0, 1, 1, 0, 1, 1, 0, 0], :4]  # the prompts of two groups
    actions = (torch.arange(7) > 2) & (torch.arange(1, 8) < lengths[:, None])
    # On the second rank all rows but one are left out.
    rewarded = [0, 0, 1.0, -0.5, 0, 0, 0, 0] if rank.number == 0 else [0, 0, 0, 0, 0, 2.0, 0, 0]
    made = experience(tokens, lengths, actions, torch.tensor(rewarded)[:, None] * actions)
    made.base_action_log_probs = -2.5 * actions
    if old_log_probs:
        with_log_probs(policy, made)
    computed = []
    policy.actor.model.register_forward_pre_hook(
        lambda _, inputs: computed.append(inputs[0].numel()) if torch.is_grad_enabled() else None
    )
    policy.append(made)
    status = fit(policy, 0.1)
    # ZeRO 3 keeps no whole weights outside a pass; there the norm of the gradient has to do.
    sums = [each.detach().double().sum().item() for each in policy.actor.model.module.parameters()]
    return status, sums, sum(computed)


def log_probs(rank):
    """Log-probs of two micro-batches, each by itself and in the rows' better order, and the tokens of both ways."""
    policy = rank.actor()
    batches = []
    for lengths in ([8, 5], [8, 4]):
        tokens = torch.randint(0, 14, (2, 8), generator=rank.seeded())
        actions = (torch.arange(7) > 0) & (torch.arange(1, 8) < torch.tensor(lengths)[:, None])
        batches.append(experience(tokens, torch.tensor(lengths), actions, torch.zeros(2, 7)))
    given = {
        name: [getattr(each, name) for each in batches]
        for name in ("sequences", "action_mask", "attention_mask")
    }
    computed = []
    policy.actor.model.register_forward_pre_hook(
        lambda _, inputs: computed.append(inputs[0].numel())
    )
    alone = [policy.forward(*row) for row in zip(*given.values(), strict=True)]
    tokens_alone = sum(computed)
    computed.clear()
    ordered = policy.execute_batch("forward", given, 0, 2)
    same = [
        torch.allclose(one, other, atol=1e-5) for one, other in zip(ordered, alone, strict=True)
    ]
    return {"same": same, "tokens": [tokens_alone, sum(computed)]}


def packed(rank):
    """A step on the same rows, padded, packed, and in packed dynamic batches."""
    modes = {
        "padded": {},
        "packed": {"ds.packing_samples": True},
        "dynamic": {
            "ds.packing_samples": True,
            "train.dynamic_batch_enable": True,
            "train.max_tokens_per_gpu": 24,
        },
    }
    found = {}
    for mode, values in modes.items():
        policy = rank.actor(values)
        sizes = []
        rows = _of_several_lengths(rank, policy)
        policy.trainer.actor.register_forward_pre_hook(
            lambda _, inputs, sizes=sizes: sizes.append(len(inputs[0]))
        )
        policy.append(rows)
        grad_norm = policy.fit()["actor_grad_norm"]
        trained = list(sizes)
        after = policy.forward(rows.sequences, rows.action_mask, rows.attention_mask)
        found[mode] = {
            "before": rows.action_log_probs.double().abs().sum().item(), "after": after.double().abs().sum().item(),
            "grad_norm": grad_norm, "steps": policy.actor.model.global_steps, "micro-batches": len(trained),
            "rows": sum(trained),
        }  # fmt: skip
    return found


def _of_several_lengths(rank, policy):
    lengths = torch.tensor([4, 9, 12, 5, 7, 12, 3, 10]).roll(rank.number)
    there = torch.arange(12) < lengths[:, None]
    seeded = rank.seeded()
    tokens = torch.randint(0, 14, (8, 12), generator=seeded) * there
    advantages = torch.randn(8, 1, generator=seeded).expand(8, 11).clone()
    made = experience(tokens, lengths, (torch.arange(11) > 0) & there[:, 1:], advantages)
    return with_log_probs(policy, made)


def extra_rows(rank):
    """A step on eight rows, with five extra rows on the first rank alone."""
    policy = rank.actor()
    old = rank.rollouts(policy, 5, -1.0)  # a forward pass under ZeRO 3 needs both ranks
    rows = split_experience_batch(old) if rank.number == 0 else []
    policy.append(rank.rollouts(policy, 8, 1.0))
    policy.execute_batch("append_extra_rows", {"experience": [rows]}, 0, 1)
    sizes = []
    policy.trainer.actor.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    status = fit(policy)
    status["weights"] = sum(each.double().abs().sum().item() for each in policy.actor.parameters())
    return {"rows": sizes, "steps": policy.actor.model.global_steps, "same": status}


def extra_as_fresh(rank):
    """A step on four rows and as many extra ones, a step on all eight as fresh rows, and a second step on four."""
    began = None
    found = []
    sizes = []
    for fresh in (4, 8):
        policy = rank.actor({"rollout.n_samples_per_prompt": fresh, "train.batch_size": fresh})
        began = weights(policy)
        rows = remove_padding_in_sequences(
            split_experience_batch(_of_several_lengths(rank, policy))
        )
        policy.append(make_experience_batch(rows[:fresh]))
        policy.append_extra_rows(rows[fresh:])
        fit(policy)
        found.append((policy.actor.model.global_steps, weights(policy)))
        policy.append(make_experience_batch(rows[:fresh]))
        policy.trainer.actor.register_forward_pre_hook(
            lambda _, inputs, sizes=sizes: sizes.append(len(inputs[0]))
        )
        fit(policy)
    (steps, extra), (others, expected) = found

    def distance(to):
        return max((one - other).abs().max().item() for one, other in zip(extra, to, strict=True))

    return {
        "steps": [steps, others],
        "rows": sizes[:2],
        "moved": distance(began),
        "difference": distance(expected),
    }


def checkpoint(rank):
    """A step, a checkpoint, and one more step with and without a resume."""
    policy = rank.actor()
    rank.train(policy)
    policy.save_checkpoint("one", {})
    first = weights(policy)
    resumed = rank.actor({"ckpt.load_enable": True})
    same = equal(weights(resumed), first)
    rank.train(policy)
    rank.train(resumed)
    adam = policy.actor.model.optimizer.state_dict()["base_optimizer_state"]["state"]
    return {
        "dtypes": sorted({str(each.dtype) for each in first}), "moved": not equal(weights(policy), first),
        "trained": sum(each.numel() for each in policy.actor.model.module.parameters() if each.requires_grad),
        "moments": sum(state["exp_avg"].numel() for state in adam.values()),
        "resumed": [same, equal(weights(resumed), weights(policy)), resumed.actor.model.global_steps],
    }  # fmt: skip


def sleep(rank):
    """Two steps of a policy that sleeps between them and of one that does not, and a third after a resume."""

    def log_probs(policy):
        return rank.rollouts(policy, 4, 1.0).action_log_probs.tolist()

    found = {}
    for stage in (1, 2, 3):
        values = {
            "ds.zero_stage": stage,
            "ckpt.path": f"{rank.settings.flags['ckpt.path']}/{stage}",
        }
        plain = rank.actor(values)
        sleeper = rank.actor({**values, "ds.enable_sleep": True})  # it sleeps at once
        before = log_probs(plain)
        sleeper.try_longest_micro_batch()  # as a run does before its first step; it sleeps again
        for _ in range(2):
            rank.train(plain)
            sleeper.reload_states()
            rank.train(sleeper)
            same = log_probs(plain) == log_probs(sleeper) != before
            sleeper.offload_states()
        sleeper.reload_states()
        sleeper.save_checkpoint("one", {})
        resumed = rank.actor({**values, "ckpt.load_enable": True})
        kept = sorted(
            {key for state in resumed.actor.model.basic_optimizer.state.values() for key in state}
        )
        rank.train(plain)
        rank.train(resumed)
        found[stage] = {
            "same": same,
            "kept": kept,
            "resumed": log_probs(plain) == log_probs(resumed),
        }
    return found


def trial(rank):
    """Two steps with and without a trial of the longest micro-batch before them, and trials that fail."""

    def state(policy):
        engine = policy.actor.model
        gradients = sum(each.grad is not None for each in engine.module.parameters())
        counters = (
            engine.micro_steps,
            engine.global_steps,
            getattr(engine.optimizer, "micro_step_id", None),
            gradients,
        )
        return [
            *weights(policy),
            torch.tensor([each or 0 for each in counters]),
            torch.get_rng_state(),
        ]

    def no_memory(*args, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    def line(call):
        try:
            call()
        except RunError as error:
            return str(error)

    tried = rank.actor()
    other = rank.actor()
    passes = []
    tried.actor.register_forward_hook(
        lambda _, inputs, made: passes.append([*inputs[0].shape, made[0].requires_grad])
    )
    before = state(tried)
    tried.try_longest_micro_batch()
    found = {"same": equal(before, state(tried)), "longest": passes.pop()}
    for policy in (tried, other):
        for _ in range(2):
            rank.train(policy, 8)
    found["trained"] = [
        equal(state(tried), state(other)),
        not equal(before[:-2], state(tried)[:-2]),
    ]
    embeddings = tried.actor.model.module.get_input_embeddings()
    poison = embeddings.register_forward_hook(lambda _, __, made: made * math.nan)
    found["nan"] = [line(tried.try_longest_micro_batch)]
    poison.remove()
    tried.append(rank.rollouts(tried, 8, math.nan))
    found["nan"].append(line(tried.fit))
    tried.actor.model.module.forward = no_memory
    found["line"] = line(tried.try_longest_micro_batch)
    return found


def shared(rank):
    """Compare the weights that two ranks hand to an engine, by GPU, with the policy's weights."""
    policy = rank.actor()
    handed = []
    engine = SimpleNamespace(
        receive_weights=SimpleNamespace(
            remote=lambda bucket, handles: handed.append((bucket, handles))
        ),
        reset_prefix_cache=SimpleNamespace(remote=lambda: None),
    )
    policy_actor.get_physical_gpu_id = lambda: f"GPU {rank.number}"
    policy_actor.reduce_tensor = torch.clone  # CUDA would hand over an address
    policy_actor.ray = SimpleNamespace(get=lambda answers: answers)
    policy_actor.BUCKET_BYTES = {"cpu": 65_536}
    policy.trainer.use_cuda_ipc = True
    policy.trainer.vllm_engines = [engine]
    policy.broadcast_to_vllm()
    trained = {
        name: weight
        for name, weight in merged(policy.actor.model.module).items()
        if weight.requires_grad
    }
    wanted = {name: weight.data for name, weight in trained.items()}  # all ranks gather them
    found = {}
    for bucket, handles in handed:
        for gpu, packed in handles.items():
            found.setdefault(gpu, {}).update(unpack(bucket, packed))
    return {
        "messages": len(handed),
        "weights": len(wanted),
        "adapters": sum("lora" in name for name in wanted),
        "same": {
            gpu: got.keys() == wanted.keys() and equal(got.values(), wanted.values())
            for gpu, got in found.items()
        },
    }


def alone(rank):
    """Two steps, and the same where DeepSpeed sums the gradients of its one rank, as it would by itself."""
    ours = rank.actor()
    reduced = rank.actor()
    began = weights(ours)
    reduces = ours.actor.model.enable_backward_allreduce
    reduced.actor.model.enable_backward_allreduce = True
    for policy in (ours, reduced):
        rank.train(policy)
        rank.train(policy)
    moved = not any(torch.equal(*pair) for pair in zip(weights(ours), began, strict=True))
    return {"reduces": reduces, "same": equal(weights(ours), weights(reduced)), "moved": moved}


def clipped(rank):
    """Norms of the gradient and weights after two steps in float32, without ZeRO and with ZeRO 2."""
    found = []
    for stage in (0, 2):
        policy = rank.actor({"ds.zero_stage": stage})
        norms = [rank.train(policy)["actor_grad_norm"] for _ in range(2)]
        found.append([norms, [each.double().sum().item() for each in weights(policy)]])
    return found


def serve(answers):
    """Answer lines of JSON, each the name of a function above and the flags of a rank."""
    number, count, port, model = sys.argv[1:]
    gc.freeze()  # each sleep collects garbage, which would look through all that was imported
    for line in sys.stdin:
        name, flags = json.loads(line)
        rank = Rank(int(number), int(count), port, model, flags)
        os.write(answers, f"{json.dumps(globals()[name](rank))}\n".encode())

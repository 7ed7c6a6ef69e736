"""Measures the policy's passes alone, without Ray and vLLM: ours against OpenRLHF's, asleep, and with shared prompts.

The model has Qwen3-1.7B's shape and random weights; without CUDA it has two narrow layers, to try this script.

    python benchmarks/policy_pass.py                   two minutes, 58 GB of a GPU (OpenRLHF's pass)
    python benchmarks/policy_pass.py --zero_stage 3
    python benchmarks/policy_pass.py --count           the work on rows of real lengths, without a pass
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections.abc import Callable
from typing import Any

from openrlhf_dbb import tiny
from openrlhf_dbb.driver import arguments
from openrlhf_dbb.platform import cpu, machine

ON_GPU = not cpu.active()
if ON_GPU:
    machine.add_shims()
else:
    cpu.prepare_driver()
    os.environ.update(cpu.worker_environment())
os.environ.update(
    RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29533"
)

import torch  # noqa: E402
from openrlhf.models import Actor  # noqa: E402
from openrlhf.trainer.ppo_utils.experience import Experience, make_experience_batch  # noqa: E402
from openrlhf.utils import get_strategy  # noqa: E402
from openrlhf.utils.deepspeed import deepspeed_utils  # noqa: E402
from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: E402

from openrlhf_dbb.actors import micro_batches  # noqa: E402
from openrlhf_dbb.actors.training_pass import ResponseActor  # noqa: E402
from openrlhf_dbb.platform.backend import Backend, CpuBackend  # noqa: E402

DEVICE = "cuda" if ON_GPU else "cpu"
SHAPE = {
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
}
NARROW = {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
LONG = (1024, 4096) if ON_GPU else (16, 32)  # tokens of prompt and response
GROUPS = [  # rollouts that share a prompt, tokens of prompt and response
    (8, 35, 12), (8, 256, 256), (8, 512, 128), (8, 512, 512), (8, 1024, 128), (8, 1024, 512), (8, 2048, 256),
    (4, 4096, 256), (8, 256, 1024), (4, 1024, 2048),
]  # fmt: skip

PROMPTS, SAMPLES, MICRO_BATCH = 64, 8, 4  # of the rows of real lengths
LAYERS = 1.41e9  # parameters of Qwen3-1.7B that each token passes
HEAD = 0.31e9  # parameters that each response token passes


class Policy:
    def __init__(self, folder: str, stage: str) -> None:
        model = Qwen3ForCausalLM(Qwen3Config(**(SHAPE if ON_GPU else NARROW), **HEADS)).bfloat16()
        model.save_pretrained(folder)
        tiny.build_tokenizer().save_pretrained(folder)
        flags = ["--preset", "default", "--estimator", "dbb", "--actor.model_name_or_path", folder]
        flags += [
            "--ds.zero_stage",
            stage,
            "--train.micro_batch_size",
            "4",
            "--reward.remote_url",
            "math_answer",
        ]
        files = tiny.prepare(tiny.default_folder())
        flags += [
            "--data.prompt_dataset",
            str(files.train),
            "--data.input_key",
            "input",
            "--data.label_key",
            "label",
        ]
        args = arguments.parse(
            [*flags, "--rollout.batch_size", "4", "--train.batch_size", "8"]
        ).openrlhf_args()
        self.strategy = get_strategy(args)
        self.strategy.__class__ = Backend if ON_GPU else CpuBackend
        self.strategy.setup_distributed()
        actor = ResponseActor(
            folder, attn_implementation="sdpa", ds_config=self.strategy.get_ds_train_config()
        )
        actor.gradient_checkpointing_enable({"use_reentrant": False})
        adam = {
            "optim": "adam",
            "adam": vars(args.actor.adam),
            "muon": vars(args.actor.muon),
            "max_norm": 1.0,
        }
        steady = {
            "lr_scheduler": "constant",
            "lr_warmup_ratio": 0.0,
            "min_lr_ratio": 0.1,
            "scheduler_steps": 8,
        }
        self.actor, self.optimizer, self.scheduler = self.strategy.prepare((actor, adam | steady))

    def train(
        self, batches: list[Any], forward: Callable[..., Any] | None = None
    ) -> tuple[float, float]:
        """Take micro-batches forward and backward, and step; return seconds without steps, and the peak in GB."""
        began = start()
        for rows in batches:
            log_probs, output = (forward or self.actor)(
                *rows, return_output=True, return_entropy=True
            )
            self.strategy.backward(-log_probs.mean(), self.actor, self.optimizer)
            del log_probs, output
        measured = stop(began)
        self.strategy.optimizer_step(self.optimizer, self.actor, self.scheduler)
        return measured


def start() -> float:
    if ON_GPU:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return time.perf_counter()


def stop(began: float) -> tuple[float, float]:
    if ON_GPU:
        torch.cuda.synchronize()
    return time.perf_counter() - began, torch.cuda.max_memory_allocated() / 1e9 if ON_GPU else 0.0


def rows_of(
    count: int, prompt: int, response: int, *, same: bool = False
) -> tuple[torch.Tensor, ...]:
    tokens = torch.randint(5, 30, (count, prompt + response), device=DEVICE)
    if same:
        tokens[:, :prompt] = tokens[0, :prompt].clone()
    return (
        tokens,
        torch.ones(count, response, dtype=torch.bool, device=DEVICE),
        torch.ones_like(tokens),
    )


def rows_of_real_lengths(prompts: int, scale: float) -> list[Experience]:
    """Return groups of rollouts: prompts of 60 to 200 tokens, responses of 1,000 on average and 4,096 at most.

    Lengths are log-normal, half of their deviation between prompts. ``scale`` multiplies them.
    """
    seeded = random.Random(1)
    rows = []
    for number in range(prompts):
        prompt = torch.full((max(2, int(seeded.randint(60, 200) * scale)),), 5 + number % 20)
        usual = 760 * scale * seeded.lognormvariate(0, 0.5)
        for _ in range(SAMPLES):
            response = int(min(4096 * scale, max(2, usual * seeded.lognormvariate(0, 0.5))))
            tokens = torch.cat([prompt, torch.randint(5, 30, (response,))])
            actions = torch.arange(1, len(tokens)) >= len(prompt)
            rows.append(
                Experience(
                    sequences=tokens, attention_mask=torch.ones_like(tokens), action_mask=actions
                )
            )
    return rows


def both_orders(rows: list[Experience], device: str) -> dict[str, list[list[int]]]:
    """Return the numbers of the rows of each micro-batch as OpenRLHF might draw them, and in our order."""
    drawn = list(range(len(rows)))
    random.Random(2).shuffle(drawn)
    count = len(rows) // MICRO_BATCH
    at_random = [drawn[start::count] for start in range(count)]
    return {"at random": at_random, "our order": micro_batches.chosen(rows, count, device, 2**31)}


def describe_work(rows: list[Experience]) -> None:
    """Print tokens, squares of attention and an estimate of the operations of a training pass on the rows."""
    lengths = [len(row.sequences) for row in rows]
    real_squares = sum(length**2 for length in lengths)
    print(
        f"{len(rows)} rows of {sum(lengths) / len(rows):.0f} tokens on average, {max(lengths)} at most"
    )
    for name, batches in both_orders(rows, "cuda").items():
        tokens = 0
        squares = 0
        for numbers in batches:
            longest = max(lengths[number] for number in numbers)
            tokens += len(numbers) * longest
            squares += len(numbers) * longest**2
        # Forward, backward and recomputed; a mask makes attention compute the whole square.
        of_layers = 8 * tokens * LAYERS + 6 * tokens * HEAD
        of_square = 4 * 4 * SHAPE["num_hidden_layers"] * SHAPE["hidden_size"] * squares
        of_attention = of_square / 2 if name == "our order" else of_square
        print(
            f"  {name}: {tokens / sum(lengths):.2f} of the tokens, {squares / real_squares:.2f} of the squares, "
            f"{(of_layers + of_attention) / 1e15:.1f} PFLOP (estimated, Qwen3-1.7B)",
            flush=True,
        )


def measure_real_lengths(policy: Policy, upstreams: Callable[..., Any]) -> None:
    rows = rows_of_real_lengths(2 * MICRO_BATCH, 1.0 if ON_GPU else 0.02)
    log_probs = []
    batch = make_experience_batch(rows[:MICRO_BATCH])
    with torch.no_grad():
        for forward in (policy.actor, upstreams):
            tensors = (batch.sequences, batch.action_mask, batch.attention_mask)
            log_probs.append(forward(*(tensor.to(DEVICE) for tensor in tensors)))
    difference = (log_probs[0] - log_probs[1]).abs().max()
    print(f"log-probs of padded rows: largest difference {float(difference):.2g} nats", flush=True)
    for (name, batches), forward in zip(
        both_orders(rows, DEVICE).items(), (upstreams, None), strict=True
    ):
        padded = []
        for numbers in batches:
            batch = make_experience_batch([rows[number] for number in numbers])
            tensors = (batch.sequences, batch.action_mask, batch.attention_mask)
            padded.append([tensor.to(DEVICE) for tensor in tensors])
        policy.train(padded, forward)
        seconds, peak = policy.train(padded, forward)
        whose = "OpenRLHF's pass" if forward else "ours"
        print(
            f"{len(rows)} rows of real lengths, {whose}, {name}: {seconds:.2f} s, peak {peak:.2f} GB",
            flush=True,
        )


def measure_sleep(policy: Policy) -> None:
    for _ in range(2):
        began = start()
        deepspeed_utils.offload_deepspeed_states(policy.actor.model)
        asleep, _ = stop(began)
        left = torch.cuda.memory_allocated() / 1e9
        began = start()
        deepspeed_utils.reload_deepspeed_states(policy.actor.model)
        awake, _ = stop(began)
        print(
            f"falls asleep in {asleep:.2f} s, {left:.2f} GB stay; wakes up in {awake:.2f} s",
            flush=True,
        )


def measure_shared_prompts(policy: Policy) -> None:
    longest = policy.actor.longest_shared
    micro_batches.LEAST[DEVICE] = 0
    micro_batches.SPAN[DEVICE] = 10**9  # then fewer tokens decide alone
    for shape in GROUPS if ON_GPU else GROUPS[:1]:
        rows = [rows_of(*shape, same=True)]
        seconds = {}
        for name, most in (("apart", 0), ("shared", longest)):
            policy.actor.longest_shared = most
            policy.train(rows)
            seconds[name] = min(policy.train(rows)[0] for _ in range(2))
        ratio = seconds["shared"] / seconds["apart"]
        print(
            f"{shape}: apart {seconds['apart']:.3f} s, shared {seconds['shared']:.3f} s, ratio {ratio:.2f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--zero_stage", choices=["2", "3"], default="2")
    parser.add_argument("--count", action="store_true")
    options = parser.parse_args()
    describe_work(rows_of_real_lengths(PROMPTS, 1.0))
    if options.count:
        return
    with tempfile.TemporaryDirectory() as folder:
        policy = Policy(folder, options.zero_stage)
    actor = policy.actor

    def upstreams(*rows: Any, **options: Any) -> Any:
        return Actor.forward(actor, *rows, **options)

    actor.eval()
    with torch.no_grad():
        short, long = rows_of(2, LONG[0] // 16, LONG[1] // 8), rows_of(8, *LONG)
        print(
            f"log-probs: largest difference {float((actor(*short) - upstreams(*short)).abs().max()):.2g} nats"
        )
        for name, forward in (("ours", actor), ("OpenRLHF's", upstreams)):
            began = start()
            forward(*long)
            print(
                "log-probs of 8 rows, {}: {:.2f} s, peak {:.2f} GB".format(name, *stop(began)),
                flush=True,
            )
    actor.train()
    for name, forward in (
        ("ours", None),
        ("OpenRLHF's", upstreams),
        ("ours, with Adam's state", None),
    ):
        pairs = [policy.train([rows_of(4, *LONG)], forward) for _ in range(4)]
        print(
            "training on 4 rows, {}: {:.2f} s, peak {:.2f} GB".format(
                name, *map(min, zip(*pairs[2:], strict=True))
            )
        )
        skipped = actor.model.skipped_steps
        print(f"  updates that DeepSpeed left out so far: {skipped}", flush=True)
    measure_real_lengths(policy, upstreams)
    if ON_GPU:
        measure_sleep(policy)
    measure_shared_prompts(policy)


if __name__ == "__main__":
    main()

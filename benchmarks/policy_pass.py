"""Measures the policy's passes alone, without Ray and vLLM: ours against OpenRLHF's, asleep, and with shared prompts.

The model has Qwen3-1.7B's shape and random weights; without CUDA it has two narrow layers, to try this script.

    python benchmarks/policy_pass.py                   a minute and a half, 58 GB of a GPU (OpenRLHF's pass)
    python benchmarks/policy_pass.py --zero_stage 3
"""

from __future__ import annotations

import argparse
import os
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
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29533")

import torch  # noqa: E402
from openrlhf.models import Actor  # noqa: E402
from openrlhf.utils import get_strategy  # noqa: E402
from openrlhf.utils.deepspeed import deepspeed_utils  # noqa: E402
from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: E402

from openrlhf_dbb.actors import training_pass  # noqa: E402
from openrlhf_dbb.actors.training_pass import ResponseActor  # noqa: E402
from openrlhf_dbb.platform.backend import Backend, CpuBackend  # noqa: E402

DEVICE = "cuda" if ON_GPU else "cpu"
SHAPE = {"vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28}
NARROW = {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True}
LONG = (1024, 4096) if ON_GPU else (16, 32)  # tokens of prompt and response
GROUPS = [  # rollouts that share a prompt, tokens of prompt and response
    (8, 35, 12), (8, 256, 256), (8, 512, 128), (8, 512, 512), (8, 1024, 128), (8, 1024, 512), (8, 2048, 256),
    (4, 4096, 256), (8, 256, 1024), (4, 1024, 2048),
]  # fmt: skip


class Policy:
    def __init__(self, folder: str, stage: str) -> None:
        model = Qwen3ForCausalLM(Qwen3Config(**(SHAPE if ON_GPU else NARROW), **HEADS)).bfloat16()
        model.save_pretrained(folder)
        tiny.build_tokenizer().save_pretrained(folder)
        flags = ["--preset", "default", "--estimator", "dbb", "--actor.model_name_or_path", folder]
        flags += ["--ds.zero_stage", stage, "--train.micro_batch_size", "4", "--reward.remote_url", "math_answer"]
        files = tiny.prepare(tiny.default_folder())
        flags += ["--data.prompt_dataset", str(files.train), "--data.input_key", "input", "--data.label_key", "label"]
        args = arguments.parse([*flags, "--rollout.batch_size", "4", "--train.batch_size", "8"]).openrlhf_args()
        self.strategy = get_strategy(args)
        self.strategy.__class__ = Backend if ON_GPU else CpuBackend
        self.strategy.setup_distributed()
        actor = ResponseActor(folder, attn_implementation="sdpa", ds_config=self.strategy.get_ds_train_config())
        actor.gradient_checkpointing_enable({"use_reentrant": False})
        adam = {"optim": "adam", "adam": vars(args.actor.adam), "muon": vars(args.actor.muon), "max_norm": 1.0}
        steady = {"lr_scheduler": "constant", "lr_warmup_ratio": 0.0, "min_lr_ratio": 0.1, "scheduler_steps": 8}
        self.actor, self.optimizer, self.scheduler = self.strategy.prepare((actor, adam | steady))

    def train(self, rows: Any, forward: Callable[..., Any] | None = None) -> tuple[float, float]:
        """Take a micro-batch forward and backward, and step; return seconds without the step, and the peak in GB."""
        began = start()
        log_probs, output = (forward or self.actor)(*rows, return_output=True, return_entropy=True)
        self.strategy.backward(-log_probs.mean(), self.actor, self.optimizer)
        del log_probs, output
        found = stop(began)
        self.strategy.optimizer_step(self.optimizer, self.actor, self.scheduler)
        return found


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


def rows_of(count: int, prompt: int, response: int, *, same: bool = False) -> tuple[torch.Tensor, ...]:
    tokens = torch.randint(5, 30, (count, prompt + response), device=DEVICE)
    if same:
        tokens[:, :prompt] = tokens[0, :prompt].clone()
    return tokens, torch.ones(count, response, dtype=torch.bool, device=DEVICE), torch.ones_like(tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zero_stage", choices=["2", "3"], default="2")
    stage = parser.parse_args().zero_stage
    with tempfile.TemporaryDirectory() as folder:
        policy = Policy(folder, stage)
    actor = policy.actor

    def upstreams(*rows: Any, **options: Any) -> Any:
        return Actor.forward(actor, *rows, **options)

    actor.eval()
    with torch.no_grad():
        short, long = rows_of(2, LONG[0] // 16, LONG[1] // 8), rows_of(8, *LONG)
        print(f"log-probs: largest difference {float((actor(*short) - upstreams(*short)).abs().max()):.2g} nats")
        for name, forward in (("ours", actor), ("OpenRLHF's", upstreams)):
            began = start()
            forward(*long)
            print("log-probs of 8 rows, {}: {:.2f} s, peak {:.2f} GB".format(name, *stop(began)), flush=True)
    actor.train()
    for name, forward in (("ours", None), ("OpenRLHF's", upstreams), ("ours, with Adam's state", None)):
        pairs = [policy.train(rows_of(4, *LONG), forward) for _ in range(4)]
        print("training on 4 rows, {}: {:.2f} s, peak {:.2f} GB".format(name, *map(min, zip(*pairs[2:], strict=True))))
        skipped = actor.model.skipped_steps
        print(f"  updates that DeepSpeed left out so far: {skipped}", flush=True)
    for _ in range(2 if ON_GPU else 0):
        began = start()
        deepspeed_utils.offload_deepspeed_states(actor.model)
        asleep, left = stop(began)[0], torch.cuda.memory_allocated() / 1e9
        began = start()
        deepspeed_utils.reload_deepspeed_states(actor.model)
        print(f"falls asleep in {asleep:.2f} s, {left:.2f} GB stay; wakes up in {stop(began)[0]:.2f} s", flush=True)
    longest = actor.longest_shared
    training_pass.LEAST[DEVICE], training_pass.SPAN[DEVICE] = 0, 10**9  # then fewer tokens decide alone
    for shape in GROUPS if ON_GPU else GROUPS[:1]:
        rows, seconds = rows_of(*shape, same=True), {}
        for name, most in (("apart", 0), ("shared", longest)):
            actor.longest_shared = most
            policy.train(rows)
            seconds[name] = min(policy.train(rows)[0] for _ in range(2))
        ratio = seconds["shared"] / seconds["apart"]
        print(
            f"{shape}: apart {seconds['apart']:.3f} s, shared {seconds['shared']:.3f} s, ratio {ratio:.2f}", flush=True
        )


if __name__ == "__main__":
    main()

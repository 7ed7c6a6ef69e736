"""A preset's training in TRL, as nearly as it allows; ``start.py`` and ``real.py`` read the moments that it writes.

One process: Hugging Face's ``generate``, then the update, on the same model, prompts, reward function, batch sizes,
learning rate and loss (``grpo`` is OpenRLHF's seq-mean-token-mean). TRL's defaults are kept where they are faster: a
batch of an optimizer step is one micro-batch, and little is logged. bf16 is TRL's own: weights in fp32, autocast.

    pip install trl==1.16.0
    python benchmarks/trl_grpo.py --steps 16 --precision bf16 --reward FILE --output FOLDER
"""

from __future__ import annotations

import argparse
import runpy
import time
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from openrlhf_dbb import tiny
from openrlhf_dbb.presets import smollm2

ROLLOUTS = 8  # of a prompt
# Of each preset: prompts of a step, rollouts of an optimizer step and of a micro-batch, tokens of an answer, rate.
SIZES = {"tiny": (64, 256, 256, 10, 3e-4), "smollm2": (8, 64, 32, 12, 1e-5)}


class Moments(TrainerCallback):
    """Writes the time at which each step ended, one in a line; a step is all optimizer steps of a rollout batch."""

    def __init__(self, path: Path, updates: int) -> None:
        self._path, self._updates = path, updates

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self._updates == 0:
            with self._path.open("a") as file:
                file.write(f"{time.time()}\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--precision", choices=("bf16", "fp32"), required=True)
    parser.add_argument("--reward", required=True, help="a file with OpenRLHF's reward_func")
    parser.add_argument(
        "--output", type=Path, required=True, help="folder for the model and steps.txt"
    )
    options = parser.parse_args()
    reward_func = runpy.run_path(options.reward)["reward_func"]

    def reward(
        prompts: list[str], completions: list[str], label: list[str], **_: Any
    ) -> list[float | None]:
        queries = [
            prompt + completion for prompt, completion in zip(prompts, completions, strict=True)
        ]
        return reward_func(queries, prompts, label)["rewards"]

    preset = {"tiny": tiny, "smollm2": smollm2}[options.preset]
    prompts_a_step, optimizer_batch, micro_batch, answer_tokens, rate = SIZES[options.preset]
    updates = prompts_a_step * ROLLOUTS // optimizer_batch
    folder = preset.default_folder()
    preset.prepare(folder)
    prompts = load_dataset("json", data_files=str(folder / "train.jsonl"), split="train")
    trainer = GRPOTrainer(
        model=str(folder / "model"),
        reward_funcs=reward,
        train_dataset=prompts.rename_column("input", "prompt"),
        callbacks=[Moments(options.output / "steps.txt", updates)],
        args=GRPOConfig(
            output_dir=str(options.output),
            max_steps=options.steps * updates,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=optimizer_batch // micro_batch,
            generation_batch_size=prompts_a_step * ROLLOUTS,
            num_generations=ROLLOUTS,
            max_completion_length=answer_tokens,
            temperature=1.0,
            beta=0.0,
            loss_type="grpo",
            epsilon=0.2,
            epsilon_high=0.28,
            learning_rate=rate,
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            bf16=options.precision == "bf16",
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
            use_cpu=not torch.cuda.is_available(),
        ),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()

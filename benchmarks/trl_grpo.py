"""The tiny preset's training in TRL, as nearly as it allows; ``start.py`` runs this and reads the moments it writes.

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

from openrlhf_dbb.tiny import default_folder, prepare

PROMPTS, ROLLOUTS = 64, 8  # of a step; each prompt's
OPTIMIZER_BATCH = 256  # rollouts


class Moments(TrainerCallback):
    """Writes the time at which each step ended, one in a line; a step is all optimizer steps of a rollout batch."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % (PROMPTS * ROLLOUTS // OPTIMIZER_BATCH) == 0:
            with self._path.open("a") as file:
                file.write(f"{time.time()}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, required=True, help=f"of {PROMPTS} prompts with {ROLLOUTS} rollouts each")
    parser.add_argument("--precision", choices=("bf16", "fp32"), required=True)
    parser.add_argument("--reward", required=True, help="a file with OpenRLHF's reward_func")
    parser.add_argument("--output", type=Path, required=True, help="folder for the model and steps.txt")
    options = parser.parse_args()
    reward_func = runpy.run_path(options.reward)["reward_func"]

    def reward(prompts: list[str], completions: list[str], label: list[str], **_: Any) -> list[float | None]:
        queries = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        return reward_func(queries, prompts, label)["rewards"]

    assets = prepare(default_folder())
    prompts = load_dataset("json", data_files=str(assets.train), split="train")
    trainer = GRPOTrainer(
        model=str(assets.model),
        reward_funcs=reward,
        train_dataset=prompts.rename_column("input", "prompt"),
        callbacks=[Moments(options.output / "steps.txt")],
        args=GRPOConfig(
            output_dir=str(options.output),
            max_steps=options.steps * PROMPTS * ROLLOUTS // OPTIMIZER_BATCH,
            per_device_train_batch_size=OPTIMIZER_BATCH,
            generation_batch_size=PROMPTS * ROLLOUTS,
            num_generations=ROLLOUTS,
            max_completion_length=10,
            temperature=1.0,
            beta=0.0,
            loss_type="grpo",
            epsilon=0.2,
            epsilon_high=0.28,
            learning_rate=3e-4,
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

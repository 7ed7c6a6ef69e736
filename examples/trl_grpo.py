"""TRL's GRPO with stored posteriors, on the tiny preset's model and data, made on the spot; a minute on two cores.

    pip install ".[trl]"              (from the repository)
    python examples/trl_grpo.py       writes trl_grpo.db and the folder trl_grpo

Stop it whenever you like: the same command goes on from the last checkpoint. A run that has ended needs another
``--run_name``. Several processes share the work with ``torchrun --nproc_per_node 2 examples/trl_grpo.py``.
"""

import argparse

import torch
from datasets import load_dataset
from trl import GRPOConfig

from openrlhf_dbb.integrations.trl import PosteriorGRPOTrainer
from openrlhf_dbb.tiny import default_folder, prepare

STORE = "sqlite:///trl_grpo.db"
PROMPTS, ROLLOUTS = 16, 8  # of a step, on each process; of each prompt

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument(
    "--run_name", default="trl", help="also where its checkpoints are, below trl_grpo (trl)"
)
parser.add_argument("--estimator", default="dbb", help="point is what TRL does by itself (dbb)")
parser.add_argument(
    "--strategy", default="plain", help="or posterior, dynamic, greso, two_stage, allocate (plain)"
)
parser.add_argument("--epochs", type=int, default=6, help="passes over the 256 questions (6)")
parser.add_argument("--save_steps", type=int, default=16, help="steps between checkpoints (16)")
options = parser.parse_args()

torch.set_num_threads(1)  # with a model of this size a second one mostly waits
files = prepare(default_folder())


def correct(prompts, completions, label, **columns):
    """TRL's form of a reward function: one reward a completion, or None where it cannot tell."""
    return [float(text.strip() == answer) for text, answer in zip(completions, label, strict=True)]


def questions(file, count):
    return load_dataset("json", data_files=str(file), split=f"train[:{count}]").rename_column(
        "input", "prompt"
    )


trainer = PosteriorGRPOTrainer(
    model=str(files.model),
    reward_funcs=correct,
    train_dataset=questions(files.train, 256),
    eval_dataset=questions(files.heldout, 64),
    # what is ours
    estimator=options.estimator,
    strategy=options.strategy,
    store=STORE,
    run_name=options.run_name,
    label_column="label",
    resume="auto",
    # what is TRL's
    args=GRPOConfig(
        output_dir=f"trl_grpo/{options.run_name}",
        num_train_epochs=options.epochs,
        per_device_train_batch_size=PROMPTS * ROLLOUTS,
        num_generations=ROLLOUTS,
        max_completion_length=10,
        learning_rate=5e-4,
        lr_scheduler_type="constant",
        beta=0.0,
        eval_strategy="steps",
        eval_steps=16,
        eval_on_start=True,
        per_device_eval_batch_size=256,
        save_steps=options.save_steps,
        logging_steps=8,
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        report_to="none",
    ),
)
trainer.train(resume_from_checkpoint=True)
if trainer.is_world_process_zero():
    print(
        f"look at it: openrlhf-dbb --store.url {STORE} show {options.run_name}        (or report, lab replay)"
    )

"""The example of TRL's trainer as a user starts it: killed, started again to its end, and on two ranks."""

import functools
import json
import os
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from filler import check
from trainings import rows, wait_for_step

from openrlhf_dbb.storage import open_store
from openrlhf_dbb.tiny import build_model, build_tokenizer

pytest.importorskip("trl", reason="needs TRL")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples/trl_grpo.py"
DATABASE = "trl_grpo.db"
STEPS = 16  # of one pass
PROMPTS = 16
ROLLOUTS = 8
# As where these are not installed: TRL would load them, for seconds.
ALONE = "import sys; sys.modules.update(dict.fromkeys(['vllm', 'peft', 'bitsandbytes', 'wandb', 'deepspeed']))\n"


def query(folder, sql):
    return rows(folder, sql, DATABASE)


def start(folder, log):
    (folder / "sitecustomize.py").write_text(ALONE)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{folder}:{ROOT}"}
    command = [sys.executable, str(EXAMPLE), "--epochs", "1", "--save_steps", "5"]
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The folder of a run that was killed and started again by the same command, to its end."""
    folder = tmp_path_factory.mktemp("trl")
    with (folder / "log").open("w+") as log:
        process = start(folder, log)
        wait_for_step(folder, 6, process, DATABASE)  # a checkpoint is made at every fifth step
        process.kill()
        process.wait()
        process = start(folder, log)
        assert process.wait(timeout=1800) == 0, (folder / "log").read_text()[-4000:]
    return folder


def test_after_kills_every_step_is_there_once_and_each_posterior_follows_from_the_one_before(
    killed,
):
    with open_store(f"{killed}/trl_grpo.db", create=False) as store:
        assert check(store) == []
    assert query(killed, "SELECT name, status, last_step FROM dbb_run") == [
        ("trl", "finished", STEPS)
    ]
    groups = query(
        killed,
        "SELECT step, rollouts, count(*) FROM dbb_history GROUP BY step, rollouts ORDER BY step",
    )
    assert groups == [(step, ROLLOUTS, PROMPTS) for step in range(1, STEPS + 1)]
    assert query(killed, "SELECT count(*) FROM dbb_event WHERE kind = 'claim'") == [(1,)]


ON_A_RANK = (
    ALONE
    + """
import json, os
rank, port, folder, model = sys.argv[1:]
os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig
from openrlhf_dbb.integrations.trl import PosteriorGRPOTrainer

seen = []
ours = PosteriorGRPOTrainer._generate_and_score_completions

def watched(self, inputs):
    output = ours(self, inputs)
    seen.append({"prompts": [row["prompt"] for row in inputs], "ours": output["advantages"].tolist()})
    return output

PosteriorGRPOTrainer._generate_and_score_completions = watched

def odd(completions, **_):
    rewards = [float(ord(text[0]) % 2) if text else 0.0 for text in completions]
    seen_rewards.append(rewards)
    return rewards

seen_rewards = []

def made(name="dbb", **ours):
    ours.setdefault("estimator", "dbb")
    return PosteriorGRPOTrainer(
        model=model, reward_funcs=odd, train_dataset=Dataset.from_dict({"prompt": [f"{n}+{n}=" for n in range(6)]}),
        store=f"sqlite:///{folder}/runs.db", run_name=name, **ours,
        args=GRPOConfig(
            output_dir=f"{folder}/{name}", max_steps=2 if name == "dbb" else 4, per_device_train_batch_size=6,
            num_generations=4, max_completion_length=6, learning_rate=1e-3, beta=0.0, report_to="none",
            gradient_checkpointing=False, use_cpu=True, bf16=False, save_steps=2, disable_tqdm=True,
            logging_strategy="no", scale_rewards="none",
        ),
    )

trainer = made()
trainer.train()
found = {"dbb": [batch | {"rewards": r} for batch, r in zip(seen, seen_rewards, strict=True)]}
found["weights"] = sum(float(p.double().abs().sum()) for p in trainer.model.parameters())
class Stop(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == 3

for name in ("whole", "cut"):  # a checkpoint at every second step; a pass has two
    trainer = made(name, strategy="posterior")
    if name == "cut":
        trainer.add_callback(Stop())
    trainer.train()
# transformers loads the optimizer onto "cpu:0" or "cpu:1", which torch alone does not know as places
torch.serialization.register_package(0, lambda _: None, lambda values, at: values if at.startswith("cpu:") else None)
made("cut", strategy="posterior", resume=True).train(resume_from_checkpoint=True)
try:
    made()
except Exception as error:
    found["error"] = f"{type(error).__name__}: {error}"
print()
print(json.dumps(found))
"""
)


def two_ranks(program, *arguments):
    """Run a program as two ranks, each with its number, a port and ``arguments``; the last line of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    commands = [[sys.executable, "-c", program, rank, port, *arguments] for rank in "01"]
    ranks = [
        subprocess.Popen(each, env=os.environ | {"OMP_NUM_THREADS": "1"}, **pipes)
        for each in commands
    ]
    try:
        outputs = [rank.communicate(timeout=900) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert {rank.returncode for rank in ranks} == {0}, [stderr[-3000:] for _, stderr in outputs]
    return [json.loads(stdout.splitlines()[-1]) for stdout, _ in outputs]


@pytest.fixture(scope="module")
def two_trained(tmp_path_factory):
    """Three groups of four on two ranks with six rollouts each, the second group on both: the folder of the store, and
    what each rank has seen."""
    folder = tmp_path_factory.mktemp("two_ranks")
    build_model(0).save_pretrained(folder / "model")
    build_tokenizer().save_pretrained(folder / "model")
    first, second = two_ranks(ON_A_RANK, str(folder), str(folder / "model"))
    return functools.partial(rows, folder, database="runs.db"), first, second


def groups_of(prompts):
    """The places of each prompt."""
    places = {}
    for place, prompt in enumerate(prompts):
        places.setdefault(prompt, []).append(place)
    return places


def test_two_ranks_share_one_run_and_its_posteriors(two_trained):
    stored, first, second = two_trained
    posterior = {}
    for one, other in zip(first["dbb"], second["dbb"], strict=True):
        assert one["prompts"][4] == one["prompts"][5] == other["prompts"][0] == other["prompts"][1]
        rewards = np.array(one["rewards"] + other["rewards"])
        residuals = rewards.copy()
        for prompt, places in groups_of(one["prompts"] + other["prompts"]).items():
            assert len(places) == 4
            right = rewards[places].sum()
            alpha, beta = posterior.get(prompt, (1.0, 1.0))
            alpha = alpha / 2 + right
            beta = beta / 2 + 4 - right
            posterior[prompt] = (alpha, beta)
            residuals[places] -= alpha / (alpha + beta)
        # over both ranks
        np.testing.assert_allclose(
            one["ours"] + other["ours"], residuals - residuals.mean(), atol=1e-6
        )
    after = stored(
        "SELECT prompt, alpha, beta FROM posteriors JOIN prompts USING (prompt_id) WHERE run_id = 1"
    )
    assert {prompt: (alpha, beta) for prompt, alpha, beta in after} == posterior
    assert first["weights"] == second["weights"]


def test_of_two_ranks_each_decodes_its_own_rollouts_and_all_are_stored(two_trained):
    stored, _, _ = two_trained
    kept = stored("SELECT step, score, text FROM rollouts WHERE run_id = 1")
    assert Counter(step for step, _, _ in kept) == {1: 12, 2: 12}
    for _, score, text in kept:
        assert score == (ord(text[0]) % 2 if text else 0)


def test_two_ranks_resume_with_the_draws_of_the_unbroken_run(two_trained):
    stored, _, _ = two_trained
    sql = "SELECT step, prompt_id, rollouts, alpha, inclusion FROM posterior_history WHERE run_id = {} ORDER BY 1, 2"
    whole = stored(sql.format(2))
    resumed = stored(sql.format(3))
    assert resumed == whole
    assert Counter((step, rollouts) for step, _, rollouts, *_ in resumed) == {
        (step, 4): 3 for step in (1, 2, 3, 4)
    }
    claims = stored("SELECT count(*) FROM dbb_event WHERE kind IN ('claim', 'take_over')")
    assert claims == [(1,)]  # the resume


def test_a_taken_name_is_refused_on_both_ranks(two_trained):
    _, first, second = two_trained
    reason = first["error"].removeprefix("StoreError: ")
    assert "there is a run named 'dbb'" in reason
    assert second["error"].startswith("RuntimeError: ")
    assert second["error"].endswith(reason)


REMEMBERING = (
    ALONE
    + """
import json, os
rank, port, folder, model = sys.argv[1:]
os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from openrlhf_dbb import storage
from openrlhf_dbb.integrations import trl as door
from openrlhf_dbb.integrations import trl_memory

def odd(completions, **_):
    return [float(ord(text[0]) % 2) if text else 0.0 for text in completions]

def trained(name, **ours):
    trainer = GRPOTrainer(
        model=model, reward_funcs=odd, train_dataset=Dataset.from_dict({"prompt": [f"{n}+{n}=" for n in range(6)]}),
        args=GRPOConfig(
            output_dir=f"{folder}/{name}", max_steps=4, per_device_train_batch_size=6, num_generations=4,
            max_completion_length=6, learning_rate=1e-3, beta=0.0, report_to="none", gradient_checkpointing=False,
            use_cpu=True, bf16=False, save_strategy="no", disable_tqdm=True, logging_steps=1,
        ),
    )
    if name != "alone":
        door.remember(trainer, store=f"sqlite:///{folder}/runs.db", run_name=name)
    trainer.train()
    return sum(float(p.double().abs().sum()) for p in trainer.model.parameters())

class Broken:
    def __init__(self, owner, name, on_rank):
        self.owner, self.name, self.whole, self.calls = owner, name, getattr(owner, name), 0
        if rank == on_rank:
            broken = self
            setattr(owner, name, lambda *args, **options: broken(*args, **options))

    def __call__(self, *args, **options):
        self.calls += 1
        if self.calls > 8:
            raise storage.StoreError("broken")
        return self.whole(*args, **options)

    def restore(self):
        setattr(self.owner, self.name, self.whole)

found = {"alone": trained("alone"), "whole": trained("whole")}
for name, owner, method, on_rank in (
    ("second", trl_memory.Memory, "_key", "1"),
    ("first", trl_memory.Memory, "_key", "0"),
    ("log", storage.Run, "record_metrics", "0"),
):
    broken = Broken(owner, method, on_rank)
    if name == "log":
        broken.calls = 7
    found[name] = trained(name)
    broken.restore()
print()
print(json.dumps(found))
"""
)


def test_on_two_ranks_a_memory_that_fails_on_one_ends_on_both_and_the_training_goes_on(tmp_path):
    build_model(0).save_pretrained(tmp_path / "model")
    build_tokenizer().save_pretrained(tmp_path / "model")
    first, second = two_ranks(REMEMBERING, str(tmp_path), str(tmp_path / "model"))
    assert first == second and len(set(first.values())) == 1
    stored = rows(
        tmp_path, "SELECT name, status, last_step FROM dbb_run ORDER BY run_id", "runs.db"
    )
    assert stored[0] == ("whole", "finished", 4)
    assert {name for name, *_ in stored[1:]} == {"second", "first", "log"}
    assert all(status != "finished" and last_step < 4 for _, status, last_step in stored[1:])


JUDGING = (
    ALONE
    + """
import json, os
rank, port, folder, model = sys.argv[1:]
os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
from datasets import Dataset
from trl import GRPOConfig
from openrlhf_dbb.integrations.trl import PosteriorGRPOTrainer

found = []

class Watched(PosteriorGRPOTrainer):
    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        prompts = self.processing_class.batch_decode(output["prompt_ids"], skip_special_tokens=True)
        items = int(output["num_items_in_batch"])
        mine = int(output["completion_mask"].sum())
        found.append({"prompts": prompts, "ours": output["advantages"].tolist(), "items": items, "mine": mine})
        return output

def odd(prompts, completions, **_):
    rewards = [float(ord(text[0]) % 2) if text else 0.0 for text in completions]
    return [0.0 if prompt.startswith("0") else reward for prompt, reward in zip(prompts, rewards)]

trainer = Watched(
    model=model, reward_funcs=odd, train_dataset=Dataset.from_dict({"prompt": [f"{n}+{n}=" for n in range(6)]}),
    store=f"sqlite:///{folder}/runs.db", run_name="run", estimator="point", strategy="two_stage",
    strategy_parameters={"first": 3}, replay={"samples": 3, "cache": 4},
    args=GRPOConfig(
        output_dir=f"{folder}/run", max_steps=4, per_device_train_batch_size=6, num_generations=4,
        max_completion_length=6, learning_rate=1e-3, beta=0.0, report_to="none", gradient_checkpointing=False,
        use_cpu=True, bf16=False, save_strategy="no", disable_tqdm=True, logging_strategy="no",
    ),
)
trainer.train()
weights = sum(float(p.double().abs().sum()) for p in trainer.model.parameters())
print()
print(json.dumps({"steps": found, "weights": weights}))
"""
)


def check_mixed_groups(one, other):
    """The fresh rows of a step on two ranks are whole groups of different rewards."""
    assert one["items"] == other["items"] == one["mine"] + other["mine"]
    prompts = np.reshape(one["prompts"][:6] + other["prompts"][:6], (3, 4))
    assert (prompts == prompts[:, :1]).all()
    assert "0+0=" not in prompts
    advantages = np.reshape(one["ours"][:6] + other["ours"][:6], (3, 4))
    assert (advantages.max(axis=1) > 0).all()
    assert (advantages.min(axis=1) < 0).all()


def test_two_ranks_generate_together_what_a_strategy_asks_for(tmp_path):
    """Three groups of four on two ranks with six rollouts each; first stages of three, second stages of one."""
    build_model(0).save_pretrained(tmp_path / "model")
    build_tokenizer().save_pretrained(tmp_path / "model")
    first, second = two_ranks(JUDGING, str(tmp_path), str(tmp_path / "model"))
    assert first["weights"] == second["weights"]
    assert len(first["steps"]) == 4
    for one, other in zip(first["steps"], second["steps"], strict=True):
        assert len(one["prompts"]) == len(other["prompts"])
        check_mixed_groups(one, other)
    assert len(first["steps"][0]["prompts"]) == 6
    assert len(first["steps"][3]["prompts"]) > 6  # replayed rows on both
    check_all_is_observed(tmp_path)


def check_all_is_observed(folder):
    """Of four steps all that was generated is stored; of the prompt that is always wrong only first stages."""
    found = functools.partial(rows, folder, database="runs.db")
    stored = found("SELECT step, generated, trained FROM steps ORDER BY step")
    observed = found("SELECT step, sum(rollouts) FROM posterior_history GROUP BY step ORDER BY 1")
    zeros = found(
        "SELECT rollouts FROM posterior_history JOIN prompts USING (prompt_id) WHERE prompt = '0+0='"
    )
    assert [(step, trained) for step, _, trained in stored] == [(1, 12), (2, 12), (3, 12), (4, 12)]
    assert observed == [(step, generated) for step, generated, _ in stored]
    assert zeros
    assert all(rollouts % 3 == 0 for (rollouts,) in zeros)

"""The example of TRL's trainer as a user starts it: to its end, killed and started again, and on two ranks.

``OPENRLHF_DBB_KILLS`` sets how often it is killed (1).
"""

import json
import os
import random
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from openrlhf_dbb.cli.main import main

pytest.importorskip("trl", reason="needs TRL")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples/trl_grpo.py"
KILLS = int(os.environ.get("OPENRLHF_DBB_KILLS", "1"))
SEED = int(os.environ.get("OPENRLHF_DBB_KILL_SEED", "1"))
EPOCHS, A_PASS, PROMPTS, ROLLOUTS = KILLS, 16, 16, 8  # steps of a pass; prompts of a step
# As where vLLM is not installed: TRL would load it.
WITHOUT_VLLM = "import sys; sys.modules['vllm'] = None\n"


def query(folder, sql):
    database = folder / "trl_grpo.db"
    if not database.exists():
        return []
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=10) as connection:
        return connection.execute(sql).fetchall()


def last_step(folder):
    try:
        return max([step for (step,) in query(folder, "SELECT last_step FROM dbb_run")], default=0)
    except sqlite3.OperationalError:  # the tables are being made
        return 0


def start(folder, log):
    (folder / "sitecustomize.py").write_text(WITHOUT_VLLM)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{folder}:{ROOT}"}
    command = [sys.executable, str(EXAMPLE), "--epochs", str(EPOCHS), "--save_steps", "5"]
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)


def text_of(log):
    log.seek(0)
    return log.read()[-4000:]


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The folder of a run that was killed at random moments and started again by the same command, to its end."""
    folder = tmp_path_factory.mktemp("trl")
    chance = random.Random(SEED)
    with (folder / "log").open("w+") as log:
        for number in range(KILLS):
            process = start(folder, log)
            # a checkpoint is made in between, at every fifth step
            target = last_step(folder) + 6 + chance.randrange(A_PASS * EPOCHS // (KILLS + 1))
            deadline = time.monotonic() + 300
            while last_step(folder) < min(target, A_PASS * EPOCHS - 4):
                assert process.poll() is None, f"ended by itself before step {target}: {text_of(log)}"
                assert time.monotonic() < deadline, f"step {target} was not reached, kill {number}"
                time.sleep(0.01)
            time.sleep(chance.uniform(0, 0.3))
            assert process.poll() is None, f"ended by itself: {text_of(log)}"
            process.kill()
            process.wait()
        process = start(folder, log)
        assert process.wait(timeout=400) == 0, text_of(log)
    return folder


def test_after_kills_every_step_is_there_once(killed):
    assert query(killed, "SELECT name, status, last_step FROM dbb_run") == [("trl", "finished", EPOCHS * A_PASS)]
    rows = query(killed, "SELECT step, prompt_id, rollouts FROM dbb_history")
    assert Counter(step for step, *_ in rows) == Counter({step: PROMPTS for step in range(1, EPOCHS * A_PASS + 1)})
    assert len({(step, prompt) for step, prompt, _ in rows}) == len(rows)
    assert {rollouts for *_, rollouts in rows} == {ROLLOUTS}
    events = Counter(event for (event,) in query(killed, "SELECT kind FROM dbb_event"))
    assert events["claim"] == KILLS


def test_after_kills_every_posterior_follows_from_the_one_before(killed):
    """alpha' = alpha / 2 + S and beta' = beta / 2 + N - S, bit for bit, from 1 and 1."""
    columns = "prompt_id, step, successes, rollouts, alpha, beta"
    now = {}
    for prompt, _, successes, rollouts, alpha, beta in query(
        killed, f"SELECT {columns} FROM dbb_history ORDER BY step"
    ):
        before = now.get(prompt, (1.0, 1.0))
        assert (alpha, beta) == (before[0] / 2 + successes, before[1] / 2 + rollouts - successes)
        now[prompt] = alpha, beta
    assert now == {prompt: (a, b) for prompt, a, b in query(killed, "SELECT prompt_id, alpha, beta FROM dbb_posterior")}


def test_the_held_out_questions_were_evaluated(killed):
    found = query(killed, "SELECT step, count(*), min(samples), max(samples) FROM evaluation_results GROUP BY step")
    assert [row for row in found if row[0] in (0, A_PASS)] == [(0, 64, 8, 8), (A_PASS, 64, 8, 8)]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["show", "trl"], "estimator:         dbb"),
        (["history", "74+8=", "trl"], "74+8="),
        (["report", "trl", "-o", "report.html"], "wrote report.html"),
        (["lab", "replay", "trl"], "trained with dbb 0.5"),
    ],
    ids=["show", "history", "report", "lab"],
)
def test_the_commands_read_the_run_as_one_of_ours(killed, command, said, monkeypatch, capsys):
    monkeypatch.chdir(killed)
    assert main(["--store.url", "sqlite:///trl_grpo.db", *command]) == 0
    assert said in capsys.readouterr().out


ON_A_RANK = (
    f"""{WITHOUT_VLLM}"""
    + """
import json, os
rank, port, folder, model = sys.argv[1:]
os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
from datasets import Dataset
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

def made():
    return PosteriorGRPOTrainer(
        model=model, reward_funcs=odd, train_dataset=Dataset.from_dict({"prompt": [f"{n}+{n}=" for n in range(6)]}),
        store=f"sqlite:///{folder}/runs.db", run_name="dbb",
        args=GRPOConfig(
            output_dir=f"{folder}/out", max_steps=2, per_device_train_batch_size=6, num_generations=4,
            max_completion_length=6, learning_rate=1e-3, beta=0.0, gradient_checkpointing=False, report_to="none",
            use_cpu=True, bf16=False, save_steps=2, disable_tqdm=True, logging_strategy="no", scale_rewards="none",
        ),
    )

trainer = made()
trainer.train()
found = {"dbb": [batch | {"rewards": r} for batch, r in zip(seen, seen_rewards, strict=True)]}
found["owns"] = trainer.posteriors is not None
found["weights"] = sum(float(p.double().abs().sum()) for p in trainer.model.parameters())
try:
    made()
except Exception as error:
    found["error"] = f"{type(error).__name__}: {error}"
print()
print(json.dumps(found))
"""
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from openrlhf_dbb.tiny.model import build_model, build_tokenizer

    folder = tmp_path_factory.mktemp("model")
    build_model(0).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return str(folder)


def test_two_ranks_share_one_run(two_ranks, model, tmp_path):
    """Three groups of four on two ranks with six rollouts each: the second group lies on both."""
    first, second = two_ranks(ON_A_RANK, str(tmp_path), model)
    posterior = {}
    for one, other in zip(first["dbb"], second["dbb"], strict=True):
        assert one["prompts"][4] == one["prompts"][5] == other["prompts"][0] == other["prompts"][1]
        prompts, rewards, ours = (one[name] + other[name] for name in ("prompts", "rewards", "ours"))
        for prompt in dict.fromkeys(prompts):
            at = [place for place, text in enumerate(prompts) if text == prompt]
            assert len(at) == 4
            right = sum(rewards[place] for place in at)
            alpha, beta = posterior.get(prompt, (1.0, 1.0))
            posterior[prompt] = alpha, beta = alpha / 2 + right, beta / 2 + 4 - right
            np.testing.assert_allclose(
                [ours[p] for p in at], [rewards[p] - alpha / (alpha + beta) for p in at], atol=1e-6
            )
    with sqlite3.connect(tmp_path / "runs.db") as connection:
        stored = connection.execute(
            "SELECT prompt, alpha, beta FROM posteriors JOIN prompts USING (prompt_id) JOIN runs USING (run_id)"
            " WHERE runs.name = 'dbb'"
        ).fetchall()
        writers = connection.execute("SELECT count(*) FROM dbb_event WHERE kind IN ('claim', 'take_over')").fetchone()
        written = connection.execute("SELECT run_id, step, score, text FROM rollouts").fetchall()
    assert {text: (alpha, beta) for text, alpha, beta in stored} == posterior
    # Of both steps all twelve rollouts, each decoded by the rank that has it.
    assert Counter((run, step) for run, step, *_ in written) == {(1, step): 12 for step in (1, 2)}
    assert all(score == (ord(text[0]) % 2 if text else 0) for *_, score, text in written)
    assert writers == (0,)
    assert (first["owns"], second["owns"]) == (True, False)
    assert first["weights"] == second["weights"]
    assert first["error"].startswith("StoreError: there is a run named 'dbb'")
    assert second["error"] == f"RuntimeError: the first process cannot go on: {first['error'].split(': ', 1)[1]}"
    states = [json.loads(path.read_text()) for path in tmp_path.glob("out/checkpoint-2/trainer_state.json")]
    assert [state["stateful_callbacks"]["PosteriorState"]["args"]["step"] for state in states] == [2]

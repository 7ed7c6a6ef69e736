"""Async training, end to end: generation ahead of the training."""

import json

import pytest
from trainings import rows

from openrlhf_dbb.platform import cpu

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not cpu.active(), reason="with CUDA the engines need a GPU of their own"),
]

PROMPTS, BATCH, SAMPLES, PASSES = 24, 8, 4, 3
COMMAND = [
    "--estimator", "dbb", "--preset", "tiny", "--run_name", "ahead", "--train.async_enable",
    "--data.max_samples", str(PROMPTS), "--train.num_episodes", str(PASSES), "--rollout.batch_size", str(BATCH),
    "--rollout.n_samples_per_prompt", str(SAMPLES), "--train.batch_size", "32", "--rollout.micro_batch_size", "32",
    "--train.micro_batch_size", "16", "--eval.n_samples_per_prompt", "1",
]  # fmt: skip
# Two turns; the second sees the first. The answer is looked for in both.
AGENT = """
import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class Turns(AgentInstanceBase):
    def __init__(self):
        self.turn, self.text = 0, ""

    async def step(self, states, **kwargs):
        self.turn += 1
        self.text += states["action_text"]
        right = torch.tensor(float(states["label"] in self.text) if self.turn == 2 else 0.0)
        return {
            "rewards": right, "scores": right, "environment_feedback": "" if self.turn == 2 else "=",
            "done": self.turn == 2, "sampling_params": states["sampling_params"], "extra_logs": {},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(Turns)
"""


def test_the_async_recipe_trains_every_group_once_and_says_how_late_it_was(train, tmp_path):
    """Partial rollouts of an agent of two turns, 12 groups at a time, corrected, whitened, evaluated and probed."""
    (tmp_path / "agent.py").write_text(AGENT)
    more = [
        "--train.partial_rollout_enable", "--train.agent_func_path", "agent.py", "--reward.remote_url", "",
        "--rollout.vllm_generate_batch_size", "12", "--algo.advantage.estimator", "reinforce_baseline",
        "--algo.advantage.is_correction_level", "token", "--eval.steps", "4",
        "--probe.fraction", "0.2", "--probe.samples", "2", "--rollouts.keep", "all",
    ]  # fmt: skip
    result = train(tmp_path, *COMMAND, *more)
    assert result.returncode == 0, result.stderr
    visits = rows(tmp_path, "SELECT visits, count(*) FROM posteriors GROUP BY visits")
    assert visits == [(PASSES, PROMPTS)]
    assert rows(tmp_path, "SELECT DISTINCT trained, groups FROM steps") == [(BATCH * SAMPLES, BATCH)]
    # A queue of one, and two batches of what is generated at a time: at most two steps late.
    late = rows(tmp_path, "SELECT step, min(lag), max(lag) FROM posterior_history GROUP BY step ORDER BY step")
    assert late[0] == (1, 0, 0)
    assert all(0 <= least <= most <= 2 for _, least, most in late)
    assert max(most for _, _, most in late) >= 1
    metrics = [json.loads(text) for (text,) in rows(tmp_path, "SELECT metrics FROM steps ORDER BY step")]
    kept = dict(rows(tmp_path, "SELECT step, avg(lag) FROM rollouts GROUP BY step"))
    for step, of_step in enumerate(metrics, 1):
        assert of_step["async/lag"] == pytest.approx(kept[step], abs=1e-6)
    evaluated = rows(tmp_path, "SELECT DISTINCT step FROM dbb_evaluation ORDER BY step")
    assert evaluated == [(0,), (4,), (8,), (9,)]
    assert rows(tmp_path, "SELECT count(*) > 0 FROM probes") == [(1,)]

"""SIGKILL of the whole process tree at a random moment, with every method; every resume continues exactly.

Only the runs of ``SHORT`` are not marked long.
"""

import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from trainings import check_store, kill_tree, last_step, wait_for_step
from trainings import rows as query

from openrlhf_dbb import Posteriors, tiny
from openrlhf_dbb.core.replay import Replay
from openrlhf_dbb.core.strategies.posterior import expected_variance, inclusion

pytestmark = pytest.mark.e2e

SHORT = (
    "dapo-auto",
    "async-dbb",
)  # a group of each is judged, drawn again, or late; grpo-dbb has neither
DISCOUNT = 0.75
# 32 prompts, 8 a step, 4 rollouts a prompt, 2 optimizer steps a step, a checkpoint every second step
PROMPTS = 32
BATCH = 8
SAMPLES = 4
EPOCHS = 6
A_STEP = BATCH * SAMPLES
WHOLE = PROMPTS * SAMPLES * EPOCHS
COMMAND = [
    sys.executable, "-m", "openrlhf_dbb.cli.train_grpo", "--preset", "tiny", "--data.max_samples", str(PROMPTS),
    "--rollout.batch_size", str(BATCH), "--rollout.n_samples_per_prompt", str(SAMPLES), "--train.batch_size", "16",
    "--rollout.micro_batch_size", "32", "--train.micro_batch_size", "16", "--train.num_episodes", str(EPOCHS),
    "--ckpt.save_steps", "2", "--eval.steps", "-1", "--eval.n_samples_per_prompt", "1",
    "--reward.remote_url", "exact.py",
]  # fmt: skip
# Math-Verify's time limit may leave out a rollout where the processor is busy: then the numbers below would differ.
REWARD = """
def reward_func(queries, prompts, labels):
    return {"rewards": [float(queries[0].startswith(prompts[0] + labels[0]))]}
"""
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
DBB = ["--estimator", "dbb", "--dbb.discount", str(DISCOUNT)]


@dataclass(frozen=True)
class Case:
    """A run to be killed.

    Attributes:
        flags: beside COMMAND.
        filters: whether only groups with different rewards are trained on, so that a pass may be a single step.
        budget: ``--train.max_rollouts``; None if the passes over the data end the run.
        latest: the most steps that a group may be late, in async training; None if training waits for generation.
        first: rollouts of the first stage of a group; None: a group has one stage.
        draws: whether the strategy chooses the prompts, and the sizes of their groups.
        resumed: more flags of the resume.
    """

    flags: list[str]
    filters: bool = False
    budget: int | None = None
    latest: int | None = None
    draws: bool = False
    first: int | None = None
    resumed: tuple[str, ...] = ()

    @property
    def steps(self):
        """It takes at least so many."""
        return EPOCHS if self.filters else 4 * EPOCHS


CASES = {
    "grpo-dbb": Case([*DBB, "--probe.fraction", "0.25", "--probe.samples", "4"]),
    "dapo-auto": Case(
        ["--method", "dapo", "--estimator", "auto", "--eval.steps", "2", "--eval.benchmarks", "mine=benchmark.jsonl",
         "--eval.dataset", "", "--ckpt.best_metric_key", ""],
        filters=True,
    ),
    "greso-dbb": Case(["--method", "greso", *DBB, "--eval.steps", "4"], filters=True, budget=WHOLE),
    "two-stage-dbb": Case(
        ["--method", "two_stage", *DBB, "--two_stage.first", "3", "--rollout.n_samples_per_prompt", str(SAMPLES)],
        filters=True,
        budget=WHOLE,
        first=3,
    ),
    "posterior-dbb": Case(
        [*DBB, "--rollout.strategy", "posterior", "--algo.advantage.estimator", "rloo"], draws=True
    ),
    "lora-point": Case(
        ["--estimator", "point", "--point.memory", "dbb", "--ds.lora.rank", "4", "--ckpt.save_adapter",
         "--eval.steps", "2"],
    ),
    # It is killed in the last pass but one, so that what a resume has loaded is there at the end.
    "repo-auto": Case(
        ["--method", "repo", "--replay.samples", str(SAMPLES), "--replay.cache", str(2 * SAMPLES),
         "--rollouts.keep", "all"],
    ),
    "spo": Case(["--method", "spo", "--rollout.n_samples_per_prompt", str(SAMPLES)]),
    # Partial rollouts, 12 groups at a time for batches of 8, only from the resume on.
    "async-dbb": Case(
        [*DBB, "--train.async_enable", "--train.async_queue_size", "2",
         "--train.agent_func_path", "agent.py", "--reward.remote_url", "", "--rollouts.keep", "all",
         "--algo.advantage.estimator", "reinforce_baseline", "--algo.advantage.is_correction_level", "token",
         "--eval.steps", "8", "--probe.fraction", "0.2", "--probe.samples", "2"],
        latest=2 + 1,
        resumed=("--train.partial_rollout_enable", "--rollout.vllm_generate_batch_size", "12"),
    ),
    # 20 groups at a time for batches of 8: some wait at every checkpoint.
    "async-more": Case(
        [*DBB, "--train.async_enable", "--train.partial_rollout_enable",
         "--rollout.vllm_generate_batch_size", "20", "--eval.steps", "4"],
        latest=1 + 2,
    ),
}  # fmt: skip


def check_all(folder, case):
    """What holds at any moment, also in the middle of a step."""
    if case.latest is None:  # these estimates also depend on lags
        check_whole(folder)
    check_usage(folder, case)
    if case.draws:
        check_draws(folder)
    else:
        check_passes(folder, case.first)
    check_checkpoint(folder)
    ((least, most),) = query(folder, "SELECT min(lag), max(lag) FROM posterior_history")
    assert 0 <= least <= most <= (case.latest or 0)
    check_best(folder)
    if "--replay.samples" in case.flags:
        check_replays(folder)
    check_store(folder)


def check_whole(folder):
    """All numbers of the estimator, also run-wide ones, are those of a run that saw the same groups and no kill."""
    ((estimator, parameters),) = query(folder, "SELECT estimator, parameters FROM dbb_run")
    # Registered together, as at the start, they get the same ids, and so the same order in each sum.
    of_id = {
        p: text
        for p, *text in query(folder, "SELECT prompt_id, prompt, label FROM prompts")
        if p <= PROMPTS
    }
    groups = defaultdict(list)
    for step, *group in query(
        folder, "SELECT step, prompt_id, rollouts, successes FROM posterior_history"
    ):
        groups[step].append(group)
    data = zip(*(of_id[prompt] for prompt in sorted(of_id)), strict=True)
    with tempfile.TemporaryDirectory() as other:
        url = f"sqlite:///{other}/openrlhf_dbb.db"
        chosen = json.loads(parameters)
        with Posteriors.create(
            url, "whole", *data, estimator=estimator, parameters=chosen
        ) as whole:
            for step in sorted(groups):
                texts = [
                    of_id[prompt] for prompt, rollouts, _ in groups[step] for _ in range(rollouts)
                ]
                rewards = [
                    float(i < right) for _, rollouts, right in groups[step] for i in range(rollouts)
                ]
                whole.observe(step, *zip(*texts, strict=True), rewards)
        of_prompts = "SELECT step, prompt_id, alpha, beta, mean FROM posterior_history ORDER BY step, prompt_id"
        for sql in ("SELECT step, shared FROM steps ORDER BY step", of_prompts):
            assert query(folder, sql) == query(Path(other), sql)


def check_usage(folder, case):
    """Every rollout is counted, every step trains on a whole batch, and the estimator has seen every group."""
    counts = query(folder, "SELECT step, generated, trained, informative FROM steps")
    for step, generated, trained, informative in counts:
        assert trained == A_STEP, step
        if case.filters:
            assert generated >= trained == informative, step
        else:
            assert generated == A_STEP, step
    seen = query(
        folder,
        "SELECT step, sum(rollouts), count(*) FROM posterior_history GROUP BY step ORDER BY step",
    )
    assert seen == query(folder, "SELECT step, generated, groups FROM steps ORDER BY step")


def check_passes(folder, first):
    """Up to every step each prompt was drawn once a pass, generated for or skipped, whatever was killed and redone."""
    drawn = Counter()
    groups = defaultdict(Counter)
    for step, prompt, rollouts in query(
        folder, "SELECT step, prompt_id, rollouts FROM posterior_history"
    ):
        groups[step][prompt] += _groups_in(rollouts, first)
    total = skipped = 0
    for step, skips in query(folder, "SELECT step, skipped FROM steps ORDER BY step"):
        drawn.update(groups[step])
        skipped += skips
        total = drawn.total() + skipped
        assert max(drawn.values()) <= -(-total // PROMPTS), step
        if not skipped:  # the store does not say which prompts were skipped
            assert min(drawn[prompt] for prompt in range(1, PROMPTS + 1)) >= total // PROMPTS, step


def _groups_in(rollouts, first):
    """How many groups of 4, or of ``first`` in a first stage, these rollouts of a prompt are in a step."""
    if first is None:
        assert rollouts % SAMPLES == 0
        return rollouts // SAMPLES
    numbers = range(rollouts // first + 1)
    return min(
        whole + stopped
        for whole in numbers
        for stopped in numbers
        if SAMPLES * whole + first * stopped == rollouts
    )


def check_draws(folder):
    """Each prompt was drawn with the probability that the posteriors right before its step give it."""
    columns = "step, prompt_id, rollouts, successes, inclusion"
    history = query(folder, f"SELECT {columns} FROM posterior_history ORDER BY step, prompt_id")
    known = {}  # (alpha, beta); all others have the prior
    for step in range(1, last_step(folder) + 1):
        drawn = [row[1:] for row in history if row[0] == step]
        assert [count for _, count, _, _ in drawn] == [SAMPLES] * BATCH
        of_all = np.array([*known.values(), *[(1.0, 1.0)] * (PROMPTS - len(known))])
        # The strategy's defaults: the expected variance, a tenth of the draws even; or all of them after some passes.
        expected = inclusion(expected_variance(*(DISCOUNT * of_all).T), BATCH, 0.1)
        if all(stored == pytest.approx(BATCH / PROMPTS) for *_, stored in drawn):
            expected = np.full(PROMPTS, BATCH / PROMPTS)
        place = {prompt: at for at, prompt in enumerate(known)}
        for prompt, count, successes, stored in drawn:
            assert stored == pytest.approx(expected[place.get(prompt, -1)], rel=1e-9), (
                step,
                prompt,
            )
            alpha, beta = known.get(prompt, (1.0, 1.0))
            known[prompt] = DISCOUNT * alpha + successes, DISCOUNT * beta + count - successes


def check_checkpoint(folder):
    """The model, and what goes with it, are those of the stored step: of the same rollouts and optimizer steps."""
    import torch

    from openrlhf_dbb.saved import generation as saved_generation
    from openrlhf_dbb.saved.checkpoints import newest_whole

    checkpoints = folder / "runs/killed/checkpoints"
    found, _ = newest_whole(checkpoints, *query(folder, "SELECT uuid, last_step FROM dbb_run")[0])
    path = checkpoints / "_actor" / found / "mp_rank_00_model_states.pt"
    states = torch.load(path, map_location="cpu", weights_only=False)
    assert states["global_steps"] == 2 * states["global_step"]
    generated = saved_generation.load(path.parent, states["openrlhf_dbb"])["generated"]
    assert query(
        folder, f"SELECT generated_total FROM steps WHERE step = {states['global_step']}"
    ) == [(generated,)]


def check_end(folder, case, output):
    """The budget is used up and never exceeded, and the summary tells where it went."""
    assert query(folder, "SELECT status FROM runs") == [("finished",)]
    ((detail,),) = query(folder, "SELECT detail FROM dbb_event WHERE kind = 'finish'")
    unused = json.loads(detail).get("unused_rollouts", 0)
    ((generated, trained),) = query(folder, "SELECT sum(generated), sum(trained) FROM steps")
    check_budget(case, generated + unused)
    if not case.filters:
        assert last_step(folder) == case.steps
        assert unused == 0
    left = f", {unused} left over" if unused else ""
    assert f"  rollouts     {generated + unused} generated, {trained} trained on{left}" in output
    # Evaluation has cost no rollouts
    assert ("% before, " in output) == ("--eval.steps" in case.flags)
    events = query(folder, "SELECT count(*) FROM dbb_event WHERE kind = 'roll_back'")
    assert events[0][0] <= 1


def check_budget(case, rollouts):
    if case.budget is None:
        assert rollouts == WHOLE
    else:  # what is left would not have filled a batch
        assert case.budget - A_STEP < rollouts <= case.budget


def check_replays(folder):
    """A prompt's newest 8 rollouts are in the checkpoint, and 4 of them are replayed from its third visit on."""
    visits = Counter()
    expected = defaultdict(lambda: [0, 0])
    for step, prompt in query(
        folder, "SELECT step, prompt_id FROM posterior_history ORDER BY step"
    ):
        visits[prompt] += 1
        expected[step][0] += SAMPLES * (visits[prompt] >= 3)
        expected[step][1] = SAMPLES * sum(min(count, 2) for count in visits.values())
    for step, metrics in query(folder, "SELECT step, metrics FROM steps WHERE metrics IS NOT NULL"):
        logged = json.loads(metrics)
        assert [logged["replay/replayed"], logged["replay/cached"]] == expected[step]
    step, replays = replays_of(folder)
    rows = f"FROM rollouts WHERE step <= {step} ORDER BY step, sample"
    for prompt, cached in replays.items():
        stored = query(folder, f"SELECT prompt_id, reward, length, log_prob {rows}")
        newest = [row[1:] for row in stored if row[0] == prompt][-2 * SAMPLES :]
        found = [(each.reward, len(each.log_probs), float(each.log_probs.sum())) for each in cached]
        assert found == [
            (reward, length, pytest.approx(total, abs=0.02)) for reward, length, total in newest
        ]


def replays_of(folder):
    """The step of the newest checkpoint, and the rollouts of its replay memory, by prompt whose cache is full."""
    from openrlhf_dbb.saved.checkpoints import newest_whole

    saved = folder / "runs/killed/checkpoints"
    tag, _ = newest_whole(saved, *query(folder, "SELECT uuid, last_step FROM dbb_run")[0])
    files = json.loads((saved / "_actor" / tag / "manifest.json").read_text())["files"]
    assert f"_actor/{tag}/replay.npz" in files
    memory = Replay(samples=2 * SAMPLES, cache=2 * SAMPLES).memory("group_norm")
    memory.load(saved / "_actor" / tag)
    prompts = [prompt for (prompt,) in query(folder, "SELECT prompt_id FROM prompts")]
    rows = {prompt: [row.rollout for row in memory.extra_rows([prompt])] for prompt in prompts}
    return int(tag.removeprefix("global_step")), {
        prompt: cached for prompt, cached in rows.items() if cached
    }


def check_loaded_replays(folder, step, before):
    """What was cached at the resumed step, and is so still, is the same bit for bit."""
    visits = Counter(
        row[0]
        for row in query(folder, f"SELECT prompt_id FROM posterior_history WHERE step > {step}")
    )
    last, after = replays_of(folder)
    assert last > step
    checked = 0
    for prompt, cached in after.items():
        gone = SAMPLES * visits[prompt]
        for old, new in zip(before[prompt][gone:], cached[: len(cached) - gone], strict=True):
            checked += 1
            for name in ("tokens", "actions", "log_probs"):
                assert getattr(old, name).tobytes() == getattr(new, name).tobytes()
            assert old.reward == new.reward
    assert checked == SAMPLES * PROMPTS  # every prompt was visited once since


def check_probes(folder):
    """The same prompts are probed at each of their visits."""
    chosen = "SELECT step, prompt_id FROM posterior_history WHERE prompt_id IN (SELECT prompt_id FROM probes)"
    probed = query(folder, "SELECT step, prompt_id FROM probes")
    assert probed and sorted(probed) == sorted(query(folder, chosen))


def check_lateness(folder):
    """The first step is on time, later ones are not; a step's lag is that of its rollouts; no evaluation is missing."""
    late = query(
        folder, "SELECT step, min(lag), max(lag) FROM posterior_history GROUP BY step ORDER BY step"
    )
    assert late[0] == (1, 0, 0) and max(most for _, _, most in late) >= 1
    of_rollouts = query(folder, "SELECT avg(lag) FROM rollouts GROUP BY step ORDER BY step")
    of_steps = query(folder, "SELECT metrics FROM steps ORDER BY step")
    lags = [json.loads(metrics)["async/lag"] for (metrics,) in of_steps]
    assert lags == pytest.approx([lag for (lag,) in of_rollouts], abs=1e-6)
    evaluated = query(folder, "SELECT DISTINCT step FROM dbb_evaluation ORDER BY step")
    assert evaluated == [(step,) for step in range(0, last_step(folder) + 1, 8)]


def check_best(folder):
    """The best model is whole, of a step that was not undone, and by the value that the store has of it."""
    from transformers import AutoModelForCausalLM

    from openrlhf_dbb.saved import best_model

    best = folder / "runs/killed/best"
    if not best.exists():
        return
    found = best_model.read(best)
    AutoModelForCausalLM.from_pretrained(best)
    evaluated = dict(query(folder, "SELECT step, accuracy FROM evaluations WHERE step > 0"))
    # a kill may come between the saving of the model and the storing of the evaluation
    assert evaluated.get(found.step, found.value) == pytest.approx(found.value, rel=1e-12)
    assert found.value >= max(evaluated.values(), default=0)


def check_best_at_end(folder):
    """Every second step was evaluated, and the last; the first of the highest is the best, and the only one left."""
    evaluated = dict(
        query(folder, "SELECT step, accuracy FROM evaluations WHERE step > 0 ORDER BY step")
    )
    last = last_step(folder)
    assert list(evaluated) == sorted({*range(2, last + 1, 2), last})
    (left,) = (folder / "runs/killed/best_models").iterdir()
    assert left == (folder / "runs/killed/best").resolve()
    assert left.name.startswith(f"step{max(evaluated, key=evaluated.get)}-")


@pytest.mark.parametrize(
    "name",
    [name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in CASES],
)
def test_a_run_killed_at_a_random_moment_ends_as_if_it_had_not_been(name, tmp_path):
    case = CASES[name]
    moments = random.Random(name)
    (tmp_path / "exact.py").write_text(REWARD)
    (tmp_path / "agent.py").write_text(AGENT)
    held_out = tiny.prepare(tiny.default_folder()).heldout.read_text().splitlines()[:16]
    (tmp_path / "benchmark.jsonl").write_text("\n".join(held_out))
    with open(tmp_path / "log", "w+") as log:
        arguments = [*COMMAND, *case.flags, "--run_name", "killed"]
        process = subprocess.Popen(arguments, cwd=tmp_path, stdout=log, stderr=log)
        # The checkpoint of step 2 is there
        wait_for_step(tmp_path, moments.randint(3, case.steps - 2), process)
        time.sleep(moments.uniform(0, 0.5))
        assert process.poll() is None, "ended by itself"
        kill_tree(process)
        check_all(tmp_path, case)
        if name == "repo-auto":
            resumed = replays_of(tmp_path)
        arguments = [*COMMAND, *case.flags, *case.resumed, "--resume"]
        ended = subprocess.run(
            arguments, cwd=tmp_path, stdout=log, stderr=log, timeout=1800, check=False
        )
    output = (tmp_path / "log").read_text()[-4000:]
    assert ended.returncode == 0, output
    check_all(tmp_path, case)
    check_end(tmp_path, case, output)
    if name == "dapo-auto":
        check_best_at_end(tmp_path)
    if name == "async-dbb":
        check_lateness(tmp_path)
    if name == "repo-auto":
        check_loaded_replays(tmp_path, *resumed)
    if "--probe.fraction" in case.flags:
        check_probes(tmp_path)

"""verl's trainers with our advantages: against verl's own, and by hand, through a real TransferQueue."""

import contextlib
import json
import math
import os
import re
import uuid
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

pytest.importorskip("verl", reason="needs verl")

import ray
import torch
import transfer_queue as tq
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from tensordict import TensorDict
from trainings import EACH, check_questions, in_ones_own_loop
from trainings import rows as query
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.reward import get_custom_reward_fn
from verl.trainer.ppo.v1 import PPOTrainerSync
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from openrlhf_dbb import storage
from openrlhf_dbb.integrations import verl as integration
from openrlhf_dbb.integrations.shared import Settings
from openrlhf_dbb.integrations.verl import TRAINERS, keys_of, read
from openrlhf_dbb.rewards import for_verl
from openrlhf_dbb.tiny import build_tokenizer

EPSILON = 1e-6  # what verl adds to a standard deviation: core_algos.compute_grpo_outcome_advantage
TEXTS = ["1+1=", "2+2=", "3+3="]
LABELS = ["2", "4", "6"]
EOS = 14


@pytest.fixture(scope="module")
def queue(tmp_path_factory):
    """TransferQueue with its own actors, in a Ray of its own."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        "local",
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=100_000_000,
        log_to_driver=False,
    )
    config = compose_config()
    config.transfer_queue.enable = True
    config.transfer_queue.backend.SimpleStorage.num_data_storage_units = 1
    tq.init(config.transfer_queue)
    yield
    tq.close()
    ray.shutdown()


def compose_config(*overrides):
    """verl's configuration, as its command makes it."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=list(overrides))


def posterior_config(folder, *overrides, estimator="point"):
    return compose_config(
        "algorithm.adv_estimator=posterior",
        f"+algorithm.posterior.estimator={estimator}",
        f"+algorithm.posterior.store=sqlite:///{folder}/openrlhf_dbb.db",
        "trainer.experiment_name=demo",
        "actor_rollout_ref.rollout.n=4",
        f"trainer.default_local_dir={folder}/checkpoints",
        *overrides,
    )


def message(text):
    return [{"role": "user", "content": text}]


def row_of(text, label):
    return {"raw_prompt": message(text), "reward_model": {"style": "rule", "ground_truth": label}}


DATA = list(map(row_of, TEXTS, LABELS))  # as verl's trainer has it: rows by number


def trainer(config, *, cls=None):
    """A trainer without its workers: what verl starts after the constructor, on GPUs, is left out.

    Args:
        cls: None: ours of the mode that the configuration has.
    """
    made = (cls or TRAINERS[config.trainer.v1.trainer_mode])(config)
    made.train_dataset = DATA
    made.tokenizer = build_tokenizer()
    made.replay_buffer.poll_interval = 0
    made._load_checkpoint()  # verl's, by which our run is opened
    return made


def column(batch, name):
    """A column of a batch for the agent loop, which wraps values that are not lists."""
    return [getattr(value, "data", value) for value in batch[name]]


def prompts_of(batch):
    """Text and label of each prompt of a batch for the agent loop."""
    texts = [shown[0]["content"] for shown in column(batch, "raw_prompt")]
    labels = [rewarding["ground_truth"] for rewarding in column(batch, "reward_model")]
    return list(zip(texts, labels, strict=True))


def finish(uid, partition="train"):
    """Say as the agent loop does that a prompt has all of its rollouts."""
    tq.kv_batch_put(keys=[uid], partition_id=partition, fields=None, tags=[{"status": "finished"}])


def batch_of(
    groups,
    *,
    lengths=(3, 5, 2, 4),
    trajectories=1,
    masked=(),
    uid=None,
    partition="train",
    source="test",
    judge=None,
):
    """What the agent loop leaves in TransferQueue: rollouts of (prompt, label, rewards), each group with a uid.

    Args:
        trajectories: of each rollout; all carry its reward, as verl has it, and only the last one counts.
        uid: of a single group; None: new ones.
        judge: the reward function; None: it returned the rewards alone.
        masked: rollouts, counted over all groups, without a token that the model generated.
    """
    keys = []
    fields = []
    tags = []
    rollout = 0
    of_group = uid
    for text, label, rewards in groups:
        uid = of_group or str(uuid.uuid4())
        for session, reward in enumerate(rewards):
            length = lengths[rollout % len(lengths)]
            for index in range(trajectories):
                output = AgentLoopOutput(
                    prompt_ids=list(range(4)),
                    response_ids=[rollout % 10] * length,  # digits
                    response_mask=[0 if rollout in masked else 1] * length,
                    response_logprobs=[-1.0] * length,
                    reward_score=judge(reward)["score"] if judge else reward,
                    extra_fields={"reward_extra_info": judge(reward)} if judge else {},
                    num_turns=2,
                    metrics=AgentLoopMetrics(),
                )
                about = {"uid": uid, "session_id": session, "data_source": source}
                field = output.as_dict() | row_of(text, label) | about
                field["input_ids"] = torch.cat([field["prompts"], field["responses"]])
                field["position_ids"] = torch.arange(4 + length)
                field["old_log_probs"] = torch.full((length,), -1.0 - rollout / 8)
                field["ref_log_prob"] = torch.full((length,), -1.0)
                keys.append(f"{uid}_{session}_{index}")
                fields.append(field)
                tags.append(
                    {
                        "status": "success",
                        "prompt_len": 4,
                        "response_len": length,
                        "seq_len": 4 + length,
                    }
                )
            rollout += 1
    return tq.kv_batch_put(
        keys=keys, partition_id=partition, fields=list_of_dict_to_tensordict(fields), tags=tags
    )


def firsts(batch):
    """Each row's advantage; the same at all of its tokens."""
    data = tq.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=["advantages"])
    rows = [row.tolist() for row in data["advantages"].unbind(0)]
    assert all(len(set(row)) == 1 for row in rows)
    return np.array([row[0] for row in rows])


def advantages_of(made, batch, metrics=None):
    """Each row's advantage after one step of a trainer, whose run is closed then."""
    with made.posteriors:
        return firsts(made._compute_advantage(batch, {} if metrics is None else metrics))


def verls_own(batch, *overrides):
    config = compose_config("algorithm.adv_estimator=grpo", *overrides)
    return firsts(trainer(config, cls=PPOTrainerSync)._compute_advantage(batch, {}))


CENTERED = "algorithm.norm_adv_by_std_in_grpo=False"
MIXED = [(TEXTS[0], LABELS[0], [1.0, 0.0, 0.0, 1.0]), (TEXTS[1], LABELS[1], [0.0, 0.0, 0.0, 1.0]),
         (TEXTS[2], LABELS[2], [1.0, 1.0, 1.0])]  # fmt: skip


@pytest.mark.parametrize("normalized", [True, False])
def test_point_gives_verls_own_grpo(queue, tmp_path, normalized):
    batch = batch_of(MIXED)
    metrics = {}
    override = f"algorithm.norm_adv_by_std_in_grpo={normalized}"
    theirs = verls_own(batch, override)
    ours = advantages_of(trainer(posterior_config(tmp_path, override)), batch, metrics)
    if normalized:  # verl divides by std + EPSILON, we by std
        std = np.repeat([np.std(rewards, ddof=1) for _, _, rewards in MIXED], [4, 4, 3])
        theirs = theirs * (std + EPSILON) / np.where(std > 0, std, 1)
    assert ours == pytest.approx(theirs, abs=2e-7)
    assert metrics["estimator/zero_variance"] == pytest.approx(3 / 11)


def test_dbb_by_hand_and_each_group_once(queue, tmp_path):
    config = posterior_config(
        tmp_path, "+algorithm.posterior.parameters.discount=0.5", estimator="dbb"
    )
    ours = trainer(config)
    with ours.posteriors:
        first = firsts(
            ours._compute_advantage(batch_of([(TEXTS[0], LABELS[0], [1.0, 1.0, 1.0, 1.0])]), {})
        )
        second = firsts(ours._compute_advantage(batch_of([(TEXTS[0], LABELS[0], [0.0, 1.0])]), {}))
    # alpha, beta = 0.5 + 4, 0.5: (1 - 0.9) / sqrt(0.09); then 2.25 + 1, 0.25 + 1
    assert first == pytest.approx([1 / 3] * 4, rel=1e-6)
    mean = 3.25 / 4.5
    deviation = math.sqrt(mean * (1 - mean))
    assert second == pytest.approx([-mean / deviation, (1 - mean) / deviation], rel=1e-6)
    sql = """SELECT step, prompt, label, rollouts, successes, alpha, beta
             FROM posterior_history JOIN prompts USING (prompt_id)"""
    assert query(tmp_path, sql) == [
        (1, "1+1=", "2", 4, 4.0, 4.5, 0.5),
        (2, "1+1=", "2", 2, 1.0, 3.25, 1.25),
    ]
    written = "SELECT step, sample, score, length, text FROM rollouts ORDER BY step, sample"
    assert query(tmp_path, written) == [
        (1, 0, 1.0, 3, "000"), (1, 1, 1.0, 5, "11111"), (1, 2, 1.0, 2, "22"), (1, 3, 1.0, 4, "3333"),
        (2, 0, 0.0, 3, "000"), (2, 1, 1.0, 5, "11111"),
    ]  # fmt: skip
    # 3 + 5 + 2 + 4 and 3 + 5 tokens
    counts = query(tmp_path, "SELECT step, generated, trained, generated_tokens FROM steps")
    assert counts == [(1, 4, 4, 14), (2, 2, 2, 8)]


@pytest.mark.parametrize(("estimator", "form"), EACH)
def test_every_estimator_and_form_gives_what_it_gives_in_ones_own_loop(
    queue, tmp_path, estimator, form
):
    prompts = [text for text, _, rewards in MIXED for _ in rewards]
    labels = [label for _, label, rewards in MIXED for _ in rewards]
    rewards_R = [reward for _, _, rewards in MIXED for reward in rewards]
    tokens = [3, 5, 2, 4, 3, 5, 2, 4, 3, 5, 2]
    config = posterior_config(tmp_path, f"+algorithm.posterior.form={form}", estimator=estimator)
    ours = advantages_of(trainer(config), batch_of(MIXED))
    expected = in_ones_own_loop(tmp_path, estimator, form, prompts, labels, rewards_R, tokens)
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


def test_explain_and_the_page_show_a_step(queue, tmp_path, capsys):
    ours = advantages_of(trainer(posterior_config(tmp_path, estimator="dbb")), batch_of(MIXED))
    check_questions(tmp_path, capsys, "demo", TEXTS[0], ours[:4])


def test_a_warm_start_begins_with_another_run_s_posteriors(queue, tmp_path):
    config = posterior_config(
        tmp_path, "+algorithm.posterior.parameters.discount=1", estimator="dbb"
    )
    advantages_of(trainer(config), batch_of([(TEXTS[0], LABELS[0], [1.0, 1.0, 1.0, 0.0])]))
    config.trainer.experiment_name = "later"
    OmegaConf.update(config, "algorithm.posterior.warm_start", "demo", force_add=True)
    later = trainer(config)
    assert later.posteriors.warm_start.matched == 1
    advantages_of(later, batch_of([(TEXTS[0], LABELS[0], [0.0, 0.0])]))
    # 1 + 3 and 1 + 1 of the first run, and two failures more
    assert query(tmp_path, "SELECT alpha, beta FROM posterior_history WHERE run_id = 2") == [
        (4.0, 4.0)
    ]


def test_thinned_advantages_are_trained_on_and_those_of_the_form_are_stored(queue, tmp_path):
    config = posterior_config(tmp_path, "+algorithm.posterior.thin=2", estimator="dbb")
    ours = advantages_of(trainer(config), batch_of(MIXED))
    assert set(np.abs(ours)) == {0.0, 2.0}
    again = tmp_path / "again"
    again.mkdir()
    expected = advantages_of(trainer(posterior_config(again, estimator="dbb")), batch_of(MIXED))
    kept = query(
        tmp_path,
        "SELECT advantage FROM rollouts JOIN prompts USING (prompt_id) ORDER BY prompt, sample",
    )
    assert [value for (value,) in kept] == pytest.approx(expected, abs=1e-6)


DRAWS = [
    "+algorithm.posterior.strategy=posterior",
    "data.train_batch_size=2",
    "actor_rollout_ref.rollout.n=4",
]


GIVEN = ([1.0, 1.0, 1.0, 1.0], [0.0, 1.0, 0.0, 0.0])


@pytest.fixture(scope="module")
def two_drawn_steps(queue, tmp_path_factory):
    """Two steps of two of three prompts each, whose groups all get the rewards of ``GIVEN``."""
    folder = tmp_path_factory.mktemp("drawn")
    form = "+algorithm.posterior.form=dr_grpo"
    ours = trainer(posterior_config(folder, *DRAWS, form, estimator="dbb"))
    steps = []
    with ours.posteriors:
        for rewards in GIVEN:
            asked = ours._next_train_batch()  # verl's, by which a step begins
            drawn = prompts_of(asked)
            batch = batch_of([(*prompt, rewards) for prompt in drawn])
            advantages = firsts(ours._compute_advantage(batch, {}))
            steps.append(SimpleNamespace(uids=set(asked["uid"]), drawn=drawn, of_rows=advantages))
    sql = """SELECT step, prompt, inclusion, mean
             FROM posterior_history JOIN prompts USING (prompt_id)"""
    stored = {(step, prompt): values for step, prompt, *values in query(folder, sql)}
    return SimpleNamespace(folder=folder, steps=steps, stored=stored)


def test_the_strategy_draws_what_verl_generates_for(two_drawn_steps):
    for step in two_drawn_steps.steps:
        assert len(step.drawn) == len(set(step.drawn)) == 2
        assert len(step.uids) == 2
    stored = two_drawn_steps.stored.keys()
    for number, step in enumerate(two_drawn_steps.steps, start=1):
        assert {text for text, _ in step.drawn} == {text for of, text in stored if of == number}


def test_the_first_draws_are_even_and_the_next_follow_what_the_prompts_have_shown(two_drawn_steps):
    inclusions = {1: [], 2: []}
    for (step, _), (inclusion, _) in two_drawn_steps.stored.items():
        inclusions[step].append(inclusion)
    assert inclusions[1] == pytest.approx([2 / 3] * 2)
    assert len(set(inclusions[2])) == 2


def test_advantages_of_drawn_prompts_are_weighted_by_their_chances(two_drawn_steps):
    second = two_drawn_steps.steps[1]
    expected = []
    for prompt, _ in second.drawn:
        inclusion, mean = two_drawn_steps.stored[2, prompt]
        expected += [(reward - mean) * 2 / 3 / inclusion for reward in GIVEN[1]]
    assert second.of_rows == pytest.approx(expected, rel=1e-6)


def test_the_form_is_stored_with_the_run_and_the_step(two_drawn_steps):
    [[config]] = query(two_drawn_steps.folder, "SELECT config FROM dbb_run")
    assert json.loads(config)["algorithm"]["posterior"]["form"] == "dr_grpo"
    forms = query(two_drawn_steps.folder, "SELECT DISTINCT form FROM dbb_step")
    assert forms == [("dr_grpo",)]


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
def test_a_group_that_verl_filters_is_observed_and_not_trained_on(queue, tmp_path, mode):
    filtering = ["algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=reward"]
    config = posterior_config(
        tmp_path, f"trainer.v1.trainer_mode={mode}", *filtering, estimator="dbb"
    )
    ours = trainer(config)
    buffer = ours.replay_buffer
    buffer.refill_fn = lambda count: None
    made = batch_of([(TEXTS[0], LABELS[0], [1.0, 1.0, 1.0]), (TEXTS[1], LABELS[1], [1.0, 0.0])])
    groups = list(dict.fromkeys(key.split("_")[0] for key in made.keys))
    about = {"is_prompt": True, "status": "finished", "global_steps": 1}
    tq.kv_batch_put(keys=groups, partition_id="train", fields=None, tags=[about] * 2)
    batch, _ = buffer.sample(global_steps=1, partition_id="train", batch_size=1)
    assert {key.split("_")[0] for key in batch.keys} == {groups[1]}
    assert advantages_of(ours, batch) == pytest.approx([1, -1])  # alpha = beta = 0.5 + 1
    sql = "SELECT prompt, rollouts, successes, alpha, beta FROM posterior_history JOIN prompts USING (prompt_id)"
    assert sorted(query(tmp_path, sql)) == [("1+1=", 3, 3.0, 3.5, 0.5), ("2+2=", 2, 1.0, 1.5, 1.5)]
    # 3 + 5 + 2 tokens of the filtered group, then 4 + 3
    assert query(tmp_path, "SELECT generated, trained, generated_tokens FROM steps") == [(5, 2, 17)]


def test_padding_is_not_a_rollout(queue, tmp_path):
    batch = upsample_batch_to_divisible_size(
        batch_of([(TEXTS[0], LABELS[0], [1.0, 0.0, 0.0])]), 4, EOS
    )
    batch.reorder([3, 0, 2, 1])  # as _balance_batch does
    entropy = TensorDict({"entropy": torch.zeros(4)}, batch_size=4)
    # As _compute_old_log_prob does
    batch = tq.kv_batch_put(keys=batch.keys, partition_id="train", fields=entropy)
    advantages = advantages_of(trainer(posterior_config(tmp_path, CENTERED)), batch)
    assert advantages == pytest.approx([0, 2 / 3, -1 / 3, -1 / 3])
    assert query(tmp_path, "SELECT rollouts, successes FROM posterior_history") == [(3, 1.0)]


def test_several_trajectories_of_a_rollout_count_once(queue, tmp_path):
    batch = batch_of([(TEXTS[0], LABELS[0], [1.0, 0.0, 0.0, 0.0])], trajectories=3)
    theirs = verls_own(batch, CENTERED)
    advantages = advantages_of(trainer(posterior_config(tmp_path, CENTERED)), batch)
    assert advantages.tolist() == theirs.tolist() == [0.75] * 3 + [-0.25] * 9
    assert query(tmp_path, "SELECT rollouts FROM posterior_history") == [(4,)]
    assert query(tmp_path, "SELECT generated_tokens FROM steps") == [(3 * (3 + 5 + 2 + 4),)]


def test_kl_in_reward_is_optimized_and_the_posterior_sees_the_verifier(queue, tmp_path):
    kl = ["algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0.1"]
    ours = trainer(posterior_config(tmp_path, *kl, CENTERED, estimator="dbb"))
    advantages = advantages_of(ours, batch_of([(TEXTS[0], LABELS[0], [1.0, 1.0])], lengths=(3, 5)))
    # log-probs -1 and -1.125 against -1: KL 0 and -0.125 at each of 5 tokens. alpha, beta = 2.5, 0.5.
    # The rewards are 1 and 1 + 0.1 * 0.125 * 5 = 1.0625; both lose p, and then the mean, 1.03125 - p.
    assert advantages == pytest.approx([-0.03125, 0.03125], abs=1e-6)
    assert query(tmp_path, "SELECT rollouts, successes, alpha, beta FROM posterior_history") == [
        (2, 2.0, 2.5, 0.5)
    ]


def test_missing_and_masked_rollouts_get_no_advantage_and_are_not_successes(queue, tmp_path):
    """The second rollout's reward is missing; the fourth has no token that is trained on."""
    metrics = {}
    batch = batch_of([(TEXTS[0], LABELS[0], [1.0, float("nan"), 0.0, 0.5])], masked=[3])
    real = "+algorithm.posterior.parameters.memory=gaussian"
    config = posterior_config(tmp_path, CENTERED, real)
    advantages = advantages_of(trainer(config), batch, metrics)
    assert advantages.tolist() == [0.5, 0.0, -0.5, 0.0]
    assert metrics["estimator/missing"] == pytest.approx(1 / 3)  # of the three that are trained on
    assert query(tmp_path, "SELECT generated, trained FROM steps") == [(4, 3)]


def test_without_our_trainer_the_estimator_refuses():
    with pytest.raises(
        ValueError,
        match=r"adv_estimator=posterior .*trainer.use_v1=True .*trainer_mode sync",
    ):
        integration.advantages(torch.zeros(2, 3), torch.ones(2, 3))


def test_what_the_verifier_read_is_stored(queue, tmp_path):
    """By our own verifier, and by one that tells nothing of some."""
    said = {1.0: "The answer is 2.", 0.0: "What do I know?", 0.5: "The answer is 3."}
    judge = lambda reward: for_verl.math_answer("sums", said[reward], "2")  # noqa: E731
    metrics = {}
    advantages_of(trainer(posterior_config(tmp_path)), batch_of([(TEXTS[0], LABELS[0], [1.0, 0.0, 0.5])], judge=judge),
                  metrics)  # fmt: skip
    read = query(tmp_path, "SELECT score, read FROM rollouts ORDER BY sample")
    assert [score for score, _ in read] == [1.0, 0.0, 0.0]
    assert read[0][1] == "2" and read[1][1].startswith("no answer") and read[2][1] == "3"
    assert metrics["rollout/unreadable"] == pytest.approx(1 / 3)


def test_our_verifiers_return_to_verl_a_score_and_what_they_read():
    assert for_verl.math_answer("x", "7", "7", {"question": "3+4="}) == {
        "score": 1.0,
        "acc": 1.0,
        "read": "7",
    }


def test_verl_tells_our_verifiers_which_thought_the_chat_template_opens():
    """By the flag of docs/verl.md."""
    key = "reward.custom_reward_function"
    named = [f"{key}.path=pkg://openrlhf_dbb.rewards.for_verl", f"{key}.name=math_answer"]
    plain = get_custom_reward_fn(compose_config(*named))
    opened = f'+{key}.reward_kwargs.opened="<think>"'
    told = get_custom_reward_fn(compose_config(*named, opened))
    assert plain("x", "so it is 7", "7")["score"] == 1.0
    cut = told("x", "so it is 7", "7")
    assert (cut["score"], cut["read"]) == (0.0, "no answer: the thought does not end")
    assert told("x", "3 + 4.</think>So it is 7", "7")["score"] == 1.0


@pytest.mark.parametrize(
    ("ours", "verifier"), [("math_answer", "mathematics"), ("reasoning_gym", "tasks")]
)
def test_a_score_that_nobody_could_verify_is_nan_for_verl(monkeypatch, ours, verifier):
    missing = {"rewards": [None], "scores": [None], "read": [None]}
    monkeypatch.setattr(getattr(for_verl, verifier), "reward_func", lambda *_: missing)
    found = getattr(for_verl, ours)("x", "7", "7")
    assert math.isnan(found["score"])
    assert math.isnan(found["acc"])
    assert found["read"] == ""


# Checkpoints


class Saving(PPOTrainer):
    """verl's part of saving and loading, reduced to the file that says which checkpoint is the newest."""

    def _save_checkpoint(self):
        folder = Path(self.config.trainer.default_local_dir)
        (folder / "latest_checkpointed_iteration.txt").write_text(str(self.global_steps))

    def _load_checkpoint(self):
        latest = Path(self.config.trainer.default_local_dir) / "latest_checkpointed_iteration.txt"
        self.global_steps = int(latest.read_text()) if latest.exists() else 0


class Ours(integration.WithPosteriors, Saving, PPOTrainerSync):
    pass


def started(config):
    """A trainer that has loaded what there is to load."""
    return trainer(config, cls=Ours)


def step(made, rewards):
    made.global_steps += 1
    made.posteriors.observe(
        made.posteriors.step + 1, [TEXTS[0]] * len(rewards), [LABELS[0]] * len(rewards), rewards
    )


def test_a_run_that_died_before_its_first_checkpoint_starts_over(tmp_path):
    config = posterior_config(tmp_path, estimator="dbb")
    made = started(config)
    with made.posteriors:
        step(made, [1, 1])
    with started(config).posteriors as posteriors:
        assert posteriors.step == 0


def test_a_resume_goes_back_to_the_checkpoints_step(tmp_path):
    config = posterior_config(tmp_path, *DRAWS, estimator="dbb")
    made = started(config)
    with made.posteriors:
        step(made, [1, 1])
        made._next_train_batch()
        step(made, [0, 1])
        step(made, [0, 0])  # separate_async: two steps of ours in one of verl's
        made.global_steps = 2
        made._save_checkpoint()
        drawn = [prompts_of(made._next_train_batch()) for _ in range(4)]
        step(made, [1, 1])
    made = started(config)
    with made.posteriors as posteriors:
        assert (made.global_steps, posteriors.step) == (2, 3)
        assert drawn == [prompts_of(made._next_train_batch()) for _ in range(4)]
    assert query(tmp_path, "SELECT max(step) FROM posterior_history") == [(3,)]


def test_a_checkpoint_without_posteriors_is_refused(tmp_path):
    config = posterior_config(tmp_path)
    made = started(config)
    with made.posteriors:
        step(made, [1, 1])
        made._save_checkpoint()
    (Path(config.trainer.default_local_dir) / "global_step_1" / "posteriors.json").unlink()
    with pytest.raises(ValueError, match=r"global_step_1.* not saved with posteriors"):
        started(config)


def test_without_a_resume_a_taken_name_is_refused(tmp_path):
    config = posterior_config(tmp_path, "trainer.resume_mode=disable")
    started(config).posteriors.close()
    with pytest.raises(storage.StoreError, match=r"'demo' .*run_name.*trainer.resume_mode"):
        started(config)


@pytest.mark.parametrize("rows", [DATA[::-1], DATA[:-1], [*DATA, row_of("9+9=", "18")]])
def test_a_resume_with_other_data_is_refused(tmp_path, monkeypatch, rows):
    config = posterior_config(tmp_path)
    started(config).posteriors.close()
    monkeypatch.setitem(globals(), "DATA", rows)
    with pytest.raises(ValueError, match=r"other prompts and labels.* order"):
        started(config)
    monkeypatch.undo()
    started(config).posteriors.close()


@pytest.mark.parametrize(
    ("error", "status"), [(None, "finished"), (RuntimeError("out of memory"), "running")]
)
def test_the_end_of_fit_finishes_the_run(tmp_path, monkeypatch, error, status):
    made = started(posterior_config(tmp_path))
    monkeypatch.setattr(PPOTrainer, "fit", Mock(side_effect=error))
    with pytest.raises(RuntimeError) if error else contextlib.nullcontext():
        made.fit(None)
    assert query(tmp_path, "SELECT status FROM runs") == [(status,)]


def test_validation_alone_opens_no_run(tmp_path):
    assert started(posterior_config(tmp_path, "trainer.val_only=True")).posteriors is None
    assert not (tmp_path / "openrlhf_dbb.db").exists()


class Answering:
    """An agent loop that answers each prompt at once, with the rewards that come next."""

    def __init__(self, rewards, partition):
        self.rewards = iter(rewards)
        self.partition = partition
        self.asked = []
        self.uids = []

    def generate_sequences(self, batch):
        prompts = prompts_of(batch)
        columns = [column(batch, "uid"), prompts, column(batch, "data_source")]
        for uid, (text, label), source in zip(*columns, strict=True):
            self.asked.append(text)
            self.uids.append(uid)
            group = (text, label, next(self.rewards))
            batch_of([group], uid=uid, partition=self.partition, source=source)
            finish(uid, self.partition)
        if "__rollout_n__" in batch.keys():  # noqa: SIM118
            assert column(batch, "__rollout_n__") == [2] * len(prompts)


def test_a_validation_is_stored_by_prompt(queue, tmp_path):
    config = posterior_config(tmp_path, "actor_rollout_ref.rollout.val_kwargs.n=2", "data.max_response_length=5",
                              estimator="dbb")  # fmt: skip
    ours = trainer(config)
    ours.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=[])
    rows = [*DATA, row_of("1+1=", "2")]  # one prompt twice
    sources = ["a", "b", "a", "a"]
    rows = [row | {"data_source": source} for row, source in zip(rows, sources, strict=True)]
    ours.val_dataloader = [integration.collate_fn(rows)]
    for scores in ([1.0, 0.0], [0.0, 0.0], [1.0], [1.0, 1.0]), ([1.0, 1.0],) * 4:
        ours.agent_loop_manager = Answering(scores, "val")
        with_means = ours._validate()
        if ours.posteriors.step == 0:
            advantages = ours._compute_advantage(batch_of(MIXED), {})
    assert advantages is not None
    assert with_means["val-core/b/reward/mean@2"] == 1
    ours.posteriors.close()
    found = """SELECT step, benchmark, prompt, samples, verified, successes, tokens, truncated
               FROM evaluation_results JOIN prompts USING (prompt_id) ORDER BY step, benchmark, prompt"""
    # responses of 3 and 5 tokens; the second is cut
    assert query(tmp_path, found) == [
        (0, "a", "1+1=", 2, 2, 1.0, 8, 1), (0, "a", "3+3=", 2, 1, 1.0, 3, 0), (0, "b", "2+2=", 2, 2, 0.0, 8, 1),
        (1, "a", "1+1=", 2, 2, 2.0, 8, 1), (1, "a", "3+3=", 2, 2, 2.0, 8, 1), (1, "b", "2+2=", 2, 2, 2.0, 8, 1),
    ]  # fmt: skip
    assert query(tmp_path, "SELECT count(*) FROM posterior_history") == [(3,)]


SCORES = {TEXTS[0]: [1.0, 0.0, 1.0, 0.0], TEXTS[1]: [1.0] * 4, TEXTS[2]: [0.0, 1.0, 1.0, 1.0]}


class BySession:
    """An agent loop that answers each prompt at once, by its number of rollouts so far."""

    def __init__(self):
        self.asked = []
        self.begun = dict.fromkeys(TEXTS, 0)

    def generate_sequences(self, batch):
        columns = [column(batch, "uid"), prompts_of(batch), column(batch, "__rollout_n__")]
        for uid, (text, label), rollouts in zip(*columns, strict=True):
            begun = self.begun[text] % 4
            self.begun[text] += rollouts
            self.asked.append((text, rollouts))
            batch_of([(text, label, SCORES[text][begun : begun + rollouts])], uid=uid)
            finish(uid)


def queued():
    """Keys of what is left to train on in TransferQueue."""
    return set((tq.kv_list() or {}).get("train", {}))


def filled_step(ours):
    """What a trainer trains on, whose strategy fills its batches, and the advantages."""
    assert ours.prepare_step() == {}
    batch, _ = ours.replay_buffer.sample(global_steps=0, partition_id="train", batch_size=2)
    keys = integration.Batch.read(batch).keys_S
    advantages = firsts(ours._compute_advantage(batch, {}))
    tq.kv_clear(keys=batch.keys, partition_id="train")
    ours.global_steps += 1
    return keys, advantages


@pytest.fixture(scope="module", params=["dynamic", "greso", "two_stage"])
def filled(request, queue, tmp_path_factory):
    """Steps 1, 2 and 3, and then 2 and 3 again from the checkpoint of the first: two of three prompts each."""
    folder = tmp_path_factory.mktemp("filled")
    overrides = [f"+algorithm.posterior.strategy={request.param}", "data.train_batch_size=2"]
    config = posterior_config(folder, *overrides, estimator="dbb")
    before = queued()
    steps = []
    first = started(config)
    first.agent_loop_manager = BySession()
    with first.posteriors:
        steps.append(filled_step(first))
        first._save_checkpoint()
        steps += [filled_step(first) for _ in range(2)]
    resumed = started(config)
    resumed.agent_loop_manager = BySession()
    with resumed.posteriors:
        steps += [filled_step(resumed) for _ in range(2)]
    return SimpleNamespace(
        folder=folder,
        strategy=request.param,
        steps=steps,
        asked=resumed.agent_loop_manager.asked,
        left=queued() - before,
    )


def test_a_strategy_fills_the_batches(filled):
    """All rollouts of the second prompt are right."""
    for keys, advantages in filled.steps:
        assert len(keys) == len(advantages) == 8
        assert {text for text, _ in keys} == {TEXTS[0], TEXTS[2]}
        assert np.isfinite(advantages).all()
    assert filled.left == set()  # what the strategy has set aside is gone too


def test_a_strategy_fills_the_same_batches_after_a_resume(filled):
    order = [keys for keys, _ in filled.steps]
    assert order[1:3] == order[3:]


def test_what_a_strategy_generates_is_observed_and_what_it_fills_is_trained_on(filled):
    [[generated, trained]] = query(filled.folder, "SELECT sum(generated), sum(trained) FROM steps")
    assert generated >= sum(rollouts for _, rollouts in filled.asked)
    assert trained == 3 * 8
    if filled.strategy == "two_stage":
        assert {rollouts for _, rollouts in filled.asked} == {2}
        assert (TEXTS[1], 2) in filled.asked


@pytest.mark.parametrize("strategy", ["allocate", "two_stage"])
def test_weights_of_filled_batches_are_of_their_prompts(queue, tmp_path, monkeypatch, strategy):
    """N / n of a group of n, and 2 / (3 inclusion) of a prompt that the posterior draws."""
    for text, scores in list(SCORES.items()):
        monkeypatch.setitem(SCORES, text, scores * 4)
    overrides = [
        f"+algorithm.posterior.strategy={strategy}", "+algorithm.posterior.form=dr_grpo",
        "data.train_batch_size=2",
    ]  # fmt: skip
    if strategy == "two_stage":
        overrides.append("+algorithm.posterior.strategy_parameters.draw=posterior")
    ours = trainer(posterior_config(tmp_path, *overrides, estimator="dbb"))
    ours.trainer_mode = "sync"
    ours.replay_buffer = ours._build_replay_buffer()
    ours.replay_buffer.poll_interval = 0
    ours.agent_loop_manager = BySession()
    found, steps = [], 5
    with ours.posteriors:
        for _ in range(steps):
            batch, _ = ours.replay_buffer.sample(global_steps=0, partition_id="train", batch_size=2)
            read_S = integration.Batch.read(batch)
            assert len(read_S.keys_S) == 8
            advantages = firsts(ours._compute_advantage(batch, {})).tolist()
            texts = [text for text, _ in read_S.keys_S]
            found.append(list(zip(texts, read_S.scores_S.tolist(), advantages, strict=True)))
            tq.kv_clear(keys=batch.keys, partition_id="train")
    sql = """SELECT step, prompt, mean, rollouts, inclusion
             FROM posterior_history JOIN prompts USING (prompt_id)"""
    stored = {(step, prompt): values for step, prompt, *values in query(tmp_path, sql)}
    weights = set()
    for step, rows in enumerate(found, start=1):
        for text, score, advantage in rows:
            mean, rollouts, inclusion = stored[step, text]
            weight = 4 / rollouts if strategy == "allocate" else 2 / (3 * inclusion)
            weights.add(round(weight, 6))
            assert advantage == pytest.approx((score - mean) * weight, rel=1e-5, abs=1e-6)
    assert len(weights) > 1


def test_chosen_prompts_are_probed_and_probes_train_nothing(queue, tmp_path):
    probing = ["+algorithm.posterior.probe_fraction=0.5", "+algorithm.posterior.probe_samples=2"]
    config = posterior_config(tmp_path, *probing, "data.train_batch_size=3", estimator="dbb")
    ours = trainer(config)
    rows = [row | {"data_source": "test"} for row in DATA]
    ours.train_dataset = rows
    ours.train_dataloader_it = iter([integration.collate_fn(rows)])
    of_step = [[1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]
    loop = Answering(of_step + [[1.0, 0.0]] * 3, "train")
    ours.agent_loop_manager = loop
    ours._submit_batch_to_rollout(ours._next_train_batch())
    batch, _ = ours.replay_buffer.sample(global_steps=0, partition_id="train", batch_size=3)
    metrics = {}
    assert len(advantages_of(ours, batch, metrics)) == 9
    probed = sorted(loop.asked[3:])
    assert len(probed) == len(set(probed)) == metrics["probe/groups"]
    assert 0 < len(probed) < 3
    sql = """SELECT prompt, samples, successes
             FROM probes JOIN prompts USING (prompt_id) ORDER BY prompt"""
    assert query(tmp_path, sql) == [(text, 2, 1.0) for text in probed]
    assert query(tmp_path, "SELECT sum(rollouts) FROM posterior_history") == [(9,)]
    assert {key.split("_")[0] for key in queued()}.isdisjoint(loop.uids[3:])


def test_a_strategy_that_judges_fills_whole_batches_alone():
    two_stage = ["algorithm.adv_estimator=posterior", "actor_rollout_ref.rollout.n=4",
                 "+algorithm.posterior.strategy=two_stage"]  # fmt: skip
    assert read(compose_config(*two_stage)).strategy == "two_stage"
    for other in ("trainer.v1.trainer_mode=colocate_async", "algorithm.filter_groups.enable=True"):
        with pytest.raises(ValueError, match=r"'two_stage' .*use \S*trainer_mode=sync"):
            read(compose_config(*two_stage, other))


def test_probes_of_batches_that_verl_changes_are_refused():
    probing = ["algorithm.adv_estimator=posterior", "actor_rollout_ref.rollout.n=4",
               "+algorithm.posterior.probe_fraction=0.1"]  # fmt: skip
    assert read(compose_config(*probing)).probe_fraction == 0.1
    for other in ("trainer.v1.trainer_mode=colocate_async", "algorithm.filter_groups.enable=True"):
        with pytest.raises(ValueError, match=r"probe_fraction .*use \S*trainer_mode=sync"):
            read(compose_config(*probing, other))


# Settings, prompts and labels


def test_a_sampler_whose_groups_cannot_be_observed_in_their_step_is_refused():
    posterior = ["algorithm.adv_estimator=posterior", "actor_rollout_ref.rollout.n=4"]
    filtering = [
        "algorithm.filter_groups.enable=True",
        "trainer.v1.sampler.custom_sampler.path=mine.py",
    ]
    with pytest.raises(ValueError, match=r"custom_sampler.path=\S+ .*filter_groups.enable=False"):
        read(compose_config(*posterior, *filtering))
    with pytest.raises(ValueError, match=r"'posterior' .*use \S*trainer_mode=sync"):
        read(compose_config(*posterior, *DRAWS, "algorithm.filter_groups.enable=True"))
    assert read(compose_config(*posterior)) == Settings()


def test_fewer_rollouts_than_the_estimator_needs_are_refused():
    point = ["algorithm.adv_estimator=posterior", "+algorithm.posterior.estimator=point"]
    with pytest.raises(ValueError, match=r"=point .*rollout.n=1\b.* 2 .*estimator=auto"):
        read(compose_config(*point))
    assert read(compose_config(*point, "trainer.val_only=True")).estimator == "point"
    assert read(compose_config(*point, "actor_rollout_ref.rollout.n=2")).estimator == "point"


def test_a_prompt_with_two_labels_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(
        globals(), "DATA", [row_of("1+1=", "2"), row_of("2+2=", 4.0), row_of("1+1=", "3")]
    )
    with pytest.raises(ValueError, match=r"1 of 3 rows .*row 3: .*'3', .*row 1 has '2'"):
        started(posterior_config(tmp_path))
    shown = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}
    ]
    animals = [
        {"raw_prompt": shown, "reward_model": {"ground_truth": label}} for label in ("cat", "dog")
    ]
    monkeypatch.setitem(globals(), "DATA", animals)  # their images differ
    with started(posterior_config(tmp_path)).posteriors as posteriors:
        assert {label for _, label in posteriors.prompt_ids} == {"cat", "dog"}


def test_verls_data_set_and_its_queue_give_the_same_keys(queue, tmp_path):
    system = {"role": "system", "content": "Be brief."}
    shown = [message("1+1="), [system, *message("é")]]
    rows = [
        {
            "prompt": prompt,
            "reward_model": {"style": "rule", "ground_truth": label},
            "data_source": "test",
        }
        for prompt, label in zip(shown, ("2", "4"), strict=True)
    ]
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = compose_config("data.filter_overlong_prompts=False", f"+data.cache_dir={tmp_path}")
    data = RLHFDataset(str(path), tokenizer=None, config=config.data)
    keys = keys_of(data)
    text = '[{"content": "Be brief.", "role": "system"}, {"content": "é", "role": "user"}]'
    assert keys == [("1+1=", "2"), (text, "4")]
    batch = batch_of([("x", "y", [1.0]), ("x", "y", [0.0])])
    fields = [{name: data[row][name] for name in ("raw_prompt", "reward_model")} for row in (0, 1)]
    tq.kv_batch_put(
        keys=batch.keys, partition_id="train", fields=list_of_dict_to_tensordict(fields)
    )
    assert integration.Batch.read(batch).keys_S == keys


# What columns of the data set tell


def rated(text, label, rate, source="sums", depth=1):
    return row_of(text, label) | {
        "data_source": source,
        "extra_info": {"rate": rate, "depth": depth},
    }


BY_RATE = "+algorithm.posterior.pass_rate_column=extra_info.rate"
RATED = [
    rated(TEXTS[0], "2", "5/8"),
    rated(TEXTS[1], "4", 0.25, "more"),
    rated(TEXTS[2], "6", None, "more", 2),
]


def test_known_pass_rates_of_a_column_are_what_the_posteriors_begin_with(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "DATA", RATED)
    attempts = "+algorithm.posterior.pass_rate_attempts=4"
    discount = "+algorithm.posterior.parameters.discount=1"
    config = posterior_config(tmp_path, BY_RATE, attempts, discount, estimator="dbb")
    with started(config).posteriors as posteriors:
        expected = posteriors.predictive()
        of = {
            text: posteriors.prompt_ids[text, label]
            for text, label in zip(TEXTS, LABELS, strict=True)
        }
    known = dict(
        zip(expected.prompt_ids, zip(expected.alpha, expected.beta, strict=True), strict=True)
    )
    # 2.5 and 1 of four, beside the prior of 1 and 1
    assert [known[of[text]] for text in TEXTS] == [(3.5, 2.5), (2, 4), (1, 1)]


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            [BY_RATE],
            r"'extra_info.rate': 1 of 3 rows .*row 2: .*give pass_rate_attempts",
        ),
        (
            ["+algorithm.posterior.pass_rate_column=rate"],
            "pass_rate_column = 'rate': no row .* name another column",
        ),
        (
            ["+algorithm.posterior.source_column=origin"],
            "source_column = 'origin': no row .* name another column",
        ),
        (
            [BY_RATE, "+algorithm.posterior.warm_start=other"],
            "pass_rate_column and warm_start both say",
        ),
        (
            [BY_RATE, "+algorithm.posterior.pass_rate_attempts=0"],
            "pass_rate_attempts = 0; give 1 or more",
        ),
    ],
)
def test_columns_that_cannot_be_read_are_refused(tmp_path, monkeypatch, overrides, problem):
    monkeypatch.setitem(globals(), "DATA", RATED)
    with pytest.raises(ValueError, match=problem):
        started(posterior_config(tmp_path, *overrides, estimator="dbb"))


@pytest.mark.parametrize(
    ("overrides", "sources"),
    [
        ([], {"sums": 1.0, "more": 0.25}),  # verl's data_source
        (["+algorithm.posterior.source_column=extra_info.depth"], {"1": 0.5, "2": 0.5}),
    ],
)
def test_metrics_are_by_source_also_after_a_resume(
    queue, tmp_path, monkeypatch, overrides, sources
):
    monkeypatch.setitem(globals(), "DATA", RATED)
    config = posterior_config(tmp_path, *overrides, estimator="dbb")
    rewards = [[1.0, 1.0], [0.0, 0.0], [0.0, 1.0]]
    for _ in range(2):
        metrics = {}
        batch = batch_of([(row["raw_prompt"][0]["content"], row["reward_model"]["ground_truth"], scores)
                          for row, scores in zip(RATED, rewards, strict=True)])  # fmt: skip
        advantages_of(trainer(config), batch, metrics)
        shares = {
            name.split("/")[1]: value
            for name, value in metrics.items()
            if re.match("source/.*/right", name)
        }
        assert shares == sources


def test_sources_have_their_shares_of_each_batch(queue, tmp_path, monkeypatch):
    """verl's data_source: two of three prompts are sums, which get a quarter of the draws."""
    monkeypatch.setitem(globals(), "DATA", RATED)
    shares = [
        "+algorithm.posterior.strategy=shares", "data.train_batch_size=1",
        "+algorithm.posterior.strategy_parameters.of='sums=0.25,more=0.75'",
    ]  # fmt: skip
    ours = trainer(posterior_config(tmp_path, *shares, estimator="dbb"))
    with ours.posteriors:
        asked = [ours._next_train_batch()["raw_prompt"][0][0]["content"] for _ in range(8)]
    sources = {row["raw_prompt"][0]["content"]: row["data_source"] for row in RATED}
    assert [sources[text] for text in asked].count("sums") == 2
    with pytest.raises(ValueError, match="names no share of source 'more'"):
        trainer(posterior_config(tmp_path, *shares[:2], "trainer.experiment_name=other",
                                 "+algorithm.posterior.strategy_parameters.of='sums=1'"))  # fmt: skip
    assert query(tmp_path, "SELECT count(*) FROM dbb_run") == [(1,)]


# What is reached of verl


def test_verl_has_what_is_overridden_and_none_of_its_trainers_overrides_it_too():
    overridden = {
        "_val_metrics_update",
        "_load_checkpoint", "_compute_advantage", "_save_checkpoint", "_compute_metrics", "fit", "_build_replay_buffer"
    }  # fmt: skip
    assert overridden <= vars(PPOTrainer).keys() & vars(integration.WithPosteriors).keys()
    for cls in TRAINERS.values():
        assert overridden.isdisjoint(vars(cls.__mro__[2]))

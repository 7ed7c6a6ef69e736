"""The hook on OpenRLHF's own experiences: upstream's advantages with point, Algorithm 1 with dbb."""

import functools
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from trainings import EACH, check_questions, in_ones_own_loop

from openrlhf_dbb import estimators, upstream
from openrlhf_dbb.driver import arguments
from openrlhf_dbb.platform import cpu

cpu.prepare_driver()

from openrlhf.trainer.ppo_utils.experience import (  # noqa: E402
    Experience,
    make_experience_batch,
    remove_padding_in_sequences,
    split_experience_batch,
)
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker  # noqa: E402

from openrlhf_dbb.actors.experience_maker import PosteriorExperienceMaker  # noqa: E402
from openrlhf_dbb.actors.generation import Group, Prompt, RolloutBatch, one_update  # noqa: E402
from openrlhf_dbb.actors.progress import Progress  # noqa: E402
from openrlhf_dbb.core.posteriors import Posteriors  # noqa: E402
from openrlhf_dbb.core.strategies import Drawn  # noqa: E402
from openrlhf_dbb.tiny import build_tokenizer  # noqa: E402

PROMPTS = [f"{i}+1=" for i in range(4)]
LABELS = ["1", "2", "3", "4"]
TOKENIZER = build_tokenizer()
TOKENS = 5
BY_PROMPT = "FROM posterior_history JOIN prompts USING (prompt_id) ORDER BY prompt"


@functools.cache
def settings(*flags):
    return arguments.parse(["--preset", "tiny", "--rollout.n_samples_per_prompt", "8", *flags])


def experiences(rewards_P_G, *, batch=4, lengths=None, log_prob=0.0, masks=None, kl=None):
    """A rollout batch as OpenRLHF hands it to the hook: P * G rows in micro-batches of ``batch`` rows.

    Responses are of ``lengths`` tokens, or where ``masks`` (P * G, TOKENS) says; ``kl`` has the same shape.
    """
    rewards = torch.tensor(rewards_P_G, dtype=torch.float32)
    group = rewards.shape[1]
    flat = rewards.reshape(-1)
    lengths = (
        torch.full_like(flat, TOKENS)
        if lengths is None
        else torch.tensor(lengths, dtype=torch.float32)
    )
    masks = torch.arange(TOKENS) < lengths[:, None] if masks is None else torch.tensor(masks)
    kl = torch.zeros(masks.shape) if kl is None else torch.tensor(kl, dtype=torch.float32)
    made = []
    for rows in torch.arange(len(flat)).split(batch):
        mask = masks[rows].float()
        scores = flat[rows]
        places = rows.tolist()
        made.append(
            Experience(
                sequences=torch.ones(len(rows), TOKENS + 1, dtype=torch.long),
                attention_mask=torch.cat([torch.ones(len(rows), 1), mask], dim=1).long(),
                action_mask=mask,
                action_log_probs=log_prob * mask,
                kl=kl[rows],
                rewards=scores.nan_to_num(),
                scores=scores,
                prompts=[PROMPTS[row // group] for row in places],
                labels=[LABELS[row // group] for row in places],
                response_length=lengths[rows],
                truncated=torch.zeros(len(rows), dtype=torch.bool),
                total_length=1 + lengths[rows],
                index=places,
                info={"reward": scores.nan_to_num()},
            )
        )
    return made


def maker(cls, args, kl=0.0, **options):
    return cls(
        None,
        None,
        None,
        None,
        SimpleNamespace(value=kl),
        SimpleNamespace(args=args),
        TOKENIZER,
        **options,
    )


def group(prompt, rollouts, version=None, read=()):
    row = Prompt(PROMPTS[prompt], LABELS[prompt])
    return Group(row, prompt, version=version, rollouts=tuple(rollouts), read=read)


def advantages(made, batch, step=1, *, filtered=(), skipped=0, versions=None, read=None):
    """The batch with the advantages of a step, and what is logged of it; each row is a group for itself."""
    rows = [
        pair
        for experience in batch
        for pair in zip(experience.index, experience.prompts, strict=True)
    ]
    prompts = [PROMPTS.index(prompt) for _, prompt in sorted(rows)]
    versions = versions or [None] * len(prompts)
    told = [(text,) for text in read] if read else [()] * len(prompts)
    rows = zip(prompts, versions, told, strict=True)
    trained = tuple(group(prompt, [None], version, text) for prompt, version, text in rows)
    return batch, made.add_advantages(batch, RolloutBatch(trained, tuple(filtered), skipped), step)


@pytest.fixture
def ours(tmp_path):
    opened = []

    def build(estimator="dbb", *flags, kl=0.0, **parameters):
        args = settings("--estimator", estimator, *flags).args
        url = f"sqlite:///{tmp_path}/{len(opened)}.db"
        built = estimators.build(estimator, **parameters)
        posteriors = Posteriors.create(url, "run", PROMPTS, LABELS, estimator=built)
        opened.append(posteriors)
        ours = maker(PosteriorExperienceMaker, args, kl, posteriors=posteriors, progress=Progress())
        return ours, posteriors.store

    yield build
    for posteriors in opened:
        posteriors.close()


def column(batch, name):
    return torch.cat([getattr(e, name) for e in batch])


RANDOM = np.random.default_rng(7).integers(0, 2, (4, 8)).astype(float)
GROUPS = {
    "mixed": RANDOM,
    "zero variance": np.repeat([[0.0], [1.0], [0.0], [1.0]], 8, axis=1),
    "one right": np.eye(4, 8),
    "fractional": np.random.default_rng(8).random((4, 8)),
}


def stored(maker, store, sql):
    """What the store holds once the last step is written."""
    maker.posteriors.settle()
    return store.query(sql)


FORM = "algo.advantage.estimator"
FORMS = {
    **{
        form: [f"--{FORM}", form]
        for form in estimators.FORMS.available()
        if form in upstream.choices(FORM)
    },
    "no_std_norm": [
        "--algo.advantage.estimator",
        "reinforce_baseline",
        "--algo.advantage.no_std_norm",
    ],
    "length penalty": ["--rollout.max_new_tokens", "5", "--reward.overlong_buffer_len", "3"],
}
LENGTHS = [1 + row % TOKENS for row in range(32)]
KL = np.random.default_rng(9).normal(0.1, 0.5, (32, TOKENS))
# A response of several turns: what the environment says stands between them and is not trained on.
TURNS = np.array(
    [[1, 1, 0, 0, 1], [0, 1, 0, 1, 1], [1, 0, 0, 0, 0], [1, 0, 1, 0, 1]] * 8, dtype=float
)
BATCHES = {
    "lengths": {"lengths": LENGTHS},
    "turns and KL": {"masks": TURNS, "kl": KL},
    "one micro-batch": {"lengths": LENGTHS, "kl": KL, "batch": 32},
}


def assert_same_batch(mine, theirs):
    """What is trained with, and what is logged of it. Advantages of whitened forms are of size 1, as are the others."""
    mask = column(mine, "action_mask").bool()
    for name in ("advantages", "returns"):
        found, expected = (column(batch, name)[mask] for batch in (mine, theirs))
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=4e-6)
    for name in ("group_reward_std", "return"):
        found, expected = (torch.cat([e.info[name] for e in batch]) for batch in (mine, theirs))
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("batch", BATCHES)
def test_point_reproduces_openrlhf(ours, form, batch):
    kl = 0.3 if "kl" in BATCHES[batch] else 0.0
    upstream = maker(RemoteExperienceMaker, settings("--estimator", "none", *FORMS[form]).args, kl)
    mine, _ = ours("point", *FORMS[form], kl=kl, memory="gaussian")
    for step, (name, rewards_P_G) in enumerate(GROUPS.items(), 1):
        theirs = upstream.compute_advantages_and_returns(experiences(rewards_P_G, **BATCHES[batch]))
        assert column(theirs, "advantages").any() == (
            name != "zero variance" or kl > 0 or form == "length penalty"
        )
        assert_same_batch(
            advantages(mine, experiences(rewards_P_G, **BATCHES[batch]), step)[0], theirs
        )


@pytest.mark.parametrize("form", FORMS)
def test_point_reproduces_openrlhf_on_a_batch_of_incomplete_groups(ours, form):
    """Upstream has no missing rewards: it gets the whole batch without them, one less in each group."""
    rewards_P_G = RANDOM.copy()
    missing = [3, 0, 7, 5]
    rewards_P_G[range(4), missing] = np.nan
    left = ~np.isnan(rewards_P_G.ravel())
    mine = advantages(
        ours("point", *FORMS[form], kl=0.3)[0], experiences(rewards_P_G, masks=TURNS, kl=KL)
    )[0]
    args = settings("--estimator", "none", *FORMS[form]).openrlhf_args()
    args.rollout.n_samples_per_prompt = 7
    theirs = experiences(
        rewards_P_G[~np.isnan(rewards_P_G)].reshape(4, 7), masks=TURNS[left], kl=KL[left]
    )
    theirs = maker(RemoteExperienceMaker, args, 0.3).compute_advantages_and_returns(theirs)
    mask = torch.tensor(TURNS[left], dtype=torch.bool)
    found = column(mine, "advantages")[left][mask]
    expected = column(theirs, "advantages")[mask]
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=4e-6)


def test_whitening_leaves_out_what_could_not_be_verified(ours):
    rewards_P_G = np.array([[1, np.nan, 0, 0]])
    lengths = [1, 2, 3, 1]
    kl = np.zeros((4, TOKENS))
    kl[1, :2] = 1.0
    mine, store = ours("point", *FORMS["reinforce_baseline"], "--rollouts.keep", "all", kl=0.3)
    [batch] = advantages(mine, experiences(rewards_P_G, lengths=lengths, kl=kl))[0]
    # Mean 1/3: 2/3 for one token, -1/3 for four; mean -2/15 and deviation 2/5 over these five. The missing one has
    # KL penalties of 0.3 for each of its two tokens, which are not shifted.
    assert batch.advantages[batch.action_mask.bool()].tolist() == pytest.approx(
        [2, -1.5, -0.75, *[-0.5] * 4]
    )
    # What is stored are those before.
    kept = stored(mine, store, "SELECT advantage FROM rollouts ORDER BY sample")
    assert [value for (value,) in kept] == pytest.approx([2 / 3, 0, -1 / 3, -1 / 3])


def test_dbb_estimates_correctness_not_the_penalised_reward(ours):
    lengths = [TOKENS] * 32
    mine, store = ours("dbb", "--rollout.max_new_tokens", "5", "--reward.overlong_buffer_len", "5")
    batch = advantages(mine, experiences(np.ones((4, 8)), lengths=lengths))[0]
    assert stored(mine, store, "SELECT DISTINCT successes, alpha FROM posterior_history") == [
        (8.0, 8.5)
    ]
    # reward 1 - 1 = 0 against a mean of 8.5 / 9
    assert column(batch, "advantages")[0, 0].item() == pytest.approx(
        -math.sqrt(8.5 / 0.5), rel=1e-6
    )


def test_a_thinned_step_trains_on_fewer_rollouts_and_stores_all_advantages(ours):
    mine, store = ours("dbb", "--train.thin", "1", "--rollouts.keep", "all", discount=1.0)
    batch, _ = advantages(mine, experiences(np.ones((4, 8))))
    # alpha = 9, beta = 1: (1 - 0.9) / sqrt(0.9 x 0.1) = 1/3 for each, of which about a third becomes 1.
    used = column(batch, "advantages")[:, 0]
    assert set(used.tolist()) == {0.0, 1.0} and 3 <= used.sum() <= 19
    assert (
        stored(mine, store, "SELECT count(*) FROM rollouts WHERE abs(advantage - 1.0 / 3) < 1e-9")[
            0
        ][0]
        == 32
    )
    # A step that is done again after a resume
    again, _ = ours("dbb", "--train.thin", "1", discount=1.0)
    assert column(advantages(again, experiences(np.ones((4, 8))))[0], "advantages")[:, 0].equal(
        used
    )


def test_groups_of_unequal_size_count_alike(ours):
    """Six rollouts of a prompt and two of another, four on average: A is multiplied by 4/6 and 4/2."""
    made, store = ours("point", "--algo.advantage.estimator", "dr_grpo")
    batch = experiences(np.array([[1, 0, 0, 0], [0, 1, 1, 0]], dtype=float), batch=8)
    groups = []
    for prompt, rollouts in ((0, 6), (1, 2)):
        drawn = Drawn(prompt, inclusion=0.5, weight=4 / rollouts, rollouts=rollouts)
        groups.append(replace(group(prompt, [None] * rollouts), drawn=drawn))
    made.add_advantages(batch, RolloutBatch(tuple(groups)), 1)
    expected = [4 / 9, -2 / 9, -2 / 9, -2 / 9, -2 / 9, 4 / 9, 1, -1]
    assert column(batch, "advantages")[:, 0].tolist() == pytest.approx(expected)
    counts = stored(made, store, "SELECT rollouts, inclusion FROM posterior_history")
    assert sorted(counts) == [(2, 0.5), (6, 0.5)]


@pytest.mark.parametrize(("estimator", "form"), EACH)
def test_every_estimator_and_form_gives_what_it_gives_in_ones_own_loop(
    ours, tmp_path, estimator, form
):
    mine, _ = ours(estimator, f"--{FORM}", form)
    batch, _ = advantages(mine, experiences(RANDOM, lengths=LENGTHS))
    prompts = np.repeat(PROMPTS, 8).tolist()
    labels = np.repeat(LABELS, 8).tolist()
    expected = in_ones_own_loop(tmp_path, estimator, form, prompts, labels, RANDOM.ravel(), LENGTHS)
    np.testing.assert_allclose(column(batch, "advantages")[:, 0], expected, rtol=1e-5, atol=1e-6)


def test_explain_and_the_page_show_a_step(ours, tmp_path, capsys):
    mine, _ = ours("dbb", "--rollouts.keep", "all")
    batch, _ = advantages(mine, experiences(RANDOM))
    mine.posteriors.settle()
    check_questions(
        tmp_path, capsys, "run", PROMPTS[0], column(batch, "advantages")[:8, 0].tolist(), "0.db"
    )


def test_advantages_beyond_the_reward_clip_are_kept(ours):
    mine, _ = ours("dbb", "--reward.clip_range", "-1", "1", discount=1.0)
    for step in range(1, 4):
        advantages(mine, experiences(np.ones((4, 8))), step)
    batch = advantages(mine, experiences(np.tile([0.0] + [1.0] * 7, (4, 1))), 4)[0]
    # alpha = 1 + 24 + 7, beta = 1 + 1
    assert column(batch, "advantages").min().item() == pytest.approx(-math.sqrt(32 / 2), rel=1e-6)


def test_a_late_group_is_stored_with_its_lag(ours):
    """In step 3 prompt 1 is one step late, prompt 2 is two, and of prompt 3 half of the rollouts are one step late."""
    mine, store = ours("dbb", discount=0.5)
    for step in (1, 2):
        advantages(mine, experiences(RANDOM), step)
    mixed = experiences(RANDOM)[::-1]  # as a dynamic batch, whose order is not that of the rollouts
    _, metrics = advantages(mine, mixed, 3, versions=[1] * 8 + [0] * 8 + [2, 1] * 4 + [2] * 8)
    assert (metrics["async/lag"], metrics["async/lag_max"]) == (
        pytest.approx((1 + 2 + 0.5 + 0) / 4),
        2,
    )
    by_prompt = "JOIN prompts USING (prompt_id) WHERE step = 3 ORDER BY prompt"
    lags = stored(mine, store, f"SELECT policy_version, lag FROM posterior_history {by_prompt}")
    assert lags == [(1, 1), (0, 2), (1.5, 0.5), (2, 0)]


def test_where_a_step_is_one_update_the_policy_is_not_asked_for_log_probs(ours, monkeypatch):
    sizes = [
        "--rollout.batch_size",
        "4",
        "--train.batch_size",
        "32",
        "--rollout.micro_batch_size",
        "8",
    ]
    mine, _ = ours("dbb", *sizes)
    rollouts = experiences(RANDOM, batch=1)
    for rollout in rollouts:
        rollout.action_log_probs = None
        rollout.rollout_log_probs = -1.5 * rollout.action_mask
    monkeypatch.setattr(mine, "make_experience", None)
    groups = tuple(group(prompt, rollouts[8 * prompt : 8 * prompt + 8]) for prompt in range(4))
    made, _ = mine.make(RolloutBatch(groups), 1, None)
    assert [(each.action_log_probs, each.rollout_log_probs.min()) for each in made] == [
        (None, -1.5)
    ] * 4


def test_vllms_log_probs_stand_for_the_policys_where_they_are_asked_for(ours, monkeypatch):
    mine, _ = ours("dbb", "--train.vllm_log_probs")  # two updates a step
    rollouts = experiences(RANDOM, batch=1)
    for rollout in rollouts:
        rollout.action_log_probs = None
        rollout.rollout_log_probs = -1.5 * rollout.action_mask
    monkeypatch.setattr(mine, "make_experience", None)  # it would ask the policy
    groups = tuple(group(prompt, rollouts[8 * prompt : 8 * prompt + 8]) for prompt in range(4))
    made, _ = mine.make(RolloutBatch(groups), 1, None)
    for each in made:
        assert torch.equal(each.action_log_probs, -1.5 * each.action_mask)


def filtered_group(prompt, scores, length=TOKENS):
    """A group that was generated, but is not trained on: the policy has taken no log-probs."""
    rollouts = experiences([scores], batch=1, lengths=[length] * len(scores))
    own = {"prompts": [PROMPTS[prompt]], "labels": [LABELS[prompt]], "action_log_probs": None}
    return group(prompt, [replace(rollout, **own) for rollout in rollouts])


def test_filtered_groups_are_estimated_from_and_not_trained_on(ours):
    mine, store = ours("dbb", discount=0.5)
    trained = np.array([[1.0, 0, 0, 0, 0, 0, 0, 0], [1.0] * 8])
    rejected = [filtered_group(2, [0.0] * 8, length=3), filtered_group(3, [1.0, math.nan])]
    batch, metrics = advantages(mine, experiences(trained), filtered=rejected, skipped=2)
    assert column(batch, "advantages").shape == (16, TOKENS)
    # alpha, beta = 0.5 + S, 0.5 + n - S
    posteriors = stored(mine, store, f"SELECT rollouts, alpha, beta {BY_PROMPT}")
    assert posteriors == [(8, 1.5, 7.5), (8, 8.5, 0.5), (8, 0.5, 8.5), (1, 1.5, 0.5)]
    used = store.query("SELECT generated, generated_tokens, trained, skipped FROM steps")
    assert used == [(26, 40 + 40 + 24 + 10, 16, 2)]
    # Of the rows that are trained on
    assert metrics["estimator/mean"] == pytest.approx((1.5 / 9 + 8.5 / 9) / 2)


def test_what_the_model_wrote_is_kept_trained_on_or_not(ours):
    mine, store = ours("dbb", "--rollouts.keep", "all", discount=0.5)
    (batch,) = experiences(np.array([[1.0, math.nan]]), lengths=[5, 3], log_prob=-0.5)
    eos = TOKENIZER.eos_token_id
    said = TOKENIZER.encode("0+1=2")
    batch.sequences = torch.tensor([[*said[:4], eos, 1], [*said, 1]])
    # Of the token that comes next
    batch.action_mask = torch.tensor([[0, 0, 1, 1, 0], [0, 0, 0, 1, 1]])
    batch.action_log_probs = torch.full((2, 5), -0.5)
    batch.truncated = torch.tensor([False, True])
    batch.index = [1, 0]  # a dynamic batch sorts the rollouts by length
    filtered = replace(filtered_group(1, [1.0], length=2), read=("3",))
    _, metrics = advantages(mine, [batch], filtered=[filtered], read=["no answer: no number", "1"])
    assert metrics["rollout/unreadable"] == pytest.approx(1 / 3)
    columns = "prompt, sample, reward, score, length, truncated, missing, log_prob, text, read"
    sql = f"SELECT {columns} FROM rollouts JOIN prompts USING (prompt_id) ORDER BY prompt, sample"
    one = TOKENIZER.decode([1])
    # The token that ended the first response is left out. The filtered one comes without log-probs.
    assert stored(mine, store, sql) == [
        (PROMPTS[0], 0, 1.0, 1.0, 5, 0, 0, -1.0, "=", "1"),
        (PROMPTS[0], 1, None, None, 3, 1, 1, -1.0, "2" + one, "no answer: no number"),
        (PROMPTS[1], 0, 1.0, 1.0, 2, 0, 0, None, 2 * one, "3"),
    ]


class Ranks:
    """In the place of the policy's actors: two data-parallel ranks, of two actors each."""

    def __init__(self):
        self._actor_handlers = [None] * 4
        self.duplicate_actors = 2
        self.calls = []

    def async_run_method_batch(self, method_name, **shares):
        self.calls.append((method_name, shares))
        return []


def sent(ranks):
    """The rows of the only call, in the order in which they were chosen."""
    [(name, shares)] = ranks.calls
    assert name == "append_extra_rows"
    first, second = shares["experience"]
    assert len(first) - len(second) in (0, 1)
    rows = [None] * (len(first) + len(second))
    rows[::2] = first
    rows[1::2] = second
    return rows


def replaying(ours, monkeypatch, *flags):
    monkeypatch.setattr("ray.get", list)
    mine, store = ours("dbb", "--method", "repo", *flags, discount=0.5)
    mine.actor_model_group = Ranks()
    return mine, store


VISITS = [[1, 0, 0, 0, 0, 0, 0, 0], [0, 1, 1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0]]


def test_rollouts_are_replayed_from_the_third_visit_on(ours, monkeypatch):
    mine, _ = replaying(ours, monkeypatch)
    replayed = []
    for step, visit in enumerate(VISITS, 1):
        assert mine.actor_model_group.calls == []
        rewards_P_G = np.array([visit] * 3, dtype=float)
        if step == 1:
            # Two prompts will have 15 rollouts in the cache, one too few
            rewards_P_G[1:, -1] = np.nan
        batch, metrics = advantages(mine, experiences(rewards_P_G, log_prob=-step), step)
        replayed.append(metrics["replay/replayed"])
    assert replayed == [0, 0, 8]
    assert column(batch, "advantages").shape == (24, TOKENS)
    assert metrics["replay/cached"] == 3 * 16
    # Of the fresh rollouts alone
    assert metrics["reward"] == 0.5
    assert metrics["response_length"] == TOKENS
    check_replayed_rows(sent(mine.actor_model_group))


def check_replayed_rows(rows):
    # The 3 successes among 16 and the 5 oldest failures, by their own mean 3/8 and variance 8/7 * 3/8 * 5/8.
    right = 5 / 8 / math.sqrt(15 / 56)
    wrong = -3 / 8 / math.sqrt(15 / 56)
    expected = [right] + [wrong] * 5 + [right] * 2
    for row, advantage in zip(rows, expected, strict=True):
        assert row.advantages.unique().tolist() == [pytest.approx(advantage)]
    # 6 of them are of the first visit, 2 of the second, with the log-probs that they had then.
    assert [row.action_log_probs.unique().tolist() for row in rows] == [[-1.0]] * 6 + [[-2.0]] * 2


@pytest.fixture
def long_and_short(ours, monkeypatch):
    """Two replayed rows of several turns, and the last batch; the rewards are those after the length penalty."""
    penalty = ["--rollout.max_new_tokens", "5", "--reward.overlong_buffer_len", "3"]
    mine, _ = replaying(ours, monkeypatch, "--replay.samples", "2", "--replay.cache", "2", *penalty)
    masks = np.array([[1, 1, 0, 0, 1], [0, 1, 0, 0, 0]], dtype=float)
    for step in (1, 2):
        (batch,) = experiences(np.array([[1.0, 1.0]]), lengths=[5, 2], masks=masks, log_prob=-step)
        batch.sequences = torch.tensor([[7, 8, 9, 6, 5, 4], [7, 8, 9, 0, 0, 0]])
        batch.attention_mask = (batch.sequences > 0).long()
        batch.rollout_log_probs = -1.5 * batch.action_mask
        advantages(mine, [batch], step)
    return sent(mine.actor_model_group), batch


def test_a_replayed_row_has_the_tokens_and_the_log_probs_of_its_step(long_and_short):
    old, batch = long_and_short
    fresh = remove_padding_in_sequences(split_experience_batch(replace(batch)))
    for replayed, new in zip(old, fresh[:2], strict=True):
        for name in ("sequences", "attention_mask", "action_mask"):
            assert torch.equal(getattr(replayed, name), getattr(new, name)), name
        assert torch.equal(replayed.action_log_probs, new.action_log_probs / 2)  # those of step 1


def test_a_replayed_row_has_the_reward_after_the_length_penalty(long_and_short):
    [long, short], _ = long_and_short
    # Of 5 tokens 3 are beyond 5 - 3: the reward is 1 - 1. Mean 1/2, N-1 variance 1/2.
    assert (long.rewards.item(), short.rewards.item()) == (0, 1)
    assert long.advantages[0].item() == pytest.approx(-(0.5**0.5))
    assert short.advantages[0].item() == pytest.approx(0.5**0.5)


def test_a_replayed_row_makes_one_batch_with_a_fresh_one(long_and_short):
    [long, _], batch = long_and_short
    fresh = remove_padding_in_sequences(split_experience_batch(replace(batch)))
    for rows in ([long, *fresh], [*fresh, long]):
        made = make_experience_batch(rows)
        assert made.action_log_probs.shape == (3, 5)
        assert made.rollout_log_probs.isnan().any(dim=1).tolist() == [row is long for row in rows]
        assert set(made.info) == set(batch.info)


def test_with_replay_the_policy_is_asked_for_log_probs_also_where_a_step_is_one_update(ours):
    sizes = [
        "--rollout.batch_size",
        "4",
        "--train.batch_size",
        "32",
        "--rollout.micro_batch_size",
        "8",
    ]
    for flags, expected in ([], True), (["--method", "repo"], False):
        mine, _ = ours("dbb", *sizes, *flags)
        assert one_update(mine.args) is expected

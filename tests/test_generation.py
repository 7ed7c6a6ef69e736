"""Rollout batches over a real data loader: whole, in order, within the budget. Only the engine is a stand-in."""

import itertools
import math
import pickle
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from trainings import until

from openrlhf_dbb.platform import cpu

cpu.prepare_driver()

import ray  # noqa: E402
from torchdata.stateful_dataloader import StatefulDataLoader  # noqa: E402

from openrlhf_dbb.actors import generation  # noqa: E402
from openrlhf_dbb.actors.generation import BudgetSpent, Prompt, RolloutGenerator, rollouts_of  # noqa: E402
from openrlhf_dbb.actors.generation_ahead import THREAD, GenerationAhead  # noqa: E402
from openrlhf_dbb.actors.recorded import RecordedGenerator, as_recorded, as_response  # noqa: E402
from openrlhf_dbb.core.recorded import Record, Recorder  # noqa: E402
from openrlhf_dbb.core.strategies import Decision, Drawn, RunFacts, Sampler  # noqa: E402
from openrlhf_dbb.errors import RunError  # noqa: E402
from openrlhf_dbb.platform.vllm_requests import Finished, Request  # noqa: E402

BATCH = 2
GROUP = 2
FACTS = RunFacts(groups=BATCH, rollouts=GROUP, seed=1)
SCORES = {"1": 1.0, "0": 0.0, "?": math.nan, "-": None}


@pytest.fixture(scope="module")
def shared_engines(ray_node):
    """Two Ray actors in the place of vLLM engines; a prompt's label holds the scores of its responses, "-" for none."""
    import asyncio

    class Engine:
        def start_over(self, after):
            """``after``: prompts that are answered only once another has been."""
            self.calls = []
            self.sizes = []
            self.after = after
            self.answered = {prompt: asyncio.Event() for prompt in after.values()}

        async def get_num_unfinished_requests(self):
            return 0

        async def use_tokenizer(self, tokenizer):
            assert tokenizer == "tokenizer"

        async def generate_groups(self, prompts, sampling, samples, max_length):
            self.sizes.append(len(prompts))
            temperature = sampling["temperature"]
            logprobs = sampling["logprobs"]
            groups = (
                self.group(prompt, label, temperature, samples, logprobs)
                for prompt, label, _ in prompts
            )
            return await asyncio.gather(*groups)

        async def group(self, prompt, label, temperature, num_samples, logprobs=None):
            self.calls.append((prompt, label, temperature, num_samples))
            if label == "broken":
                raise ArithmeticError("the reward function failed")
            if prompt in self.after:
                await self.answered[self.after[prompt]].wait()
            if prompt in self.answered:
                self.answered[prompt].set()
            response = {
                "prompt": prompt, "label": label, "observation_tokens": [1, 2, 3, 4], "action_ranges": [(1, 4)],
                "reward": 9.0, "rollout_log_probs": [0.0, -1.0, -2.0, -3.0] if logprobs else None, "extra_logs": {},
            }  # fmt: skip
            return [
                response | {"scores": SCORES[label[i]], "read": label[i]}
                for i in range(num_samples)
            ]

        async def sample(self, requests, sampling):
            self.sizes.append(len(requests))
            n = sampling["n"]
            text = f"{sampling['temperature']} {sampling['top_p']}"
            return [
                Finished(r.number, [text] * n, [r.max_tokens] * n, [False] * n) for r in requests
            ]

        async def recorded(self, name="calls"):
            return getattr(self, name)

    def noted(name):
        async def note(self):
            self.calls.append(name)

        return note

    for name in ("sleep", "wake_up", "pause_generation", "resume_generation"):
        setattr(Engine, name, noted(name))
    return [ray.remote(Engine).remote() for _ in range(2)]


@pytest.fixture
def engines(shared_engines):
    ray.get([each.start_over.remote({}) for each in shared_engines])
    return shared_engines


@pytest.fixture
def engine(engines):
    return engines[0]


def tree(**values):
    """Arguments as OpenRLHF has them."""
    return SimpleNamespace(
        **{name: tree(**v) if isinstance(v, dict) else v for name, v in values.items()}
    )


@pytest.fixture
def generator(engine):
    """Function: a generator of batches over prompts "1", "2", ... with these labels."""

    def make(
        labels,
        sampler=None,
        *,
        sleep=False,
        lora=0,
        engines=(engine,),
        at_a_time=None,
        train_batch=0,
        vllms=False,
        kind=RolloutGenerator,
        **options,
    ):
        sampler = sampler or Sampler(FACTS)
        sizes = {"batch_size": sampler.facts.groups, "n_samples_per_prompt": GROUP}
        args = tree(
            rollout=sizes | {"vllm_generate_batch_size": at_a_time}, vllm={"enable_sleep": sleep},
            algo={"advantage": {"is_correction_level": "off"}, "kl": {"init_coef": 0.0}},
            train={"batch_size": train_batch, "max_epochs": 1, "vllm_log_probs": vllms},
            critic={"model_name_or_path": None}, ds={"lora": {"rank": lora}}, data={"max_images_per_prompt": 0},
            replay={"samples": 0}, rollouts={"record": False},
        )  # fmt: skip
        rows = Rows(("", str(i), label, None) for i, label in enumerate(labels, 1))
        loader = StatefulDataLoader(rows, batch_size=1, collate_fn=columns)
        ids = {(text, label): place for place, (_, text, label, _) in enumerate(rows)}
        return kind(
            SimpleNamespace(args=args), loader, None, "tokenizer", list(engines), sampler=sampler, prompt_ids=ids,
            judges=isinstance(sampler, Mixed), **options,
        )  # fmt: skip

    return make


def columns(rows):
    return tuple(list(column) for column in zip(*rows, strict=True))


class Rows(list):
    """The data set, as OpenRLHF's loader and a strategy that draws read it."""

    @property
    def prompts(self):
        return [text for _, text, _, _ in self]

    @property
    def labels(self):
        return [label for _, _, label, _ in self]

    @property
    def images(self):
        return [image for _, _, _, image in self]


def draw(made):
    """One call, as OpenRLHF's fit() makes it: the prompts of the batch, prompts generated for, end of the pass."""
    made.last_batch, _, consumed, exhausted = made.generate_samples()
    groups = made.last_batch.trained
    assert all(
        [rollout.prompts for rollout in group.rollouts] == [[group.prompt.text]] * GROUP
        for group in groups
    )
    assert all(group.read == tuple(group.prompt.label[:GROUP]) for group in groups)
    return texts(groups), consumed, exhausted


def texts(groups):
    return "".join(group.prompt.text for group in groups)


def draw_batches(made, count):
    """The prompts of the next ``count`` batches that are not empty."""
    batches = []
    while len(batches) < count:
        text = draw(made)[0]
        batches += [text] if text else []
    return batches


def beside(made):
    """What came with the last batch: prompts of filtered groups, and how many others were skipped.

    Sorted, since filtered groups come in the order in which they are answered.
    """
    return "".join(sorted(texts(made.last_batch.filtered))), made.last_batch.skipped


def continued(made, snapshot):
    """The generator after a resume from a checkpoint."""
    made.load(pickle.loads(pickle.dumps(snapshot.state)), snapshot.place)
    return made


class Mixed(Sampler):
    """Trains on groups of different scores. Others are replaced, or discarded if rounds are of a fixed size."""

    def __init__(self, groups=BATCH, a_round=None):
        super().__init__(RunFacts(groups=groups, rollouts=GROUP))
        self._a_round = a_round

    def round_size(self, missing):
        return self._a_round or missing

    def judge(self, prompt_id, scores_N):
        if len(np.unique(scores_N[~np.isnan(scores_N)])) > 1:
            return Decision.TRAIN
        return Decision.DISCARD if self._a_round else Decision.REPLACE


class Resting(Mixed):
    """Skips a prompt for the pass after a group of equal scores."""

    kept = ("_pass", "_rests_until")

    def __init__(self, a_round=None, passes=1):
        super().__init__(a_round=a_round)
        self._pass = 0
        self._passes = passes
        self._rests_until = {}

    def skips(self, prompt_id):
        return self._rests_until.get(prompt_id, -1) >= self._pass

    def judge(self, prompt_id, scores_N):
        decision = super().judge(prompt_id, scores_N)
        if decision is not Decision.TRAIN:
            self._rests_until[prompt_id] = self._pass + self._passes
        return decision

    def end_pass(self):
        self._pass += 1

    def metrics(self):
        return {"resting": float(sum(until >= self._pass for until in self._rests_until.values()))}


MIXED = "10"
EASY = "11"
HARD = "00"


def test_plain_batches_are_whole_and_the_rest_of_a_pass_waits(generator):
    made = generator([MIXED, EASY, HARD])
    passes = [draw(made) for _ in range(4)]
    assert passes == [("12", 2, False), ("", 1, True), ("31", 1, False), ("23", 2, False)]
    assert beside(made) == ("", 0)
    assert made.filler.generated == 6 * GROUP
    assert made.filler.unused() == 0


def test_a_strategy_that_draws_decides_on_the_prompts_and_their_weights(generator):
    class Drawing(Sampler):
        def next_prompt(self, predictive):
            assert predictive() == "predictive"
            return Drawn(next(order), inclusion=0.5, weight=2.0)

        def observe(self, drawn, mixed):  # not of groups without any score
            observed.append((drawn.prompt_id, mixed))

    order = iter([2, 0, 2, 1, 1, 0])
    observed = []
    made = generator([HARD, MIXED, MIXED], Drawing(FACTS), predictive=lambda: "predictive")
    assert draw(made) == ("31", 2, False)
    assert [(group.drawn.inclusion, group.drawn.weight) for group in made.last_batch.trained] == [
        (0.5, 2.0)
    ] * 2
    assert (made.last_batch.snapshot.place, made.last_batch.snapshot.ends_pass) == (
        {"place": 2},
        False,
    )
    assert draw(made) == ("", 1, True)  # a pass is as many prompts as there are
    assert draw(made) == ("32", 1, False)
    assert observed == [(2, True), (0, False), (2, True), (1, True)]


@pytest.mark.parametrize("sampler", [None, Mixed])
def test_a_verifier_that_is_down_for_three_batches_ends_the_training(generator, sampler):
    """Batches of two groups: the score of 4 begins the count anew, and 10 is the sixth without one."""
    labels = ["??", "??", "??", "1?", *["??"] * 6]
    made = generator(labels, sampler and sampler())
    with pytest.raises(RunError, match="no rollout of the last 6 prompts could be verified"):
        for _ in range(9):
            made.generate_samples()
    # Batches of two are judged whole. Replaced groups are judged as they finish: that of 4 may do so
    # after 3 to 5 others, or when six others have ended the training.
    least = 10 if sampler is None else 7
    most = 10 if sampler is None else 13
    assert least * GROUP <= made.filler.generated <= most * GROUP


def test_rejected_groups_are_replaced_until_the_pass_ends(generator):
    made = generator([EASY, MIXED, HARD, MIXED, EASY, MIXED, HARD], Mixed())
    # 1 is rejected, for it 3, for it 4. Then 5 is, for it 7, then nothing is left: 6 waits.
    assert draw(made) == ("24", 4, False)
    assert beside(made) == ("13", 0)
    assert made.filler.generated == 4 * GROUP
    assert draw(made) == ("", 3, True)
    # Completed in the next pass: 1 is rejected, for it 2.
    assert draw(made) == ("62", 2, False)
    assert beside(made) == ("157", 0)
    assert made.filler.generated == 9 * GROUP
    assert draw(made) == ("46", 4, False)  # 3 is rejected, for it 5, for it 6
    assert beside(made) == ("35", 0)


def test_kept_groups_stand_in_the_order_in_which_they_were_sent(generator, engine):
    # 1 is answered only after 4, which is sent in the place of 3 once 3 is rejected; 2 is kept by then.
    ray.get(engine.start_over.remote({"1": "4"}))
    made = generator([MIXED, MIXED, EASY, MIXED], Mixed(groups=3))
    assert draw(made) == ("124", 4, False)
    assert ray.get(engine.recorded.remote("sizes")) == [
        1,
        1,
        1,
        1,
    ]  # the strategy hears of each group by itself


def test_the_surplus_of_a_round_is_observed(generator):
    made = generator([HARD, MIXED, MIXED, EASY, MIXED, MIXED, MIXED, MIXED], Mixed(a_round=6))
    assert draw(made) == ("23", 6, False)
    assert made.filler.generated == 6 * GROUP
    taken = sorted(made.last_batch.filtered, key=lambda group: group.prompt)
    assert texts(taken) == "1456"
    assert [rollout.scores.item() for rollout in rollouts_of(taken)] == [0, 0, 1, 1, 1, 0, 1, 0]


def test_skipped_prompts_are_counted_and_cost_nothing(generator):
    made = generator([EASY, MIXED, MIXED, MIXED, MIXED], Resting(a_round=3))
    assert draw(made) == ("23", 3, False)
    assert beside(made) == ("1", 0)
    assert draw(made) == ("45", 2, True)
    assert draw(made) == ("23", 3, False)  # 1 rests; the third kept group is surplus
    assert beside(made) == ("4", 1)
    assert made.filler.generated == (3 + 2 + 3) * GROUP
    nothing_left = generator([EASY, HARD], Resting(a_round=3, passes=9))
    assert [draw(nothing_left) for _ in range(3)] == [("", 2, True), ("", 0, True), ("", 0, True)]
    assert nothing_left.filler.unused() == 2 * GROUP


def test_what_was_not_verified_is_no_score(generator):
    made = generator(["1?", "0?", "??", MIXED], Mixed())
    assert draw(made)[0] == ""
    assert made.filler.unused() == 4 * GROUP  # the fourth is kept and waits
    plain = generator(["1?", "0?"])
    rollouts = rollouts_of(plain.generate_samples()[0].trained)
    assert [str(rollout.scores.item()) for rollout in rollouts] == ["1.0", "nan", "0.0", "nan"]
    assert [rollout.info["score"].item() for rollout in rollouts] == [
        1,
        0,
        0,
        0,
    ]  # for a mean that is logged


def test_a_budget_is_never_exceeded_and_no_batch_is_begun_that_cannot_be_filled(generator):
    # Two steps, and a group that fills no third
    made = generator([MIXED] * 3, max_rollouts=2 * BATCH * GROUP + 3)
    assert [draw(made)[0] for _ in range(3)] == ["12", "", "31"]
    with pytest.raises(BudgetSpent):
        draw(made)
    assert made.filler.generated == 8
    assert made.filler.unused() == 0
    rounds = generator([MIXED] * 9, Mixed(a_round=6), max_rollouts=8 * GROUP)
    assert [draw(rounds) for _ in range(2)] == [
        ("12", 6, False),
        ("78", 2, False),
    ]  # two of a round of six
    with pytest.raises(BudgetSpent):
        draw(rounds)
    assert rounds.filler.generated == 8 * GROUP


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize(
    "labels", [[EASY, MIXED, MIXED, HARD, MIXED, MIXED, EASY], [EASY, MIXED, MIXED, MIXED, MIXED]]
)
def test_a_checkpoint_between_steps_continues_with_the_same_batches(generator, labels, steps):
    """In the second case the pass ends with the second step, too."""

    def train(made, count):
        """Batches, with what came with them."""
        return [
            (draw_batches(made, 1), *beside(made), made.filler.generated, made.last_batch.snapshot)
            for _ in range(count)
        ]

    expected = train(generator(labels, Resting(a_round=3)), steps + 4)
    stopped = generator(labels, Resting(a_round=3))
    train(stopped, steps)
    assert bool(stopped.last_batch.snapshot.place) == (not (len(labels) == 5 and steps == 2))
    resumed = continued(generator(labels, Resting(a_round=3)), stopped.last_batch.snapshot)
    assert train(resumed, 4) == expected[steps:]


def test_engines_sleep_between_batches_whatever_happens(generator, engine):
    made = generator(["broken"] * 2, sleep=True, lora=8)
    with pytest.raises(ArithmeticError, match="the reward function failed"):
        made.generate_samples(temperature=0.7)
    calls = ray.get(engine.recorded.remote())
    assert (calls[0], calls[-1]) == ("wake_up", "sleep")
    assert set(calls[1:-1]) <= {("1", "broken", 0.7, GROUP), ("2", "broken", 0.7, GROUP)}


@pytest.mark.parametrize(("lora", "sent"), [(0, [1, 3]), (8, [])])
def test_engines_that_gave_their_weights_up_get_them_before_they_generate(
    generator, engine, lora, sent
):
    """With adapters they keep theirs. The trainer sends them before the second batch, as after each step."""

    def send_weights():
        assert ray.get(engine.recorded.remote()) == []  # nothing has woken up yet
        batches.append(number)
        made.engines_have_weights = True

    batches = []
    made = generator([MIXED] * 6, sleep=True, lora=lora, send_weights=send_weights)
    for number in (1, 2, 3):
        ray.get(engine.start_over.remote({}))
        if number == 2:
            made.engines_have_weights = True
        draw(made)
        first, *_, last = ray.get(engine.recorded.remote())
        assert (first, last) == ("wake_up", "sleep")
    assert batches == sent


def test_more_responses_are_scored_as_in_training_and_the_engine_sleeps_again(generator, engine):
    made = generator([], sleep=True, lora=8)
    prompts = [Prompt("a", "10?"), Prompt("b", "0-1")]
    scores = made.score_more(prompts, 3, temperature=0.5, n_samples_per_prompt=8)
    # a score that is absent, unlike a missing one (NaN), leaves the reward
    np.testing.assert_array_equal(scores, [[1, 0, math.nan], [0, 9, 1]])
    first, *asked, last = ray.get(engine.recorded.remote())
    assert (first, sorted(asked), last) == (
        "wake_up",
        [("a", "10?", 0.5, 3), ("b", "0-1", 0.5, 3)],
        "sleep",
    )
    assert (made.filler.generated, made.filler.unused()) == (0, 0)


def test_what_is_generated_beyond_a_batch_waits_for_the_next_one(generator, engine):
    made = generator([MIXED] * 5, at_a_time=3)
    assert draw(made) == ("12", 3, False)
    assert made.filler.generated == 3 * GROUP
    assert made.last_batch.filtered == ()
    assert draw(made) == ("34", 2, False)  # 3 has waited; two more make three at a time again
    assert draw(made) == ("", 0, True)  # 5 waits for the next pass
    assert draw(made) == ("51", 2, False)
    assert ray.get(engine.recorded.remote("sizes")) == [3, 2, 2]


@pytest.mark.parametrize(
    ("updates", "most", "vllms", "second"),
    [(2, 2, False, None), (1, 2, False, (1, 3)), (2, 3, False, (1, 3)), (2, 2, True, (1, 3))],
)
def test_after_the_first_batch_log_probs_come_only_where_they_are_needed(
    generator, updates, most, vllms, second
):
    """Where no pass of the policy takes them, or where 3 has waited, and came with them."""
    made = generator([MIXED] * 4, at_a_time=most, train_batch=BATCH * GROUP // updates, vllms=vllms)
    for prompts, shape in (("12", (1, 3)), ("34", second)):
        assert draw(made)[0] == prompts
        log_probs = [rollout.rollout_log_probs for rollout in rollouts_of(made.last_batch.trained)]
        assert [each if each is None else each.shape for each in log_probs] == [shape] * 4


def test_groups_that_became_stale_while_they_waited_are_observed_and_not_trained_on(generator):
    made = generator([MIXED] * 6, at_a_time=4)
    made.filler.version = 0
    made.filler.drop_stale(0)
    assert draw(made)[0] == "12"
    made.filler.version = 2
    made.filler.drop_stale(1)
    assert (draw(made)[0], beside(made)) == ("56", ("34", 0))
    assert [group.version for group in made.last_batch.trained + made.last_batch.filtered] == [
        2,
        2,
        0,
        0,
    ]


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_what_waits_at_a_checkpoint_is_asked_for_again_and_nothing_twice(generator, steps):
    """8 prompts, 2 a batch, 5 at a time: a resume after any step trains each prompt once a pass."""
    stopped = generator([MIXED] * 8, at_a_time=5)
    before = draw_batches(stopped, steps)
    # The rest will be asked for again
    assert stopped.last_batch.snapshot.generated == steps * 2 * GROUP
    resumed = continued(generator([MIXED] * 8, at_a_time=5), stopped.last_batch.snapshot)
    after = draw_batches(resumed, 8 - steps)
    assert sorted("".join(before + after)) == sorted("12345678" * 2)
    assert resumed.snapshot().generated == 8 * 2 * GROUP


def test_a_pass_that_ended_before_the_checkpoint_ends_once(generator):
    """All four prompts are drawn at once; after the resume the pass is over when the two that waited are trained on."""
    stopped = generator([MIXED] * 4, at_a_time=9)
    assert draw(stopped) == ("12", 4, False)
    assert (stopped.last_batch.snapshot.place, stopped.last_batch.snapshot.ends_pass) == (
        {},
        False,
    )  # two wait
    ended = []
    sampler = Sampler(FACTS)
    sampler.end_pass = lambda: ended.append(True)
    resumed = generator([MIXED] * 4, sampler, at_a_time=9)
    continued(resumed, stopped.last_batch.snapshot)
    assert draw_batches(resumed, 1) == ["34"] and ended == []
    assert draw_batches(resumed, 1) == ["12"] and ended == [True]


@pytest.fixture
def ahead(generator):
    """Function: generation of two passes, three batches ahead of the training, from the beginning."""
    opened = []

    def make(inner, *, partial=False):
        train = SimpleNamespace(
            async_queue_size=3, max_lag=None, partial_rollout_enable=partial, num_episodes=2
        )
        handed = GenerationAhead(inner, SimpleNamespace(train=train), 0, 0)
        opened.append(handed)
        return handed

    yield make
    for handed in opened:
        handed.close()
    for thread in threading.enumerate():
        if thread.name == THREAD:
            thread.join()  # or it would ask the engine of the next test


def counting(inner):
    """The batches that a generator has made, from now on."""
    made = []
    generate = inner.generate_samples

    def counted(**options):
        result = generate(**options)
        made.append(result)
        return result

    inner.generate_samples = counted
    return made


def test_a_checkpoint_belongs_to_the_batch_that_was_handed_out_and_not_to_those_ahead_of_it(
    generator, ahead
):
    labels = [MIXED] * 8
    inner = generator(labels, Resting(a_round=3))
    made = counting(inner)
    handed = ahead(inner)
    assert draw(handed)[0] == "12"
    until(lambda: len(made) == 4)
    assert handed.last_batch.snapshot.generated == 3 * GROUP  # a round is of three prompts
    resumed = continued(generator(labels, Resting(a_round=3)), handed.last_batch.snapshot)
    assert draw(resumed)[0] == draw(handed)[0]
    assert resumed.last_batch.snapshot == handed.last_batch.snapshot


@pytest.mark.parametrize(
    ("partial", "calls"), [(False, []), (True, ["pause_generation", "resume_generation"])]
)
def test_updates_are_counted_and_engines_stand_still_if_they_generate_meanwhile(
    generator, ahead, engine, partial, calls
):
    inner = generator([MIXED] * 2)
    handed = ahead(inner, partial=partial)
    with handed.updating():  # of a resume: the engines get the weights of the checkpoint
        pass
    assert inner.filler.version == 0
    assert ray.get(engine.recorded.remote()) == []
    draw(handed)
    with handed.updating():
        pass
    assert inner.filler.version == 1
    assert [call for call in ray.get(engine.recorded.remote()) if isinstance(call, str)] == calls


def test_benchmarks_are_shared_by_the_engines_and_cost_no_rollouts(generator, engines):
    made = generator([], engines=engines)
    requests = [Request(number, [1, 2], 5 + number) for number in range(20)]
    batches = made.sample(requests, {"n": 2, "temperature": 0.6, "top_p": 0.95})
    finished = {each.number: each for each in itertools.chain.from_iterable(batches)}
    assert sorted(finished) == list(range(20))
    for number, each in finished.items():
        assert each.responses == ["0.6 0.95"] * 2
        assert each.tokens == [5 + number] * 2
    sizes = ray.get([each.recorded.remote("sizes") for each in engines])
    assert list(map(sorted, sizes)) == [[2, 8], [2, 8]]  # at most 8 in a call
    assert (made.filler.generated, made.filler.unused()) == (0, 0)


def test_evaluation_samples_come_in_the_order_of_the_data_and_cost_no_rollouts(
    generator, engine, monkeypatch
):
    monkeypatch.setattr(generation, "PROMPTS_A_CALL", 1)
    ray.get(engine.start_over.remote({"1": "3"}))  # the first prompt is answered last
    made = generator([])
    data = SimpleNamespace(prompts=list("123"), labels=["11", "10", "00"], images=[None] * 3)
    made.eval_dataloader = SimpleNamespace(dataset=data)
    samples = made.generate_eval_samples(temperature=0.6, n_samples_per_prompt=2)
    assert [sample.prompts[0] for sample in samples] == list("112233")
    assert [sample.scores.item() for sample in samples] == [1, 1, 1, 0, 0, 0]
    assert {call[2:] for call in ray.get(engine.recorded.remote())} == {(0.6, 2)}
    assert (made.filler.generated, made.filler.unused()) == (0, 0)


@pytest.mark.parametrize("log_probs", [None, [0.0, -0.5, 0.0, -0.25, -4.0]])
def test_a_rollout_of_several_turns_comes_back_from_a_record(log_probs):
    response = {
        "prompt": "2+2=", "label": "4", "observation_tokens": [5, 6, 7, 8, 9], "action_ranges": [(1, 2), (3, 5)],
        "rollout_log_probs": log_probs, "reward": 0.0, "scores": math.nan, "truncated": True,
        "extra_logs": {"format": 0.5},
    }  # fmt: skip

    def made(response):
        return RolloutGenerator._process_response_into_experience(None, response, max_len=4)

    first = made(response)
    prompt = Prompt("2+2=", "4")
    group = generation.Group(prompt, 1, rollouts=(first,), scores=np.array([math.nan]))
    batch = as_recorded(generation.RolloutBatch((group,)))
    [rollout] = batch.trained[0].rollouts
    assert (batch.trained[0].prompt, rollout.tokens.tolist()) == (("2+2=", "4"), [5, 6, 7, 8])
    again = made({**response, **as_response(rollout)})
    for name in (
        "sequences",
        "attention_mask",
        "action_mask",
        "rollout_log_probs",
        "rewards",
        "truncated",
    ):
        before, after = getattr(first, name), getattr(again, name)
        assert before is after or before.tolist() == after.tolist()
    assert first.info.keys() == again.info.keys()
    assert again.info["format"].item() == 0.5


def test_recorded_batches_come_in_their_order_also_after_a_resume_until_a_file_is_damaged(
    generator, tmp_path
):
    labels = ["10", "?1", "01", "11", "10", "00", "01"]
    source = generator(labels, Mixed())  # groups of equal scores are set aside
    recorder = Recorder(tmp_path, {"run": "first", "same": {}})
    batches = []
    for step in (1, 2):
        batches.append(source.generate_samples()[0])
        recorder.write(step, as_recorded(batches[-1]))

    def again(last_step=2, **options):
        options |= {"kind": RecordedGenerator, "record": Record(tmp_path), "last_step": last_step}
        return generator(labels, engines=(), **options)

    def facts(batch):
        groups = [*batch.trained, *batch.filtered]
        return [(group.prompt, group.prompt_id, group.scores.tolist()) for group in groups]

    first = again()
    for number, batch in enumerate(batches, 1):
        same, kept, sent, is_over = first.generate_samples(max_len=8)
        assert str(facts(same)) == str(facts(batch))  # NaN is not NaN
        assert len(same) == len(batch) == BATCH * GROUP
        assert (sent, is_over) == (len(batch.trained) + len(batch.filtered), False)
        assert kept == pytest.approx(100 * BATCH / sent)
        if number == 1:
            snapshot = same.snapshot
    assert not first.filler.sampler.note
    with pytest.raises(BudgetSpent):
        first.generate_samples(max_len=8)
    assert "ends with step 2" in first.filler.sampler.note
    resumed = again()
    resumed.load(snapshot.state, snapshot.place)
    assert str(facts(resumed.generate_samples(max_len=8)[0])) == str(facts(batches[1]))
    short = again(last_step=1)
    short.generate_samples(max_len=8)
    with pytest.raises(BudgetSpent):  # as planned, before the record ends
        short.generate_samples(max_len=8)
    assert not short.filler.sampler.note
    lacking = again(vllms=True)
    lacking.generate_samples(max_len=8)  # the first batch comes with log-probs
    with pytest.raises(RunError, match=r"step-000002.npz lacks log-probs"):
        lacking.generate_samples(max_len=8)
    content = bytearray((tmp_path / "step-000002.npz").read_bytes())
    content[200] ^= 1
    (tmp_path / "step-000002.npz").write_bytes(content)
    resumed = again()
    resumed.load(snapshot.state, snapshot.place)
    with pytest.raises(RunError, match=r"step-000002.npz is damaged .*; copy"):
        resumed.generate_samples(max_len=8)

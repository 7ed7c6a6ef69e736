"""Generation made strict: rewards that are none stop the run, batches are whole. No engine needed."""

import asyncio
import math
from types import SimpleNamespace

import pytest
import torch

from openrlhf_dbb import cpu

cpu.prepare_driver()

from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator  # noqa: E402
from torchdata.stateful_dataloader import StatefulDataLoader  # noqa: E402

from openrlhf_dbb.rollouts import RewardError, StrictExecutor, WholeBatchGenerator  # noqa: E402


class Letters:
    """A tokenizer of one token per character."""

    def __call__(self, text, **_):
        return {"input_ids": torch.tensor([[ord(c) for c in text]])}

    def decode(self, ids, **_):
        return "".join(map(chr, ids))


class Engine:
    """Answers "42" to everything, as vLLM would."""

    async def generate(self, ids, params, multi_modal_data=None):
        answer = SimpleNamespace(token_ids=[ord("4"), ord("2")], finish_reason="stop", logprobs=None)
        return SimpleNamespace(outputs=[answer])


def execute(tmp_path, source):
    """The rollout of prompt "6*7=" scored by a reward function with this body."""
    path = tmp_path / "reward.py"
    path.write_text(f"import torch\ndef reward_func(queries, prompts, labels):\n    {source}\n")
    params = SimpleNamespace(max_tokens=4, logprobs=None)
    executor = StrictExecutor([str(path)])
    return asyncio.run(executor.execute("6*7=", "42", params, 32, Letters(), Engine()))


@pytest.mark.parametrize(
    "source",
    [
        'return {"rewards": torch.tensor([1.0]), "scores": torch.tensor([1.0]), "extra_logs": {}}',
        'return {"rewards": [1], "scores": [True]}',
        'return {"rewards": 1.0}',
        'return {"rewards": float(queries[0] == "6*7=42")}',
    ],
)
def test_rewards_in_the_shapes_people_return_them(tmp_path, source):
    output = execute(tmp_path, source)
    assert (output["reward"], output["scores"], output["extra_logs"]["missing"]) == (1.0, 1.0, 0.0)


@pytest.mark.parametrize("source", ['return {"rewards": None}', 'return {"rewards": [None], "scores": [None]}'])
def test_none_means_missing_and_never_0(tmp_path, source):
    output = execute(tmp_path, source)
    assert math.isnan(output["scores"])
    assert output["extra_logs"]["missing"] == 1.0


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("raise KeyError('gold')", "KeyError: 'gold'"),
        (
            'return {"rewards": [float("nan")]}',
            "returned reward = nan for prompt '6[*]7='; finite numbers are allowed",
        ),
        ('return {"rewards": 1.0, "scores": float("inf")}', "returned scores = inf"),
        ('return {"rewards": ["yes"]}', "returned reward = 'yes'"),
        ("return None", "returned None; a dict with"),
        ('return {"score": 1.0}', "a dict with"),
    ],
)
def test_anything_else_stops_the_run(tmp_path, source, message):
    with pytest.raises(RewardError, match=message):
        execute(tmp_path, source)


class Scripted(WholeBatchGenerator):
    """Real batching over a real data loader; a "rollout" is its prompt, every third prompt is filtered out."""

    def _generate_vllm(self, dataloader_iter, num_prompts, dynamic_filtering, **_):
        accepted, consumed = [], 0
        while len(accepted) < num_prompts * self.args.rollout.n_samples_per_prompt:
            try:
                prompt = next(dataloader_iter)
            except StopIteration:
                return accepted, consumed, True
            consumed += 1
            if not (dynamic_filtering and prompt % 3 == 0):
                accepted += [prompt] * self.args.rollout.n_samples_per_prompt
        return accepted, consumed, False


def generator(cls, prompts, *, filtering=True):
    args = SimpleNamespace(
        rollout=SimpleNamespace(batch_size=4, n_samples_per_prompt=2, vllm_generate_batch_size=4),
        vllm=SimpleNamespace(enable_sleep=False),
        algo=SimpleNamespace(dynamic_filtering_enable=filtering),
    )
    loader = StatefulDataLoader(range(1, prompts + 1), batch_size=1, collate_fn=lambda batch: batch[0])
    return cls(SimpleNamespace(args=args), loader, None, None, [])


def episodes(made, count):
    """Batches as OpenRLHF's fit() draws them over some episodes."""
    batches = []
    for _ in range(count):
        while True:
            samples, _, _, exhausted = made.generate_samples()
            if samples:
                batches.append(samples)
            if exhausted:
                break
    return batches


def test_upstream_emits_a_short_batch_at_the_end_of_an_episode():
    class Upstream(SamplesGenerator):
        _generate_vllm = Scripted._generate_vllm

    # 1..9 without 3, 6, 9 leaves 6 prompts: one batch of 4 and a rest of 2
    assert [len(batch) for batch in episodes(generator(Upstream, 9), 1)] == [8, 4]


def test_batches_are_whole_and_no_group_is_lost_between_episodes():
    made = generator(Scripted, 9)
    batches = episodes(made, 2)
    assert batches == [[1, 1, 2, 2, 4, 4, 5, 5], [7, 7, 8, 8, 1, 1, 2, 2], [4, 4, 5, 5, 7, 7, 8, 8]]
    assert made.held == []


def test_groups_held_over_survive_a_checkpoint():
    first = generator(Scripted, 9)
    episodes(first, 1)
    assert first.held == [7, 7, 8, 8] and first.at_end_of_episode
    second = generator(Scripted, 9)
    second.held = first.held
    assert episodes(second, 1)[0] == [7, 7, 8, 8, 1, 1, 2, 2]


def test_a_data_set_of_whole_batches_is_served_as_it_is():
    made = generator(Scripted, 8, filtering=False)
    assert [batch[::2] for batch in episodes(made, 2)] == [[1, 2, 3, 4], [5, 6, 7, 8]] * 2


@pytest.fixture(scope="module")
def engine_class():
    """A Ray actor in the place of a vLLM engine; responses score by their number, prompt by prompt."""
    import ray

    class Recorder:
        def __init__(self):
            self.calls = []

        def get_num_unfinished_requests(self):
            return 0

        def generate_responses(self, prompt, label, sampling_params, num_samples, **_):
            self.calls.append((prompt, label, sampling_params.temperature, num_samples))
            if label == "broken":
                raise RewardError("the reward function failed")
            return [{"prompt": prompt, "reward": 9.0, "scores": label[i]} for i in range(num_samples)]

        def sleep(self):
            self.calls.append("sleep")

        def wake_up(self):
            self.calls.append("wake up")

        def recorded(self):
            return self.calls

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield ray.remote(Recorder)
    ray.shutdown()


def probing(engines, *, sleep):
    made = generator(WholeBatchGenerator, 4)
    made.vllm_engines = engines
    made.args.vllm.enable_sleep = sleep
    made.args.algo.advantage = SimpleNamespace(is_correction_level="off")
    return made


def rollout(prompt, label):
    return SimpleNamespace(prompts=[prompt], labels=[label], images=[None])


def test_more_responses_are_scored_as_in_training_and_the_engine_sleeps_again(engine_class):
    import ray

    engine = engine_class.remote()
    asked = [rollout("a", [1.0, 0.0, math.nan]), rollout("b", [0.5, None, 1.0])]
    scores = probing([engine], sleep=True).score_more(asked, 3, temperature=0.5, n_samples_per_prompt=8)
    # a score that is absent, unlike a missing one (NaN), leaves the reward
    assert str(scores) == "[[1.0, 0.0, nan], [0.5, 9.0, 1.0]]"
    expected = ["wake up", ("a", asked[0].labels[0], 0.5, 3), ("b", asked[1].labels[0], 0.5, 3), "sleep"]
    assert str(ray.get(engine.recorded.remote())) == str(expected)


def test_a_reward_that_fails_in_a_probe_is_raised_and_an_engine_without_sleep_is_left_awake(engine_class):
    import ray

    engine = engine_class.remote()
    with pytest.raises(RewardError, match="the reward function failed"):
        probing([engine], sleep=False).score_more([rollout("a", "broken")], 2)
    assert ray.get(engine.recorded.remote()) == [("a", "broken", 1.0, 2)]

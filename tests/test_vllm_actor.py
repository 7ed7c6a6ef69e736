"""Rewards made strict: what is no reward stops the run, and a missing one is no 0. No engine needed."""

import asyncio
import math
from types import SimpleNamespace

import pytest
import torch

from openrlhf_dbb.platform import cpu

cpu.prepare_driver()

from vllm.sampling_params import RequestOutputKind  # noqa: E402

from openrlhf_dbb.actors.policy_updates import PolicyUpdates  # noqa: E402
from openrlhf_dbb.actors.rewards import RewardError  # noqa: E402
from openrlhf_dbb.actors.vllm_actor import StrictExecutor, StrictRolloutActor  # noqa: E402
from openrlhf_dbb.evaluation.engines import Finished, Request, SamplingSettings  # noqa: E402


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


class Group:
    """Answers "0", "1", ... to the rollouts of one request, as vLLM does for n of them; keeps requests."""

    def __init__(self):
        self.asked = []

    async def generate(self, ids, params, multi_modal_data=None):
        self.asked.append(("".join(map(chr, ids)), params))
        answers = [
            SimpleNamespace(index=i, token_ids=[48 + i], finish_reason="stop", logprobs=None) for i in range(params.n)
        ]
        return SimpleNamespace(request_id=str(len(self.asked)), outputs=answers)


class Counting(Letters):
    calls = 0

    def __call__(self, text, **rest):
        Counting.calls += 1
        return super().__call__(text, **rest)


SAMPLING = {
    "temperature": 0.5, "top_p": 0.9, "top_k": -1, "max_tokens": 4, "min_tokens": 1, "skip_special_tokens": False,
    "logprobs": None,
}  # fmt: skip
PROMPTS = [("6*7=", "42", None), ("1+1=1+1=", "2", None)]


class WithoutVllm(StrictRolloutActor):
    """An actor whose engine is a function."""

    def __init__(self, executor, generate, updates=0):
        self.executor, self._generate = executor, generate
        self._updates = PolicyUpdates()
        self._updates.count = updates

    async def answer(self, *request):
        began = self._updates.count
        found = await self._generate(*request)
        self._updates.write_down(found, began)
        return found


def groups(executor, generate, *samples, tokenizer=None, max_length=32, updates=0, **changes):
    """What an actor with this engine answers to both prompts; N of each, or of both."""
    samples = samples * 2 if len(samples) == 1 else samples
    actor = WithoutVllm(executor, generate, updates)
    sampling, tokenizer = SAMPLING | changes, tokenizer or Letters()
    call = actor.generate_groups(PROMPTS, sampling, samples, hf_tokenizer=tokenizer, max_length=max_length)
    return asyncio.run(call)


def test_a_group_is_one_request_and_its_prompt_is_tokenized_once(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text("def reward_func(queries, prompts, labels):\n    return {'rewards': [float(queries[0][-1])]}\n")
    engine = Group()
    answers = groups(StrictExecutor([str(path)]), engine.generate, 3, 2, tokenizer=Counting())
    assert [(text, params.n) for text, params in engine.asked] == [("6*7=", 3), ("1+1=1+1=", 2)]
    assert Counting.calls == 2
    assert [[(each["prompt"], each["label"]) for each in group] for group in answers] == [
        [prompt[:2]] * count for prompt, count in zip(PROMPTS, (3, 2), strict=True)
    ]
    assert [[each["reward"] for each in group] for group in answers] == [[0.0, 1.0, 2.0], [0.0, 1.0]]


class Digits(Letters):
    """Knows digits alone: all else becomes "?"."""

    def __call__(self, text, **_):
        return super().__call__("".join(c if c.isdigit() else "?" for c in text))


@pytest.mark.parametrize(("limit", "seen"), [(32, "6*7=0"), (5, "?0")])
def test_a_reward_sees_the_prompt_that_was_given_unless_it_was_truncated(tmp_path, limit, seen):
    path = tmp_path / "reward.py"
    path.write_text(f"def reward_func(queries, prompts, labels):\n    return {{'rewards': queries[0] == {seen!r}}}\n")
    answers = groups(StrictExecutor([str(path)]), Group().generate, 1, tokenizer=Digits(), max_length=limit)
    assert answers[0][0]["reward"] == 1.0


@pytest.mark.parametrize(("given", "limits"), [(4, [4, 4]), (None, [32 - 4, 32 - 8])])
def test_sampling_values_become_vllms_parameters(given, limits):
    engine = Group()
    groups(StrictExecutor([]), engine.generate, 2, max_tokens=given)
    asked = [params for _, params in engine.asked]
    assert [params.max_tokens for params in asked] == limits  # without one: what the prompt leaves of 32 tokens
    assert {(params.n, params.temperature, params.top_p, params.min_tokens) for params in asked} == {(2, 0.5, 0.9, 1)}
    assert {params.output_kind for params in asked} == {RequestOutputKind.FINAL_ONLY}


def test_an_agent_gets_a_request_for_each_rollout():
    class Agent:
        async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images):
            answer = await llm_engine.generate([ord(c) for c in prompt], sampling_params)
            return {"seen": (prompt, label, len(answer.outputs), max_length)}

    engine = Group()
    answers = groups(Agent(), engine.generate, 2)
    seen = [[answer["seen"] for answer in group] for group in answers]
    assert seen == [[("6*7=", "42", 1, 32)] * 2, [("1+1=1+1=", "2", 1, 32)] * 2]
    assert len(engine.asked) == 4


def test_benchmarks_are_sampled_plainly_whatever_the_agent_and_the_reward_are():
    """As the command evaluate samples them: the same parameters, vLLM's own texts, no minimum length."""

    async def generate(ids, params, multi_modal_data=None):
        asked.append((ids, params))
        answers = [
            SimpleNamespace(index=i, token_ids=[5] * (2 + i), finish_reason=("stop", "length")[i], text=f"text {i}")
            for i in range(params.n)
        ]
        return SimpleNamespace(request_id="x", outputs=answers)

    asked = []
    actor = WithoutVllm(None, generate)  # neither an agent nor a reward function is asked
    requests = [Request(7, [1, 2], max_tokens=3), Request(9, [4], max_tokens=3)]
    found = asyncio.run(actor.sample(requests, SamplingSettings(2, 0.6, 0.95)))
    assert found == [Finished(number, ["text 0", "text 1"], [2, 3], [False, True]) for number in (7, 9)]
    assert [ids for ids, _ in asked] == [[1, 2], [4]]
    params = asked[0][1]
    assert (params.n, params.temperature, params.top_p, params.max_tokens) == (2, 0.6, 0.95, 3)
    assert (params.min_tokens, params.skip_special_tokens, params.detokenize, params.logprobs) == (0, True, True, None)


def test_a_rollout_says_which_updates_its_tokens_had_seen(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text("def reward_func(queries, prompts, labels):\n    return {'rewards': [1.0]}\n")
    answers = groups(StrictExecutor([str(path)]), Group().generate, 2, updates=3)
    assert [[each["policy_updates"] for each in group] for group in answers] == [[3, 3], [3, 3]]


def test_the_turns_of_an_agent_count_by_their_tokens_and_its_rollouts_apart():
    """Turn 1 has 1 token, turn 2 has 3; the weights are updated once between them, and once during the second."""

    class Agent:
        async def execute(self, prompt, llm_engine, sampling_params, **_):
            for _ in range(2):
                await llm_engine.generate([ord(c) for c in prompt], sampling_params)
                await asyncio.sleep(0)
            return {}

    turns = {}

    async def generate(ids, params, multi_modal_data=None):
        name = "".join(map(chr, ids))
        turn = turns[name] = turns.get(name, 0) + 1
        if name == PROMPTS[0][0] and turn == 2:  # after its first token
            running = SimpleNamespace(num_output_tokens=lambda: 1)
            actor._updates.note([SimpleNamespace(external_req_id="2", request_index=0, detokenizer=running)])
        response = SimpleNamespace(index=0, token_ids=[1] if turn == 1 else [1, 2, 3])
        return SimpleNamespace(request_id=str(turn), outputs=[response])

    actor = WithoutVllm(Agent(), generate, updates=4)
    call = actor.generate_groups(PROMPTS[:1], SAMPLING, [1], hf_tokenizer=None, max_length=32)
    ((answer,),) = asyncio.run(call)
    # 1 token under 4 updates, then 1 under 4 and 2 under 5
    assert answer["policy_updates"] == (1 * 4 + 1 * 4 + 2 * 5) / 4


def test_a_failed_request_fails_every_rollout_of_the_group():
    async def generate(*_, **__):
        raise RuntimeError("engine is dead")

    with pytest.raises(RuntimeError, match="engine is dead"):
        groups(StrictExecutor([]), generate, 2)


def test_a_tokenizer_travels_by_its_name(tmp_path):
    import pickle

    from openrlhf_dbb import tiny
    from openrlhf_dbb.actors.tokenizers import NamedTokenizer

    tokenizer = tiny.build_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    named = NamedTokenizer(tokenizer, str(tmp_path), True)
    assert named.eos_token_id == tokenizer.eos_token_id
    sent = pickle.dumps(named)
    assert len(sent) < 300
    received = pickle.loads(sent)
    assert received("12+9=")["input_ids"] == tokenizer("12+9=")["input_ids"]
    assert pickle.loads(sent) is received  # loaded once

"""Rewards made strict: what is no reward stops the run, and a missing one is no 0. No engine needed."""

import asyncio
import math
from types import SimpleNamespace

import pytest
import torch

from openrlhf_dbb import cpu

cpu.prepare_driver()

from openrlhf_dbb.actors.vllm_actor import RewardError, StrictExecutor, StrictRolloutActor  # noqa: E402


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
    """Answers "0", "1", ... to the rollouts of one request, as vLLM does for n of them; counts requests."""

    def __init__(self):
        self.asked = []

    async def generate(self, ids, params, multi_modal_data=None):
        self.asked.append((ids, params.n))
        answers = [SimpleNamespace(token_ids=[48 + i], finish_reason="stop", logprobs=None) for i in range(params.n)]
        return SimpleNamespace(outputs=answers)


class Counting(Letters):
    calls = 0

    def __call__(self, text, **rest):
        Counting.calls += 1
        return super().__call__(text, **rest)


def test_a_group_is_one_request_and_its_prompt_is_tokenized_once(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text("def reward_func(queries, prompts, labels):\n    return {'rewards': [float(queries[0][-1])]}\n")
    engine = Group()
    actor = SimpleNamespace(executor=StrictExecutor([str(path)]), generate=engine.generate)
    params = SimpleNamespace(max_tokens=4, logprobs=None, n=1)
    responses = asyncio.run(
        StrictRolloutActor.generate_responses(actor, "6*7=", "42", params, Counting(), num_samples=3, max_length=32)
    )
    assert engine.asked == [([ord(c) for c in "6*7="], 3)]
    assert Counting.calls == 1
    assert [response["reward"] for response in responses] == [0.0, 1.0, 2.0]
    assert params.n == 1  # the next prompt's


def test_a_failed_request_fails_every_rollout_of_the_group(tmp_path):
    class Broken:
        async def generate(self, *_, **__):
            raise RuntimeError("engine is dead")

    actor = SimpleNamespace(executor=StrictExecutor([]), generate=Broken().generate)
    params = SimpleNamespace(max_tokens=4, logprobs=None, n=1)
    with pytest.raises(RuntimeError, match="engine is dead"):
        asyncio.run(
            StrictRolloutActor.generate_responses(actor, "6*7=", "42", params, Letters(), num_samples=2, max_length=32)
        )


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

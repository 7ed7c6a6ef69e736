"""Rewards made strict: what is no reward stops the run, and a missing one is no 0. No engine needed."""

import asyncio
import math
import re
from types import SimpleNamespace

import pytest

from openrlhf_dbb.platform import cpu

cpu.prepare_driver()

import ray  # noqa: E402
from openrlhf.utils.agent import SingleTurnAgentExecutor  # noqa: E402

from openrlhf_dbb import tiny  # noqa: E402
from openrlhf_dbb.actors.vllm_actor import StrictRolloutActor  # noqa: E402
from openrlhf_dbb.errors import RunError  # noqa: E402
from openrlhf_dbb.platform.actor_start import reason_of_failure, started_actors  # noqa: E402


class Letters:
    """A tokenizer of one token per character."""

    def __call__(self, text, **_):
        return {"input_ids": [ord(c) for c in text]}

    def decode(self, ids, **_):
        return "".join(map(chr, ids))


class Engine:
    """Answers "0", "1", ... to the rollouts of one request, as vLLM does for n of them; keeps requests."""

    def __init__(self):
        self.asked = []

    async def generate(self, ids, params, multi_modal_data=None):
        self.asked.append(("".join(map(chr, ids)), params))
        more = {"finish_reason": "stop", "logprobs": None}
        answers = [SimpleNamespace(index=i, token_ids=[48 + i], **more) for i in range(params.n)]
        return SimpleNamespace(request_id=str(len(self.asked)), outputs=answers)


SAMPLING = {
    "temperature": 0.5, "top_p": 0.9, "top_k": -1, "max_tokens": 4, "min_tokens": 1, "skip_special_tokens": False,
    "logprobs": None,
}  # fmt: skip
PROMPTS = [("6*7=", "42", None), ("1+1=1+1=", "2", None)]


def groups(
    executor, generate, samples, *, tokenizer=None, max_length=32, prompts=PROMPTS, **changes
):
    """What an actor with this engine answers to the prompts."""
    actor = StrictRolloutActor.__new__(StrictRolloutActor)
    actor.executor = executor
    actor.generate = generate
    actor.use_tokenizer(tokenizer or Letters())
    return asyncio.run(actor.generate_groups(prompts, SAMPLING | changes, samples, max_length))


def rewarded(tmp_path, source):
    """An executor with a reward function of this body."""
    path = tmp_path / "reward.py"
    path.write_text(f"import torch\ndef reward_func(queries, prompts, labels):\n    {source}\n")
    return SingleTurnAgentExecutor([str(path)])


def execute(tmp_path, source):
    """The rollout of prompt "6*7=", with the response "0", scored by a reward function with this body."""
    return groups(rewarded(tmp_path, source), Engine().generate, 1, prompts=PROMPTS[:1])[0][0]


def test_a_reward_is_also_the_score_unless_there_is_another(tmp_path):
    output = execute(
        tmp_path, 'return {"rewards": torch.tensor([1.0]), "scores": [0.5], "extra_logs": {"a": 2}}'
    )
    assert (output["reward"], output["scores"], output["extra_logs"]) == (1.0, 0.5, {"a": 2})
    assert (
        execute(tmp_path, 'return {"rewards": [0], "read": ["no answer: no tag"]}')["read"]
        == "no answer: no tag"
    )
    assert execute(tmp_path, 'return {"rewards": float(queries[0] == "6*7=0")}')["scores"] == 1.0


@pytest.mark.parametrize(
    "source", ['return {"rewards": None}', 'return {"rewards": [None], "scores": [None]}']
)
def test_none_means_missing_and_never_0(tmp_path, source):
    output = execute(tmp_path, source)
    assert math.isnan(output["scores"]) and output["reward"] == 0


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "raise KeyError('gold')",
            r"failed: KeyError: 'gold' \(reward.py, line 3\); on prompt '6[*]7='$",
        ),
        ("return None", "returned None; return .*; on prompt '6[*]7='$"),
    ],
)
def test_anything_else_stops_the_run(tmp_path, source, message):
    with pytest.raises(RunError, match=f"^reward_func of reward.py {message}"):
        execute(tmp_path, source)


@pytest.fixture
def three_a_group(tmp_path):
    """The groups of three samples of each of ``PROMPTS``, and what the engine was asked for."""
    executor = rewarded(tmp_path, "return {'rewards': [float(queries[0][-1])]}")
    engine = Engine()
    answers = groups(executor, engine.generate, 3)
    return answers, [(text, params.n) for text, params in engine.asked]


def test_a_group_is_one_request(three_a_group):
    _, asked = three_a_group
    assert asked == [("6*7=", 3), ("1+1=1+1=", 3)]


def test_each_sample_of_a_group_has_its_prompt_its_reward_and_its_tokens(three_a_group):
    answers, _ = three_a_group
    assert len(answers) == len(PROMPTS)
    for group, prompt in zip(answers, PROMPTS, strict=True):
        assert [(each["prompt"], each["label"]) for each in group] == [prompt[:2]] * 3
        assert [each["reward"] for each in group] == [0.0, 1.0, 2.0]
    last = answers[0][2]
    assert last["observation_tokens"] == [*map(ord, "6*7=2")]
    assert last["action_ranges"] == [(4, 5)]


def test_log_probs_stand_at_the_tokens_that_were_generated():
    async def generate(ids, params, multi_modal_data=None):
        log_probs = [{48: SimpleNamespace(logprob=-0.5)}, {50: SimpleNamespace(logprob=-2.0)}]
        response = SimpleNamespace(
            index=0, token_ids=[48, 50], finish_reason="length", logprobs=log_probs
        )
        return SimpleNamespace(request_id="x", outputs=[response])

    [[rollout]] = groups(SingleTurnAgentExecutor(), generate, 1, prompts=PROMPTS[:1], logprobs=1)
    assert rollout["rollout_log_probs"] == [0, 0, 0, 0, -0.5, -2.0]
    assert (rollout["truncated"], rollout["reward"]) == (
        True,
        None,
    )  # no reward function: a reward model scores later


class Digits(Letters):
    """Knows digits alone: all else becomes "?"."""

    def __call__(self, text, **_):
        return super().__call__("".join(c if c.isdigit() else "?" for c in text))


@pytest.mark.parametrize(("limit", "seen"), [(32, "6*7=0"), (5, "?0")])
def test_a_reward_sees_the_prompt_that_was_given_unless_it_was_truncated(tmp_path, limit, seen):
    executor = rewarded(tmp_path, f"return {{'rewards': queries[0] == {seen!r}}}")
    answers = groups(executor, Engine().generate, 1, tokenizer=Digits(), max_length=limit)
    assert answers[0][0]["reward"] == 1.0


@pytest.mark.parametrize(("given", "limits"), [(4, [4, 4]), (None, [32 - 4, 32 - 8])])
def test_sampling_values_become_vllms_parameters(given, limits):
    engine = Engine()
    groups(SingleTurnAgentExecutor(), engine.generate, 2, max_tokens=given)
    asked = [params for _, params in engine.asked]
    # Without one: what the prompt leaves of 32 tokens
    assert [params.max_tokens for params in asked] == limits
    assert {
        (params.n, params.temperature, params.top_p, params.min_tokens) for params in asked
    } == {(2, 0.5, 0.9, 1)}


def reason(**arguments):
    """Why an actor's engine did not start: without arguments by the log of an H200, else by vLLM itself."""

    class Engineless:
        def __init__(self, **arguments):
            with reason_of_failure():
                if arguments:
                    import vllm

                    vllm.AsyncLLMEngine.from_engine_args(vllm.AsyncEngineArgs(**arguments))
                said = "(EngineCore pid=6094) ERROR 11-27 23:12:19 [core.py:1374] "
                print(
                    f"{said}EngineCore failed to start.\n{said}AssertionError: Error in memory profiling.",
                    flush=True,
                )
                raise RuntimeError("Engine core initialization failed. See root cause above.")

    with pytest.raises(RunError) as raised, started_actors():
        ray.get(ray.remote(Engineless).remote(**arguments).__ray_ready__.remote())
    return str(raised.value)


def test_an_engine_that_does_not_start_gives_its_reason(ray_node):
    assert re.match(r"vLLM did not start: AssertionError: .*memory profiling", reason())


@pytest.mark.long
def test_an_engine_process_gives_its_reason(ray_node):
    """vLLM's own process and log, as on CUDA; on the processor a share of the memory is what it asks for."""
    small = {
        "max_model_len": 32,
        "gpu_memory_utilization": 1e-6,
        "enforce_eager": True,
        "dtype": "float32",
    }
    said = reason(model=str(tiny.prepare(tiny.default_folder()).model), **small)
    assert said.startswith("vLLM did not start: ValueError: ") and "memory" in said


@pytest.mark.parametrize(("gives_up_weights", "expected"), [(True, [2, 2]), (False, [1, 2])])
def test_an_engine_keeps_its_weights_in_sleep_unless_they_are_sent_anew(gives_up_weights, expected):
    """vLLM copies weights to main memory at level 1, and gives them up at level 2."""

    async def sleep(*, level):
        levels.append(level)

    levels = []
    actor = StrictRolloutActor.__new__(StrictRolloutActor)
    actor._gives_up_weights = gives_up_weights
    actor.llm = SimpleNamespace(sleep=sleep)
    asyncio.run(actor.sleep())
    asyncio.run(actor.sleep(level=2))
    assert levels == expected

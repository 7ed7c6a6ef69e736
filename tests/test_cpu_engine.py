"""vLLM's engine in this process, on the tiny model: responses, pauses, cancellation and failures."""

import asyncio
import re

import pytest
import torch

from openrlhf_dbb import tiny
from openrlhf_dbb.platform import cpu

if not cpu.active():
    pytest.skip("where there is CUDA, vLLM's own engine is used", allow_module_level=True)

PROMPT = {"prompt_token_ids": [1, 2, 3]}


@pytest.fixture(scope="module")
def engine(request):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in cpu.worker_environment().items():
            patch.setenv(name, value)
        from vllm import EngineArgs
        from vllm.distributed import cleanup_dist_env_and_memory

        from openrlhf_dbb.platform.cpu_engine import InProcessEngine

        arguments = {
            "model": str(tiny.prepare(tiny.default_folder()).model),
            "max_model_len": 64,
            "seed": 1,
            "enforce_eager": True,
            "distributed_executor_backend": "uni",
        }
        arguments["dtype"] = getattr(request, "param", "float32")
        # vLLM puts another function there
        patch.setattr(torch, "set_num_threads", torch.set_num_threads)
        torch.set_num_threads(1)  # OMP_NUM_THREADS comes too late in this process
        yield InProcessEngine(EngineArgs(**cpu.engine_arguments(arguments)))
        cleanup_dist_env_and_memory()


def params(**values):
    from vllm import SamplingParams

    return SamplingParams(**{"max_tokens": 8, "ignore_eos": True, **values})


async def answers(engine, name, **values):
    return [answer async for answer in engine.generate(PROMPT, params(**values), request_id=name)]


def unfinished(engine):
    return engine.output_processor.get_num_unfinished_requests()


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


def test_concurrent_requests_share_their_steps_and_each_gets_all_its_responses(engine, monkeypatch):
    steps = []
    step = engine._engine.step
    monkeypatch.setattr(engine._engine, "step", lambda: steps.append(unfinished(engine)) or step())

    async def several():
        await engine.pause_generation(mode="keep")
        asked = asyncio.gather(*(answers(engine, f"several {i}", n=1 + i) for i in range(4)))
        await until(lambda: unfinished(engine) == 10)
        await engine.resume_generation()
        return await asked

    for i, got in enumerate(asyncio.run(several())):
        [answer] = got
        assert answer.finished
        assert answer.prompt_token_ids == [1, 2, 3]
        assert [len(output.token_ids) for output in answer.outputs] == [8] * (1 + i)
    assert steps == [10] * 8  # 1 + 2 + 3 + 4 responses of 8 tokens, a token of each in a step
    assert unfinished(engine) == 0


def test_a_worker_s_method_and_a_function_are_called_between_steps(engine):
    def seed(worker, value):
        torch.manual_seed(value)
        return worker.rank

    async def calls():
        running = asyncio.create_task(answers(engine, "running", max_tokens=50))
        await until(lambda: unfinished(engine) == 1)
        ranks = await engine.collective_rpc(seed, args=(3,))
        assert not running.done()
        await running
        with pytest.raises(NotImplementedError, match="no_such_method"):
            await engine.collective_rpc("no_such_method")
        assert not await engine.is_sleeping()
        samples = []
        for _ in range(2):
            await engine.collective_rpc(seed, args=(3,))
            assert await engine.reset_prefix_cache()
            samples.append((await answers(engine, "sample", n=4))[0])
        return ranks, [[output.token_ids for output in sample.outputs] for sample in samples]

    ranks, (first, second) = asyncio.run(calls())
    assert ranks == [0]
    assert first == second


def test_a_cancelled_request_is_aborted_with_all_its_responses(engine):
    async def cancel():
        task = asyncio.create_task(answers(engine, "cancelled", n=3, max_tokens=60))
        other = asyncio.create_task(answers(engine, "other", max_tokens=60))
        await until(lambda: unfinished(engine) == 4)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: unfinished(engine) == 1)
        return (await other)[0]

    assert len(asyncio.run(cancel()).outputs[0].token_ids) == 60
    assert unfinished(engine) == 0


def negate(worker):
    """Change weights that the keys, values and logits depend on. A second call restores them."""
    model = worker.get_model().model
    for weight in (model.norm.weight, model.layers[0].self_attn.qkv_proj.weight):
        weight.data.neg_()


async def greedy(engine, name, tokens, count):
    """Return the tokens that follow these with the current weights."""
    assert await engine.reset_prefix_cache()  # of other weights
    prompt = {"prompt_token_ids": tokens}
    [answer] = [
        each
        async for each in engine.generate(prompt, params(temperature=0, max_tokens=count), name)
    ]
    return answer.outputs[0].token_ids


def test_weights_that_change_in_a_pause_give_the_tokens_after_it_and_none_before(
    engine, monkeypatch
):
    prompt = PROMPT["prompt_token_ids"]
    made = []
    step = engine._engine.step
    monkeypatch.setattr(engine._engine, "step", lambda: made.append(1) or step())

    async def update():
        old = await greedy(engine, "old", prompt, 50)
        made.clear()
        running = asyncio.create_task(answers(engine, "updated", temperature=0, max_tokens=50))
        await until(lambda: len(made) > 3)
        await engine.pause_generation(mode="keep")
        assert await engine.is_sleeping()
        before = len(made)  # a token in each step
        await engine.collective_rpc(negate)
        await asyncio.sleep(0.1)
        assert len(made) == before < 50
        await engine.resume_generation()
        async with asyncio.timeout(10):
            [answer] = await running
        new = await greedy(engine, "new", prompt + old[:before], 50 - before)
        unchanged = await greedy(engine, "unchanged", prompt, 50)
        await engine.collective_rpc(negate)
        assert await greedy(engine, "old again", prompt, 50) == old
        return answer.outputs[0].token_ids, old[:before] + new, old, unchanged

    tokens, expected, *others = asyncio.run(update())
    # After the pause all keys and values are those of the new weights too, as if the old tokens were a prompt.
    assert tokens == expected
    assert tokens not in others


def test_a_request_that_vllm_refuses_fails_alone(engine):
    from vllm.exceptions import VLLMValidationError

    async def too_long():
        long = {"prompt_token_ids": [1] * 65}
        good = asyncio.create_task(answers(engine, "good"))
        with pytest.raises(VLLMValidationError, match="maximum context length is 64 tokens"):
            await anext(engine.generate(long, params(), request_id="too long"))
        return await good

    [answer] = asyncio.run(too_long())
    assert answer.finished


@pytest.mark.parametrize(
    ("engine", "shared"), [("float32", 48), ("bfloat16", 32)], indirect=["engine"]
)
def test_a_group_s_prompt_is_computed_once_but_for_its_last_block(engine, shared, monkeypatch):
    scheduler = engine._engine.engine_core.engine_core.scheduler
    sizes = []
    schedule = scheduler.schedule

    def counted(*args):
        planned = schedule(*args)
        sizes.append(planned.total_num_scheduled_tokens)
        return planned

    monkeypatch.setattr(scheduler, "schedule", counted)

    async def group():
        assert await engine.reset_prefix_cache()
        prompt = {"prompt_token_ids": [1, 2, 3, 4] * 15}
        return [each async for each in engine.generate(prompt, params(n=8, max_tokens=2), "group")]

    asyncio.run(group())
    assert sizes == [60 + 7 * (60 - shared), 8]  # blocks of 16 tokens, and of 32


def test_tokens_are_sampled_in_proportion_to_their_probabilities(engine):
    from vllm.v1.sample.ops import topk_topp_sampler

    torch.manual_seed(4)
    shares = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.2, 0.0])
    rows = 40_000
    tokens = topk_topp_sampler.compiled_random_sample(shares.log().expand(rows, -1).clone())
    counts = torch.bincount(tokens, minlength=6)
    assert ((counts - rows * shares).abs() <= 4 * (rows * shares * (1 - shares)).sqrt()).all()


def test_norms_are_vllm_s_to_the_rounding_of_bfloat16(engine):
    def both(worker):
        layer = worker.get_model().model.layers[0].input_layernorm
        x, residual = torch.randn(2, 5, layer.hidden_size).bfloat16()
        alone = [norm(x.clone()) for norm in (layer, layer.forward_native)]
        # Both in place
        summed = [norm(x.clone(), residual.clone()) for norm in (layer, layer.forward_native)]
        return layer._forward_method.__name__, [alone, *zip(*summed, strict=True)]

    [(name, pairs)] = asyncio.run(engine.collective_rpc(both))
    assert name == "_normed"
    for mine, theirs in pairs:
        # The operations of torch round twice
        torch.testing.assert_close(mine, theirs, rtol=2**-6, atol=0)


def test_a_failed_step_fails_every_request_that_waits_and_every_later_one(engine, monkeypatch):
    """Has to be the last test: the engine does not work after it."""
    step = engine._engine.step

    def third_step_fails(made=iter(range(3))):  # noqa: B008
        return step() if next(made) < 2 else 1 / 0

    monkeypatch.setattr(engine._engine, "step", third_step_fails)

    async def ask(*names):
        async with asyncio.timeout(10):
            return await asyncio.gather(
                *(answers(engine, name, n=2) for name in names), return_exceptions=True
            )

    for names in (("one", "two", "three"), ("later",)):
        failures = asyncio.run(ask(*names))
        assert len(failures) == len(names)
        for failure in failures:
            assert re.search(r"vLLM.*ZeroDivisionError\('division by zero'\)", str(failure))
            assert isinstance(failure.__cause__, ZeroDivisionError)

"""Parameters in buckets: which are together, and that every byte comes out as it went in."""

from types import SimpleNamespace

import pytest
import torch

from openrlhf_dbb.platform import shims
from openrlhf_dbb.platform.weight_buckets import Parameter, buckets, empty, pack, unpack

WEIGHTS = {
    "odd": torch.tensor([1.5, -2.0, 3.0], dtype=torch.bfloat16),  # 6 bytes
    "wide": torch.tensor([[1.0, 1e-30], [float("inf"), -0.0]]),  # 16 bytes
    "scalar": torch.tensor(7.0, dtype=torch.float64),
    "transposed": torch.arange(6, dtype=torch.float16).view(2, 3).t(),
}


def parameters(weights=WEIGHTS):
    return [Parameter(name, weight.dtype, tuple(weight.shape)) for name, weight in weights.items()]


def test_weights_of_several_dtypes_come_out_as_they_went_in():
    packed = pack(parameters(), WEIGHTS)
    assert packed.dtype == torch.uint8
    assert packed.shape == empty(parameters(), "cpu").shape == (64,)  # each takes up a multiple of 16 bytes
    found = list(unpack(parameters(), packed.clone()))
    assert [name for name, _ in found] == ["odd", "wide", "scalar", "transposed"]
    for name, weight in found:
        assert weight.dtype == WEIGHTS[name].dtype
        torch.testing.assert_close(weight, WEIGHTS[name], rtol=0, atol=0)


def test_a_trained_parameter_is_packed_without_its_gradient():
    weight = torch.nn.Parameter(torch.ones(2))
    assert not pack(parameters({"w": weight}), {"w": weight}).requires_grad


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (80, [["a", "b", "c", "d"]]),
        (64, [["a", "b", "c"], ["d"]]),
        (48, [["a", "b"], ["c", "d"]]),
        (32, [["a"], ["b"], ["c", "d"]]),
        (16, [["a"], ["b"], ["c"], ["d"]]),  # b alone is larger than a bucket
    ],
)
def test_buckets_keep_the_order_and_their_size(limit, expected):
    sizes = {"a": 16, "b": 32, "c": 1, "d": 8}  # bytes, of which c and d take up 16 each
    made = buckets([Parameter(name, torch.uint8, (size,)) for name, size in sizes.items()], limit)
    assert [[parameter.name for parameter in bucket] for bucket in made] == expected


def test_no_parameters_make_no_bucket():
    assert buckets([]) == []


@pytest.mark.parametrize("method", ["update_weight", "update_weight_cuda_ipc"])
def test_a_parameter_that_vllm_ignores_is_an_error_where_openrlhf_drops_the_answer(monkeypatch, method):
    shims.add()
    from openrlhf.trainer.ray.vllm_worker_wrap import WorkerWrap

    from openrlhf_dbb.platform.vllm_worker import BucketWorker

    class Model(torch.nn.Module):
        def load_weights(self, weights):
            return {name for name, _ in weights if name == "known"}

    def upstreams(worker, name, dtype, shape, **rest):
        sent.append(rest)
        worker.model_runner.model.load_weights(weights=[(name, torch.zeros(shape, dtype=dtype))])

    sent = []
    monkeypatch.setattr(WorkerWrap, method, upstreams)
    worker = BucketWorker()
    worker.model_runner = SimpleNamespace(model=Model())
    getattr(worker, method)("known", torch.float32, (2, 3), empty_cache=True)
    assert sent == [{"empty_cache": True}]
    with pytest.raises(RuntimeError, match=r"vLLM's model loaded nothing from parameter 'lost' \(2, 3\)"):
        getattr(worker, method)("lost", torch.float32, (2, 3))
    assert worker.model_runner.model.load_weights([("known", None)]) == {"known"}  # as before

"""The policy's weights in buckets: which parameters share a bucket, and that the receiver gets every byte."""

from types import SimpleNamespace

import pytest
import torch

from openrlhf_dbb.platform.weights import Parameter, Receiver, buckets, empty, pack, unpack

WEIGHTS = {
    "odd": torch.tensor([1.5, -2.0, 3.0], dtype=torch.bfloat16),  # 6 bytes
    "wide": torch.tensor([[1.0, 1e-30], [float("inf"), -0.0]]),  # 16 bytes
    "scalar": torch.tensor(7.0, dtype=torch.float64),
    "transposed": torch.arange(6, dtype=torch.float16).view(2, 3).t(),
}


def parameters(weights=WEIGHTS):
    return [Parameter(name, weight.dtype, tuple(weight.shape)) for name, weight in weights.items()]


def test_weights_of_several_dtypes_come_out_unchanged():
    packed = pack(parameters(), WEIGHTS)
    assert packed.dtype == torch.uint8
    assert packed.shape == empty(parameters(), "cpu").shape == (6 + 16 + 8 + 12,)
    unpacked = dict(unpack(parameters(), packed.clone()))
    assert list(unpacked) == ["odd", "wide", "scalar", "transposed"]
    for name, weight in unpacked.items():
        assert weight.dtype == WEIGHTS[name].dtype
        torch.testing.assert_close(weight, WEIGHTS[name], rtol=0, atol=0)


def test_a_trained_parameter_is_packed_without_its_gradient():
    weight = torch.nn.Parameter(torch.ones(2))
    assert not pack(parameters({"w": weight}), {"w": weight}).requires_grad


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (57, [["a", "b", "c", "d"]]),
        (49, [["a", "b", "c"], ["d"]]),
        (48, [["a", "b"], ["c", "d"]]),
        (8, [["a"], ["b"], ["c"], ["d"]]),  # a and b are larger than a bucket
    ],
)
def test_buckets_keep_the_order_and_their_size(limit, expected):
    sizes = {"a": 16, "b": 32, "c": 1, "d": 8}  # bytes
    filled = buckets([Parameter(name, torch.uint8, (size,)) for name, size in sizes.items()], limit)
    assert [[parameter.name for parameter in bucket] for bucket in filled] == expected


def receives(load_weights):
    receiver = Receiver()
    receiver.device = torch.device("cuda", 3)
    receiver.model_config = SimpleNamespace(dtype=torch.bfloat16)
    receiver.model_runner = SimpleNamespace(model=SimpleNamespace(load_weights=load_weights))
    return receiver


def test_a_parameter_that_vllm_ignores_is_an_error_each_time():
    loaded = []

    def load_weights(weights):
        names = [name for name, _ in weights if name != "lost"]
        loaded.append(names)
        return set(names)

    receiver = receives(load_weights)
    weights = [("a", torch.ones(1)), ("b", torch.ones(2))]
    receiver.load(weights)
    receiver.load(weights)
    assert loaded == [["a"], ["b"], ["a", "b"]]  # one by one, until the names are known
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"loaded nothing from 'lost' \(2, 3\)"):
            receiver.load([*weights, ("lost", torch.ones(2, 3))])


def test_a_weight_in_the_policys_memory_is_loaded_and_one_that_vllm_ignores_is_an_error(monkeypatch):
    monkeypatch.setattr("openrlhf.trainer.ray.utils.get_physical_gpu_id", lambda: "this GPU")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    loaded = {}

    def load_weights(weights):
        loaded.update((name, weight) for name, weight in weights if name != "lost")
        return set(loaded) & {name for name, _ in weights}

    def rebuild(*values):  # torch's function has the number of the GPU in the seventh place
        return torch.tensor(values, dtype=torch.float32)

    receiver = receives(load_weights)
    handles = {"another GPU": None, "this GPU": (rebuild, (0, 1, 2, 3, 4, 5, 99, 7))}
    receiver.update_weight_cuda_ipc("a", torch.float32, (8,), handles)
    assert loaded["a"].tolist() == [0, 1, 2, 3, 4, 5, 3, 7] and loaded["a"].dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match=r"loaded nothing from 'lost' \(8,\)"):
        receiver.update_weight_cuda_ipc("lost", torch.float32, (8,), handles)

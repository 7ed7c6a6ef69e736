"""The policy's weights in buckets: which parameters share a bucket, and that the receiver gets every byte."""

from types import SimpleNamespace

import pytest
import torch

from openrlhf_dbb.platform.weights import Parameter, Receiver, buckets, pack, unpack

WEIGHTS = {
    "odd": torch.tensor([1.5, -2.0, 3.0], dtype=torch.bfloat16),  # 6 bytes
    "wide": torch.nn.Parameter(torch.tensor([[1.0, 1e-30], [float("inf"), -0.0]])),  # 16 bytes
    "scalar": torch.tensor(7.0, dtype=torch.float64),
    "transposed": torch.arange(6, dtype=torch.float16).view(2, 3).t(),
}


def test_weights_of_several_dtypes_come_out_unchanged():
    bucket = [
        Parameter(name, weight.dtype, tuple(weight.shape)) for name, weight in WEIGHTS.items()
    ]
    packed = pack(bucket, WEIGHTS)
    assert (packed.dtype, packed.shape, packed.requires_grad) == (
        torch.uint8,
        (6 + 16 + 8 + 12,),
        False,
    )
    unpacked = dict(unpack(bucket, packed.clone()))
    assert list(unpacked) == list(WEIGHTS)
    for name, weight in unpacked.items():
        torch.testing.assert_close(weight, WEIGHTS[name].detach(), rtol=0, atol=0)  # dtypes too
    assert pack(bucket[:1], WEIGHTS).data_ptr() == WEIGHTS["odd"].data_ptr()  # alone it is no copy


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (49, [["a", "b", "c"], ["d"]]),
        (48, [["a", "b"], ["c", "d"]]),
        (8, [["a"], ["b"], ["c"], ["d"]]),  # a and b are larger than a bucket
    ],
)
def test_buckets_keep_the_order_and_their_size(limit, expected):
    sizes = {"a": 16, "b": 32, "c": 1, "d": 8}  # bytes
    filled = buckets([Parameter(name, torch.uint8, (size,)) for name, size in sizes.items()], limit)
    assert [[parameter.name for parameter in bucket] for bucket in filled] == expected


@pytest.fixture
def receiver():
    """A receiver whose model ignores a weight called "lost"; ``loaded`` has the weights of each call."""
    made = Receiver()
    made.loaded = []

    def load_weights(weights):
        made.loaded.append({name: weight for name, weight in weights if name != "lost"})
        return set(made.loaded[-1])

    made.device = torch.device("cuda", 3)
    made.model_config = SimpleNamespace(dtype=torch.bfloat16)
    made.model_runner = SimpleNamespace(model=SimpleNamespace(load_weights=load_weights))
    return made


def test_a_parameter_that_vllm_ignores_is_an_error_each_time(receiver):
    weights = [("a", torch.ones(1)), ("b", torch.ones(2))]
    receiver.load(weights)
    receiver.load(weights)
    assert [list(names) for names in receiver.loaded] == [
        ["a"],
        ["b"],
        ["a", "b"],
    ]  # one by one, until all are known
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"loaded nothing from 'lost' \(2, 3\)"):
            receiver.load([*weights, ("lost", torch.ones(2, 3))])


def test_a_weight_in_the_policys_memory_is_loaded_and_one_that_vllm_ignores_is_an_error(
    receiver, monkeypatch
):
    monkeypatch.setattr("openrlhf.trainer.ray.utils.get_physical_gpu_id", lambda: "this GPU")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def rebuild(*values):  # torch's function has the number of the GPU in the seventh place
        return torch.tensor(values, dtype=torch.float32)

    handles = {"another GPU": None, "this GPU": (rebuild, (0, 1, 2, 3, 4, 5, 99, 7))}
    receiver.update_weight_cuda_ipc("a", torch.float32, (8,), handles)
    [[weight]] = [loaded.values() for loaded in receiver.loaded]
    assert weight.tolist() == [0, 1, 2, 3, 4, 5, 3, 7] and weight.dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match=r"loaded nothing from 'lost' \(8,\)"):
        receiver.update_weight_cuda_ipc("lost", torch.float32, (8,), handles)


def test_a_bucket_in_the_policys_memory_is_loaded_on_this_gpu(receiver, monkeypatch):
    monkeypatch.setattr("openrlhf.trainer.ray.utils.get_physical_gpu_id", lambda: "this GPU")
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(len(receiver.loaded)))
    bucket = [
        Parameter(name, weight.dtype, tuple(weight.shape)) for name, weight in WEIGHTS.items()
    ]
    packed = pack(bucket, WEIGHTS)
    places = []

    def rebuild(*values):
        places.append(values[6])
        return packed

    handles = {"another GPU": None, "this GPU": (rebuild, tuple(range(8)))}
    receiver.receive_weights([tuple(parameter) for parameter in bucket], handles)
    assert places == [3]  # the number that this process gives the GPU
    got = {name: weight for weights in receiver.loaded for name, weight in weights.items()}
    assert {name: weight.tolist() for name, weight in got.items()} == {
        name: weight.detach().to(torch.bfloat16).tolist() for name, weight in WEIGHTS.items()
    }
    assert waited == [4]  # the policy may free its memory only after all are loaded

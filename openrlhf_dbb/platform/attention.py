"""Which attention the policy is trained with on CUDA, and the proof that it computes what it should.

Chosen by what is installed and what the GPU is, without an import of torch: a compiled flash-attn 2, else flash-attn 4
(kernels made at run time, without nvcc) where the GPU has them, else torch's own (``sdpa``). Before the first training
on a kind of GPU, a process of its own then trains two layers of the model with it and with ``sdpa``, and compares.

    python -m openrlhf_dbb.platform.attention NAME MODEL    one JSON object; exit code 0 if they agree
"""

from __future__ import annotations

import copy
import hashlib
import importlib.metadata
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from openrlhf_dbb.platform import machine, shims, user_cache

FLASH_2, FLASH_4, TORCH = "flash_attention_2", "flash_attention_4", "sdpa"
_GPUS = {FLASH_2: range(8, 10), FLASH_4: range(9, 12)}
"""Major compute capabilities that each has kernels for: 8 Ampere and Ada, 9 Hopper, 10 and 11 Blackwell."""
LENGTHS = (7, 64, 130, 33)
"""Of the samples that are packed, in tokens; on either side of a kernel's tile."""
TOLERANCE = 3.0
"""An attention may be this many times as far from 32 bits as ``sdpa`` is, both in bfloat16."""
TIMEOUT_S = 600.0
_VERSIONS = ("torch", "transformers", "flash-attn", "flash-attn-4", "nvidia-cutlass-dsl")


@dataclass(frozen=True)
class Checked:
    """What a check found.

    Attributes:
        ok: whether the attention computes what it should.
        error: why not.
        largest_difference: of log-probabilities and gradients to those in 32 bits, relative to the largest value.
        rounding: the same of ``sdpa``.
        seconds: it took, with the making of kernels.
    """

    ok: bool
    error: str | None
    largest_difference: float | None
    rounding: float | None
    seconds: float


def packs(name: str) -> bool:
    """Whether the attention takes packed samples at no cost; others make a mask of all tokens by all tokens."""
    return "flash" in name


def choose(gpus: Sequence[machine.Gpu]) -> tuple[str, str]:
    """The attention to train with on these GPUs, and why."""
    reasons = [why for name in (FLASH_2, FLASH_4) if (why := unavailable(name, gpus))]
    for name in (FLASH_2, FLASH_4):
        if unavailable(name, gpus) is None:
            return name, f"CUDA, {name} is installed"
    return TORCH, f"CUDA, {'; '.join(reasons)}"


def unavailable(name: str, gpus: Sequence[machine.Gpu]) -> str | None:
    """Why an attention cannot be had; None if it can, or if this does not know it."""
    if name == FLASH_2 and not shims.is_real("flash_attn_2_cuda"):
        return "no compiled flash-attn is installed"
    if name == FLASH_4 and not _installed("flash-attn-4"):
        return "flash-attn-4 is not installed"
    for gpu in gpus:
        if name in _GPUS and gpu.capability[0] not in _GPUS[name]:
            return f"{name} has no kernels for {gpu.name} (compute capability {gpu.capability[0]}.{gpu.capability[1]})"
    return None


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def checked(name: str, model: str, gpu: machine.Gpu) -> Checked:
    """:func:`check` in a process of its own; what it found before for such a GPU, model and software is kept.

    Args:
        name: the attention.
        model: folder or hub name of the model to be trained.
        gpu: of the kind that it will be trained on.
    """
    versions = [importlib.metadata.version(package) for package in _VERSIONS if _installed(package)]
    key = hashlib.sha256(json.dumps([name, _shape(model), gpu.name, *versions]).encode()).hexdigest()[:16]
    file = user_cache.folder() / "attention" / f"{name}-{key}.json"
    if file.is_file():
        return Checked(**json.loads(file.read_text(encoding="utf-8")))
    print(f"checking {name} on {gpu.name}, once: it makes its kernels, which may take some minutes", flush=True)
    command = [sys.executable, "-m", "openrlhf_dbb.platform.attention", name, model]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return Checked(False, f"no result within {TIMEOUT_S:.0f} s", None, None, TIMEOUT_S)
    last = (done.stdout.strip().splitlines() or [""])[-1]
    if not last.startswith("{"):
        words = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return Checked(False, f"its process ended with {done.returncode}: {words}", None, None, 0.0)
    found = Checked(**json.loads(last))
    if found.ok:  # a failure may have been another program's doing
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(last, encoding="utf-8")
    return found


def _shape(model: str) -> str:
    """The model's configuration, if it is a folder here, else its name."""
    file = Path(model) / "config.json"
    return file.read_text(encoding="utf-8") if file.is_file() else model


def check(name: str, model: str) -> Checked:
    """Train two layers of a model, with random weights and packed samples, and compare with ``sdpa`` in 32 bits.

    Returns:
        What was found; an exception becomes its error.
    """
    began = time.monotonic()
    try:
        difference, rounding = _differences((name, TORCH), model)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return Checked(False, f"{type(error).__name__}: {lines[0]}", None, None, round(time.monotonic() - began, 1))
    ok = difference <= TOLERANCE * rounding
    why = None if ok else f"it is off by {difference:.3g} of the largest value, {TORCH} by {rounding:.3g}"
    return Checked(ok, why, round(difference, 5), round(rounding, 5), round(time.monotonic() - began, 1))


def _differences(names: Sequence[str], model: str) -> list[float]:
    """How far each attention in bfloat16 is from ``sdpa`` in 32 bits: the largest relative difference of any tensor."""
    import torch
    from transformers import AutoConfig

    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = _small(AutoConfig.from_pretrained(model, trust_remote_code=True))
    torch.manual_seed(0)
    weights: dict[str, Any] = {}
    expected = _trained(config, TORCH, weights, device, torch.float32)
    differences = []
    for name in names:
        found = _trained(config, name, weights, device, torch.bfloat16)
        each = [(found[key] - value).abs().max() / value.abs().max().clamp(min=1e-6) for key, value in expected.items()]
        differences.append(float(torch.stack(each).nan_to_num(torch.inf).max()))
    return differences


def _small(config: Any) -> Any:
    """The configuration with two layers and few words, and attention as it is."""
    config = copy.deepcopy(config)
    config.num_hidden_layers, config.vocab_size, config.use_cache = 2, 256, False
    config.initializer_range = 0.1  # large enough for tokens to look at some others more than at the rest
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    return config


def _trained(config: Any, name: str, weights: dict[str, Any], device: str, dtype: Any) -> dict[str, Any]:
    """Log-probabilities, and the gradients of all weights, for samples packed into one row.

    Args:
        weights: what to begin with; the first call fills it.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=name, dtype=dtype)
    if weights:
        model.load_state_dict(weights)
    else:
        weights.update(model.state_dict())
    model = model.to(device).train()
    row = torch.arange(sum(LENGTHS), device=device)[None] * 37 % config.vocab_size
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None].to(device)
    logits = model(row, attention_mask=None, position_ids=positions).logits.float()
    probabilities = logits.log_softmax(-1)[0].gather(-1, row[0].roll(-1)[:, None])
    probabilities.mean().backward()
    gradients = {
        key: (weight * 0 if weight.grad is None else weight.grad).detach().float().cpu()
        for key, weight in model.named_parameters()
    }
    return gradients | {"log-probabilities": probabilities.detach().cpu()}


def main(argv: list[str]) -> int:
    """The check as a program."""
    shims.add()
    found = check(*argv)
    print(json.dumps(asdict(found)))
    return 0 if found.ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

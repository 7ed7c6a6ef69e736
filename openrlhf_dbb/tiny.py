"""The tiny preset: a two-layer Qwen3 on characters, made on the spot, which adds, subtracts and sorts, a third each.

12+9=     the answer is 21, written from the last digit: "12"
s3142=    the answer is the digits in ascending order: "1234"; they are all different
"""

import hashlib
import json
import math
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from openrlhf_dbb import presets

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

# A prompt belongs to a split by its hash modulo 16.
SPLITS = {"train": range(0, 3), "heldout": range(3, 6), "sft": range(6, 16)}
CHARACTERS = "0123456789+-s="

EOS = "<eos>"
PAD = "<pad>"
WARMUP_ROWS = 12_000
IGNORED = -100  # cross_entropy's label for "no loss here"


@dataclass(frozen=True)
class Recipe:
    """The sizes of what :func:`prepare` makes; the defaults are the tiny preset's."""

    train_prompts: int = 512
    heldout_prompts: int = 128
    warmup_steps: int = 560  # of supervised training, >= 1
    hidden: int = 64  # width of the model, a multiple of 16


TINY = Recipe()


@dataclass(frozen=True)
class TinyAssets:
    """The paths of the model with its tokenizer and of the JSONL files of prompts."""

    model: Path
    train: Path
    heldout: Path


def default_folder() -> Path:
    """Return the folder of the tiny preset's files, in the user's cache."""
    return presets.cache("tiny")


def prepare(folder: Path, seed: int = 0, recipe: Recipe = TINY) -> TinyAssets:
    """Make the files unless they exist, in about 15 s; those of another version, seed or recipe are replaced.

    A seed (of prompts, weights and warm start), a recipe and a torch version always give the same files.
    """
    assets = TinyAssets(folder / "model", folder / "train.jsonl", folder / "heldout.jsonl")
    # Raise the version whenever the files change: those of another one are replaced.
    wanted = {"version": 2, "seed": seed, "recipe": asdict(recipe)}
    presets.make_once(
        folder, "tiny.json", wanted, lambda building: _write_files(building, seed, recipe)
    )
    return assets


def build_tokenizer() -> "PreTrainedTokenizerFast":
    """Return a tokenizer of characters, <eos> and <pad>. Unknown characters become <pad>."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate((*CHARACTERS, EOS, PAD))}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD, clean_up_tokenization_spaces=False
    )


def build_model(seed: int, hidden: int = TINY.hidden) -> "Qwen3ForCausalLM":
    """Return a model with random weights in float32, of 116,160 parameters by default."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(CHARACTERS) + 2,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=hidden // 16,
        num_key_value_heads=hidden // 16,
        head_dim=32,  # the smallest that vLLM has kernels for on a CPU
        initializer_range=0.1,  # 0.02 is for widths in the thousands
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},  # no text is longer than 32
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=len(CHARACTERS),
        pad_token_id=len(CHARACTERS) + 1,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def _write_files(folder: Path, seed: int, recipe: Recipe) -> None:
    import torch

    sizes = {"train": recipe.train_prompts, "heldout": recipe.heldout_prompts}
    for split, size in sizes.items():
        lines = [json.dumps(row) + "\n" for row in generate(split, size, seed)]
        (folder / f"{split}.jsonl").write_text("".join(lines))
    tokenizer = build_tokenizer()
    model = build_model(seed, recipe.hidden)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # at this size a second thread mostly waits
    try:
        _warm_start(model, tokenizer, generate("sft", WARMUP_ROWS, seed), seed, recipe.warmup_steps)
    finally:
        torch.set_num_threads(threads)
    model.to(torch.bfloat16).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


def _warm_start(
    model: "Qwen3ForCausalLM",
    tokenizer: "PreTrainedTokenizerFast",
    rows: list[dict[str, str]],
    seed: int,
    steps: int,
) -> None:
    """Train on the labels of the rows. A batch holds sorting alone or arithmetic alone."""
    import torch
    from torch.nn.functional import cross_entropy
    from tqdm import tqdm

    arithmetic = _encode([row for row in rows if not row["input"].startswith("s")], tokenizer)
    sorting = _encode([row for row in rows if row["input"].startswith("s")], tokenizer)
    draw = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), weight_decay=0.0, betas=(0.9, 0.98), fused=True
    )
    model.train()
    for step in tqdm(range(steps), desc="tiny model", unit="step", mininterval=0.5):
        # Sorting is learned quickly, addition slowly; with more of it, sorting would start out perfect.
        inputs, targets = sorting if step % 8 == 0 else arithmetic
        batch = torch.randint(len(inputs), (96,), generator=draw)
        logits = model(input_ids=inputs[batch], use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), targets[batch].flatten(), ignore_index=IGNORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        # The learning rate rises over 20 steps and then falls along half a cosine to a tenth.
        fall = 0.55 + 0.45 * math.cos(math.pi * step / steps)
        optimizer.param_groups[0]["lr"] = 6e-3 * fall * min(1.0, (step + 1) / 20)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


def _encode(
    rows: list[dict[str, str]], tokenizer: "PreTrainedTokenizerFast"
) -> "tuple[torch.Tensor, torch.Tensor]":
    """Return token ids, padded on the right, and ids to predict, IGNORED outside answers; (R, T)."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    pairs = [(tokenizer.encode(row["input"]), tokenizer.encode(row["label"] + EOS)) for row in rows]
    inputs = [torch.tensor((prompt + answer)[:-1]) for prompt, answer in pairs]
    targets = [torch.tensor([IGNORED] * (len(prompt) - 1) + answer) for prompt, answer in pairs]
    return pad_sequence(inputs, True, tokenizer.pad_token_id), pad_sequence(targets, True, IGNORED)


def generate(split: str, size: int, seed: int) -> list[dict[str, str]]:
    """Return ``{"input": prompt, "label": answer}`` of up to 20,000 distinct prompts, in an order by the seed.

    The hash of a prompt decides its split, so splits of any seeds have no prompt in common. "sft" is for the supervised
    warm start. Labels are integers of 2 to 7 digits without a leading zero.
    """
    draw = random.Random(f"{split} {seed}")
    rows: dict[str, str] = {}
    while len(rows) < size:
        prompt, label = _problem("+-s"[len(rows) % 3], draw)
        # Math-Verify compares values, and 019 = 19. With a palindrome, copying the question "9-4" would be right.
        is_usable = label[0] != "0" and label != label[::-1]
        if is_usable and hashlib.sha256(prompt.encode()).digest()[0] % 16 in SPLITS[split]:
            rows[prompt] = label
    result = [{"input": prompt, "label": label} for prompt, label in rows.items()]
    draw.shuffle(result)
    return result


def _operand(draw: random.Random) -> int:
    digits = draw.randint(1, 3)
    return draw.randint(10 ** (digits - 1), 10**digits - 1)


def _problem(kind: str, draw: random.Random) -> tuple[str, str]:
    if kind == "s":
        digits = draw.sample("123456789", draw.randint(3, 7))
        return f"s{''.join(digits)}=", "".join(sorted(digits))
    first = _operand(draw)
    second = _operand(draw)
    if kind == "+":
        return f"{first}+{second}=", str(first + second)[::-1]
    larger = max(first, second)
    smaller = min(first, second)
    return f"{larger}-{smaller}=", str(larger - smaller)[::-1]

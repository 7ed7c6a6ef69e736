"""The tiny preset's model, a two-layer Qwen3 on characters, and its files."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from openrlhf_dbb.presets import made
from openrlhf_dbb.tiny import task
from openrlhf_dbb.tiny.task import CHARACTERS

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

# prepare() replaces files of another version. Raise it whenever the files change.
VERSION = 2
EOS, PAD = "<eos>", "<pad>"

WARMUP_ROWS = 12_000
# Sorting is learned quickly, addition slowly; with more of it, sorting would start out perfect.
SORTING_EVERY = 8  # steps
WARMUP_BATCH = 96  # rows
WARMUP_RATE = 6e-3
IGNORED = -100  # cross_entropy's label for "no loss here"

Row = dict[str, str]


@dataclass(frozen=True)
class Recipe:
    """The sizes of what :func:`prepare` makes; the defaults are the tiny preset's."""

    train_prompts: int = 512
    heldout_prompts: int = 128
    ood_prompts: int = 0
    warmup_steps: int = 560  # of supervised training, >= 1
    hidden: int = 64  # width of the model, a multiple of 16


TINY = Recipe()


@dataclass(frozen=True)
class TinyAssets:
    """The paths of the model with its tokenizer and of the JSONL files of prompts."""

    model: Path
    train: Path
    heldout: Path  # then the "ood" prompts, if any, told apart by column "datasource"


def default_folder() -> Path:
    return made.cache("tiny")


def prepare(folder: Path, seed: int = 0, recipe: Recipe = TINY) -> TinyAssets:
    """Make the files unless they exist, in about 15 s; those of another version, seed or recipe are replaced.

    A seed (of prompts, weights and warm start), a recipe and a torch version always give the same files.
    """
    assets = TinyAssets(folder / "model", folder / "train.jsonl", folder / "heldout.jsonl")
    wanted = {"version": VERSION, "seed": seed, "recipe": asdict(recipe)}
    made.make_once(folder, "tiny.json", wanted, lambda building: _write_files(building, seed, recipe))
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

    _write_rows(folder / "train.jsonl", task.generate("train", recipe.train_prompts, seed))
    evaluation = task.generate("heldout", recipe.heldout_prompts, seed)
    if recipe.ood_prompts:
        labelled = (("heldout", evaluation), ("ood", task.generate("ood", recipe.ood_prompts, seed)))
        evaluation = [row | {"datasource": source} for source, rows in labelled for row in rows]
    _write_rows(folder / "heldout.jsonl", evaluation)
    tokenizer, model = build_tokenizer(), build_model(seed, recipe.hidden)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # at this size a second thread mostly waits
    try:
        _warm_start(model, tokenizer, task.generate("sft", WARMUP_ROWS, seed), seed, recipe.warmup_steps)
    finally:
        torch.set_num_threads(threads)
    model.to(torch.bfloat16).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


def _write_rows(path: Path, rows: list[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _warm_start(
    model: "Qwen3ForCausalLM", tokenizer: "PreTrainedTokenizerFast", rows: list[Row], seed: int, steps: int
) -> None:
    """Train on the labels of the rows. A batch holds sorting alone or arithmetic alone."""
    import torch
    from torch.nn.functional import cross_entropy
    from tqdm import tqdm

    sorting = [row for row in rows if row["input"].startswith("s")]
    arithmetic = [row for row in rows if not row["input"].startswith("s")]
    lessons = [_encode(lesson, tokenizer) for lesson in (arithmetic, sorting) if lesson]
    draw = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0, betas=(0.9, 0.98), fused=True)
    model.train()
    for step in tqdm(range(steps), desc="tiny model", unit="step", mininterval=0.5):
        inputs, targets = lessons[-1 if step % SORTING_EVERY == 0 else 0]
        batch = torch.randint(len(inputs), (WARMUP_BATCH,), generator=draw)
        logits = model(input_ids=inputs[batch], use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), targets[batch].flatten(), ignore_index=IGNORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        # It rises over 20 steps and then falls along half a cosine to a tenth.
        fall = 0.55 + 0.45 * math.cos(math.pi * step / steps)
        optimizer.param_groups[0]["lr"] = WARMUP_RATE * fall * min(1.0, (step + 1) / 20)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


def _encode(rows: list[Row], tokenizer: "PreTrainedTokenizerFast") -> "tuple[torch.Tensor, torch.Tensor]":
    """Return token ids, padded on the right, and ids to predict, IGNORED outside answers; (R, T)."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    pairs = [(tokenizer.encode(row["input"]), tokenizer.encode(row["label"] + EOS)) for row in rows]
    inputs = [torch.tensor((prompt + answer)[:-1]) for prompt, answer in pairs]
    targets = [torch.tensor([IGNORED] * (len(prompt) - 1) + answer) for prompt, answer in pairs]
    return pad_sequence(inputs, True, tokenizer.pad_token_id), pad_sequence(targets, True, IGNORED)

"""The tiny model's folder: complete or absent, made once, the same for the same seed."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("transformers")

from openrlhf_dbb.tiny import Recipe, build_model, build_tokenizer, prepare
from openrlhf_dbb.tiny.task import CHARACTERS, generate

FILES = ["heldout.jsonl", "model", "tiny.json", "train.jsonl"]


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "new" / "assets"
    prepare(folder)
    return folder


def test_importing_the_module_imports_neither_torch_nor_transformers():
    program = "import sys, openrlhf_dbb.tiny; assert not {'torch', 'transformers'} & set(sys.modules)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=60)


def test_tokenizer_round_trips_every_prompt_and_answer():
    tokenizer = build_tokenizer()
    for row in generate("train", 500, 0):
        text = row["input"] + row["label"] + "<eos>"
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert len(ids) == len(text) - len("<eos>") + 1
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode(ids, skip_special_tokens=True) == row["input"] + row["label"]
    assert tokenizer.encode(CHARACTERS) == list(range(14))
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id) == (14, 15, None)
    assert tokenizer.encode("1*7=\n\u00e4") == [1, 15, 7, 13, 15, 15]  # other characters are padding


def test_model_has_the_promised_size_and_its_weights_follow_the_seed():
    import torch

    before = torch.get_rng_state()
    first, same, other = build_model(0), build_model(0), build_model(1)
    # Embedding 16 x 64; per layer attention 4 x 64 x 128, feed-forward 3 x 64 x 128, norms 2 x 64 + 2 x 32;
    # last norm 64.
    assert sum(weights.numel() for weights in first.parameters()) == 1024 + 2 * (32768 + 24576 + 192) + 64
    embeddings = [model.get_input_embeddings().weight for model in (first, same, other)]
    assert torch.equal(embeddings[0], embeddings[1])
    assert not torch.equal(embeddings[0], embeddings[2])
    assert torch.equal(before, torch.get_rng_state())


def test_folder_that_is_not_ours_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match=r"holds no tiny\.json"):
        prepare(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_recipe_sets_the_numbers_and_another_one_replaces_the_files_but_not_the_prompts(tmp_path, monkeypatch):
    monkeypatch.setattr("openrlhf_dbb.tiny.model.WARMUP_ROWS", 60)
    (tmp_path / ".assets.building").mkdir()
    (tmp_path / ".assets.building/half").write_text("of a process that was killed")
    recipe = Recipe(train_prompts=8, heldout_prompts=5, ood_prompts=3, warmup_steps=1)
    files = prepare(tmp_path / "assets", 7, recipe)
    assert json.loads((tmp_path / "assets" / "tiny.json").read_text()) == {
        "version": 2,
        "seed": 7,
        "recipe": {"train_prompts": 8, "heldout_prompts": 5, "ood_prompts": 3, "warmup_steps": 1, "hidden": 64},
    }
    first = contents(tmp_path / "assets")
    assert {path.name for path in tmp_path.iterdir()} == {"assets", ".assets.lock"}
    assert prepare(tmp_path / "assets", 7, recipe) == files
    assert contents(tmp_path / "assets") == first
    assert [json.loads(line) for line in files.train.read_text().splitlines()] == generate("train", 8, 7)
    assert [json.loads(line) for line in files.heldout.read_text().splitlines()] == [
        *({**row, "datasource": "heldout"} for row in generate("heldout", 5, 7)),
        *({**row, "datasource": "ood"} for row in generate("ood", 3, 7)),
    ]
    assert prepare(tmp_path / "assets", 7, Recipe(8, 5, 3, warmup_steps=2)) == files
    second = contents(tmp_path / "assets")
    assert {path.name for path in first if first[path] != second[path]} == {"model.safetensors", "tiny.json"}


@pytest.mark.slow
def test_files_are_complete_and_nothing_else_is_left(folder):
    assert sorted(path.name for path in folder.iterdir()) == FILES
    assert [path.name for path in folder.parent.iterdir() if path != folder] == [".assets.lock"]
    assert json.loads((folder / "tiny.json").read_text()) == {"version": 2, "seed": 0}
    for name, size in (("train", 512), ("heldout", 128)):
        rows = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        assert rows == generate(name, size, 0)


@pytest.mark.slow
def test_start_is_neither_hopeless_nor_finished(folder):
    """Samples at temperature 1, 8 per prompt. Measured over 7 seeds of sampling: 0.394 to 0.410 right."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model", padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    torch.manual_seed(0)
    inputs = tokenizer([row["input"] for row in rows], padding=True, return_tensors="pt")
    samples = model.generate(
        inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=10,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        num_return_sequences=8,
    )
    texts = tokenizer.batch_decode(samples[:, inputs["input_ids"].shape[1] :])
    right = [texts[i].replace("<pad>", "") == rows[i // 8]["label"] + "<eos>" for i in range(len(texts))]
    groups = [sum(right[i : i + 8]) for i in range(0, len(right), 8)]
    assert 0.35 <= sum(right) / len(right) <= 0.5
    assert groups.count(0) + groups.count(8) >= len(groups) / 3

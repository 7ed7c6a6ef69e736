"""The tiny preset: right answers and no prompt in two splits; a folder made once, the same for the same seed."""

import json
import re

import pytest

pytest.importorskip("transformers")

from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.presets import make_once
from openrlhf_dbb.rewards.values import canonical, read
from openrlhf_dbb.tiny import (
    CHARACTERS,
    SPLITS,
    Recipe,
    build_model,
    build_tokenizer,
    generate,
    prepare,
)


def recomputed(body):
    if body.startswith("s"):
        return "".join(sorted(body[1:]))
    left, sign, right = re.split(r"([+-])", body)
    return str(int(left) + int(sign + right))[::-1]


@pytest.mark.parametrize("split", SPLITS)
def test_answers_are_right_integers_without_leading_zero_and_never_the_question(split):
    for row in generate(split, 3000, seed=0):
        question = row["input"].removesuffix("=")
        label = row["label"]
        assert label == recomputed(question) == canonical(read(label)) == str(int(label))
        assert 2 <= len(label) <= 7
        # Else a copy of "9-4" would be right
        assert question.startswith("s") or label != label[::-1]


def test_prompts_differ_within_a_split_and_between_splits_whatever_the_seeds():
    seeds = {"train": 0, "heldout": 1, "sft": 2}
    prompts = [
        {row["input"] for row in generate(split, 6000, seed)} for split, seed in seeds.items()
    ]
    assert [len(split) for split in prompts] == [6000] * 3 and len(set.union(*prompts)) == 18_000


def contents(folder):
    return {
        path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def test_tokenizer_round_trips_every_prompt_and_answer():
    tokenizer = build_tokenizer()
    for row in generate("train", 500, 0):
        text = row["input"] + row["label"] + "<eos>"
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert len(ids) == len(text) - len("<eos>") + 1 and tokenizer.decode(ids) == text
        assert tokenizer.decode(ids, skip_special_tokens=True) == row["input"] + row["label"]
    assert tokenizer.encode(CHARACTERS) == list(range(14))
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id) == (
        14,
        15,
        None,
    )
    assert tokenizer.encode("1*7=\n\u00e4") == [
        1,
        15,
        7,
        13,
        15,
        15,
    ]  # other characters are padding


def test_model_has_the_promised_size_and_its_weights_follow_the_seed():
    import torch

    before = torch.get_rng_state()
    first = build_model(0)
    same = build_model(0)
    other = build_model(1)
    # Embedding 16 x 64; per layer attention 4 x 64 x 128, feed-forward 3 x 64 x 128, norms 2 x 64 + 2 x 32;
    # last norm 64.
    assert (
        sum(weights.numel() for weights in first.parameters())
        == 1024 + 2 * (32768 + 24576 + 192) + 64
    )
    embeddings = [model.get_input_embeddings().weight for model in (first, same, other)]
    assert torch.equal(embeddings[0], embeddings[1])
    assert not torch.equal(embeddings[0], embeddings[2])
    assert torch.equal(before, torch.get_rng_state())


def test_folder_that_is_not_ours_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match="other files, without stamp"):
        make_once(tmp_path, "stamp", {}, lambda folder: pytest.fail("made before it is refused"))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.fixture
def made_once(tmp_path, monkeypatch):
    """A folder of files of a small recipe, made beside what a killed process has left."""
    monkeypatch.setattr("openrlhf_dbb.tiny.WARMUP_ROWS", 60)
    (tmp_path / ".assets.building").mkdir()
    (tmp_path / ".assets.building/half").write_text("of a process that was killed")
    return tmp_path / "assets", prepare(tmp_path / "assets", 7, SMALL_RECIPE)


SMALL_RECIPE = Recipe(train_prompts=8, heldout_prompts=5, warmup_steps=1)


def test_a_recipe_sets_the_numbers_of_its_files(made_once):
    folder, files = made_once
    stamp = json.loads((folder / "tiny.json").read_text())
    assert (stamp["seed"], stamp["recipe"]["heldout_prompts"]) == (7, 5)
    assert {path.name for path in folder.parent.iterdir()} == {"assets", ".assets.lock"}
    assert list(map(json.loads, files.train.open())) == generate("train", 8, 7)
    assert list(map(json.loads, files.heldout.open())) == generate("heldout", 5, 7)


def test_the_same_recipe_changes_nothing_and_another_one_replaces_the_files_but_not_the_prompts(
    made_once,
):
    folder, files = made_once
    first = contents(folder)
    assert prepare(folder, 7, SMALL_RECIPE) == files
    assert contents(folder) == first
    assert prepare(folder, 7, Recipe(8, 5, warmup_steps=2)) == files
    second = contents(folder)
    changed = {path.name for path in first if first[path] != second[path]}
    assert changed == {"model.safetensors", "tiny.json"}

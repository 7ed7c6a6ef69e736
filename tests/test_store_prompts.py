"""Identity of prompts: hash, ids, texts as stored."""

import hashlib

import numpy as np
import pytest

from openrlhf_dbb.storage import StoreError, prompt_hash


def test_the_hash_is_what_is_documented():
    data = b"".join(len(part).to_bytes(8, "little") + part for part in (b"1 + 1 = ?", b"zwei \xc3\xbc"))
    expected = hashlib.blake2b(b"openrlhf-dbb prompt 1" + data, digest_size=16).digest()
    assert prompt_hash("1 + 1 = ?", "zwei \u00fc") == expected


def test_ids_follow_the_order_given_and_repeat_for_equal_prompts(store):
    ids = store.register_prompts(["b", "a", "b", "b"], ["1", "1", "1", "2"])
    assert ids.dtype == np.int64
    assert ids[0] == ids[2]
    assert len({*ids.tolist()}) == 3
    again = store.register_prompts(["a", "new", "b"], ["1", "", "2"])
    assert again[0] == ids[1] and again[2] == ids[3] and again[1] not in ids
    rows = store.query("SELECT prompt_id, prompt, label FROM prompts ORDER BY prompt_id")
    assert {tuple(row) for row in rows} == {
        (ids[0], "b", "1"), (ids[1], "a", "1"), (ids[3], "b", "2"), (again[1], "new", ""),
    }  # fmt: skip


def test_more_prompts_than_fit_in_one_statement(store):
    texts = [f"prompt {i}" for i in range(10_123)]
    ids = store.register_prompts(texts, [""] * len(texts))
    assert len(np.unique(ids)) == len(texts)
    assert store.register_prompts(texts[::-1], [""] * len(texts)).tolist() == ids[::-1].tolist()
    few = store.register_prompts([texts[7], "new", texts[3]], [""] * 3)  # looked up one by one
    assert few[[0, 2]].tolist() == ids[[7, 3]].tolist() and few[1] == ids.max() + 1


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("nul \0 in it", "nul \ufffd in it"),
        ("half a pair \ud83d", "half a pair \ufffd"),
        (
            "emoji \U0001f600, \u4e2d\u6587, \x1b[31m, 'quoted', \\",
            "emoji \U0001f600, \u4e2d\u6587, \x1b[31m, 'quoted', \\",
        ),
    ],
)
def test_texts_no_database_can_hold_are_replaced_but_keep_their_identity(store, given, kept):
    ids = store.register_prompts([given, kept], [given, kept])
    assert (ids[0] == ids[1]) == (given == kept)
    rows = store.query("SELECT prompt, label FROM prompts WHERE prompt_id = :id", id=int(ids[0]))
    assert [tuple(row) for row in rows] == [(kept, kept)]


def test_prompts_and_labels_must_be_as_many(store):
    with pytest.raises(StoreError, match="got 2 prompts and 1 labels; give one label"):
        store.register_prompts(["a", "b"], ["1"])

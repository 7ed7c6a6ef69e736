"""Which rows of a data set are trained on, and what is said of the others."""

import json
from types import SimpleNamespace

import pytest

from openrlhf_dbb import prompts
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.platform import cpu

cpu.prepare_driver()


class Words:
    """A tokenizer of one token per word, with a chat template."""

    def __call__(self, texts, **_):
        return {"input_ids": [text.replace("\u200b", "").split() for text in texts]}

    def apply_chat_template(self, chat, tokenize, add_generation_prompt):
        return " ".join(message["content"] for message in chat) + " Answer:"


def choose(path, rows, **options):
    file = path / "data.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {
        "prompt_dataset": str(file), "prompt_probs": None, "prompt_split": "train", "max_samples": 10**8,
        "input_key": "input", "label_key": "label", "input_template": None, "apply_chat_template": False,
        "max_len": 32, "drop_duplicates": False, "skip_bad_rows": False,
        "image_key": "images",
    }  # fmt: skip
    args = SimpleNamespace(
        data=SimpleNamespace(**(data | options)),
        reward=SimpleNamespace(remote_url=["reward.py"]),
        rollout=SimpleNamespace(batch_size=2, max_new_tokens=8),
        train=SimpleNamespace(seed=1),
        use_ms=False,
    )
    strategy = SimpleNamespace(args=args, print=lambda *_: None, is_rank_0=lambda: False)
    loaded = prompts.load_rows(args, strategy)
    return prompts.choose(loaded, prompts.find_bad_rows(loaded, args), args, strategy, Words())


def row(text, label="1"):
    return {"input": text, "label": label}


def test_without_a_label_key_labels_are_empty_and_that_is_said(tmp_path):
    kept = choose(tmp_path, [row("a"), row("b", "2"), row("b"), row(" ")], label_key=None, skip_bad_rows=True)
    assert (kept.texts, kept.labels) == (["a", "b", "b"], ["", "", ""])
    assert kept.report() == (
        "3 of 4 prompts; no labels: a reward function gets empty ones (--data.label_key names their column); "
        "1 bad row dropped (1 with an empty prompt: line 4); 1 duplicates kept: equal prompts with equal labels share "
        "one posterior (--data.drop_duplicates drops them)"
    )


def test_duplicates_are_reported_and_dropped_only_when_told(tmp_path):
    rows = [row("a"), row("b"), row("a"), row("a"), row("c")]
    kept = choose(tmp_path, rows)
    assert kept.texts == ["a", "b", "a", "a", "c"]
    assert "2 duplicates kept" in kept.report()
    dropped = choose(tmp_path, rows, drop_duplicates=True)
    assert (dropped.texts, dropped.rows) == (["a", "b", "c"], [0, 1, 4])
    assert dropped.report() == "3 of 5 prompts; 2 duplicates dropped"
    rows[3] = row("a", "2")
    dropped = choose(tmp_path, rows, drop_duplicates=True)
    assert (dropped.rows, dropped.labels) == ([0, 1, 4], ["1", "1", "1"])
    assert dropped.report() == "3 of 5 prompts; 2 duplicates dropped, 1 of them with another label (line 4)"


def test_bad_rows_are_dropped_when_told_and_the_rest_keeps_its_places(tmp_path):
    rows = [row("a"), row("b", None), row("a"), row("c", "3"), row("c", "4"), row("d", 5)]
    kept = choose(tmp_path, rows, skip_bad_rows=True, drop_duplicates=True)
    assert (kept.texts, kept.labels, kept.rows) == (["a", "d"], ["1", "5"], [0, 5])
    assert kept.report() == (
        "2 of 6 prompts; 3 bad rows dropped (1 without a label: line 2; 2 with the same prompt and different labels: "
        "lines 4, 5); 1 duplicates dropped"
    )


def test_long_prompts_and_those_without_a_token_are_dropped(tmp_path):
    long = " ".join(["w"] * 25)  # 25 tokens; a prompt may have 32 - 8 = 24, else OpenRLHF cuts it from the left
    kept = choose(tmp_path, [row("a"), row(long), row("\u200b"), row("b")])
    assert kept.texts == ["a", "b"]
    assert kept.report() == "2 of 4 prompts; 1 of more than 24 tokens dropped; 1 without a token dropped"


def test_the_schema_of_dapo_math_17k(tmp_path):
    """Chat prompts and an answer inside a struct, each row repeated, as the hub's file has them."""
    rows = [
        {"data_source": "math_dapo", "prompt": [{"role": "user", "content": f"What is {i}+{i}?"}], "ability": "MATH",
         "reward_model": {"ground_truth": str(2 * i), "style": "rule"}, "extra_info": {"index": f"id{i}"}}
        for i in (1, 2, 1, 2, 3)
    ]  # fmt: skip
    kept = choose(
        tmp_path, rows, input_key="prompt", label_key="reward_model.ground_truth", apply_chat_template=True,
        drop_duplicates=True,
    )  # fmt: skip
    assert kept.texts == ["What is 1+1? Answer:", "What is 2+2? Answer:", "What is 3+3? Answer:"]
    assert kept.labels == ["2", "4", "6"]
    assert (kept.total, kept.duplicates) == (5, 2)


def test_messages_need_a_chat_template(tmp_path):
    rows = [row([{"role": "user", "content": "a"}]), row([{"role": "user", "content": "b"}])]
    assert choose(tmp_path, rows, apply_chat_template=True).texts == ["a Answer:", "b Answer:"]
    with pytest.raises(UsageError, match=r"the prompts are messages \(line 1\); give --data.apply_chat_template"):
        choose(tmp_path, rows)


def test_the_digest_depends_on_text_label_and_order(tmp_path):
    digests = {
        choose(tmp_path, rows).digest
        for rows in (
            [row("a"), row("b")],
            [row("b"), row("a")],
            [row("a"), row("b", "2")],
            [row("ab"), row("b")],
        )
    }
    assert len(digests) == 4
    assert choose(tmp_path, [row("a"), row("b")]).digest in digests


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label_key": "label.gold"}, "'label.gold' is not a column of the data set; it has input, label"),
        ({"input_key": "text"}, "'text' is not a column"),
    ],
)
def test_missing_columns_are_named(tmp_path, options, message):
    with pytest.raises(UsageError, match=message):
        choose(tmp_path, [row("a"), row("b")], **options)

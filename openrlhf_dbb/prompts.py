"""The training prompts: loaded as OpenRLHF loads them, then selected; those that are dropped are counted.

Axes: P prompts kept, R rows of the data set.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from openrlhf_dbb import rows as data_rows
from openrlhf_dbb import upstream
from openrlhf_dbb.core.step import dataset_digest
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.rewards import MATH_FILES
from openrlhf_dbb.rewards import labels as math_labels


@dataclass(frozen=True)
class Prompts:
    """The prompts that a run trains on.

    Attributes:
        texts: P prompts as the model sees them (template applied).
        labels: P answers, as strings; all empty without ``--data.label_key``.
        rows: P row numbers in the loaded data set.
        total: rows in the data set.
        bad: which rows were dropped because they cannot be used, in words; "" for none.
        duplicates: rows whose prompt text an earlier row has (dropped or not, see ``kept_duplicates``).
        kept_duplicates: those among them that are trained on.
        relabelled: which of those that are dropped have another label, in words; "" for none.
        too_long: prompts dropped for their length; ``max_tokens`` is the limit.
        empty: prompts dropped that have no token.
    """

    texts: list[str]
    labels: list[str]
    rows: list[int]
    total: int
    bad: str
    duplicates: int
    kept_duplicates: int
    relabelled: str
    too_long: int
    max_tokens: int
    empty: int

    @property
    def digest(self) -> str:
        """Content hash of all prompts and labels in order, 32 hex digits."""
        return dataset_digest(self.texts, self.labels)

    def report(self) -> str:
        """One line: how many are used and what happened to the others."""
        parts = [f"{len(self.texts)} of {self.total} prompts"]
        if not any(self.labels):
            parts.append("no labels: a reward function gets empty ones (--data.label_key names their column)")
        if self.bad:
            parts.append(self.bad)
        if self.duplicates - self.kept_duplicates:
            parts.append(f"{self.duplicates - self.kept_duplicates} duplicates dropped{self.relabelled}")
        if self.kept_duplicates:
            parts.append(
                f"{self.kept_duplicates} duplicates kept: equal prompts with equal labels share one posterior "
                "(--data.drop_duplicates drops them)"
            )
        if self.too_long:
            parts.append(f"{self.too_long} of more than {self.max_tokens} tokens dropped")
        if self.empty:
            parts.append(f"{self.empty} without a token dropped")
        return "; ".join(parts)


def load_rows(args: SimpleNamespace, strategy: Any, flag: str = data_rows.TRAINING) -> Any:
    """The data set of ``args.data`` through OpenRLHF's own loader, at most ``--data.max_samples`` rows.

    A label key with dots reaches into nested columns (``reward_model.ground_truth``). JSON files are read by
    :func:`openrlhf_dbb.rows.read_json`. Rows that cannot be used are still there, see
    :func:`openrlhf_dbb.rows.checked`.

    Args:
        flag: what errors call the data set by.

    Raises:
        UsageError: no label key for a reward of this package, a column is missing, or there are no rows.
    """
    if args.data.label_key is None and _compares_with_labels(args):
        raise UsageError("--data.label_key is missing: name the column that holds the answer to verify against")
    load = upstream.load("openrlhf.datasets.utils", "blending_datasets")
    load_dataset = load.__globals__["load_dataset"]

    def read(kind: str, **options: Any) -> Any:
        if kind == "json":
            return data_rows.read_json(Path(options["data_files"]), args, flag)
        return load_dataset(kind, **options)

    load.__globals__["load_dataset"] = read
    rows = load(
        args.data.prompt_dataset,
        args.data.prompt_probs,
        strategy,
        args.train.seed,
        max_count=args.data.max_samples,
        dataset_split=args.data.prompt_split,
    )
    if len(rows) == 0:
        raise UsageError(f"data set {args.data.prompt_dataset!r} has no rows")
    return data_rows.checked(with_columns(rows.select(range(min(args.data.max_samples, len(rows)))), args), args)


def _compares_with_labels(args: SimpleNamespace) -> bool:
    """Whether the reward is one of this package, all of which need a label; a model or a function may not."""
    return any(Path(url).parent == MATH_FILES[0].parent for url in args.reward.remote_url or [])


def find_bad_rows(rows: Any, args: SimpleNamespace, flag: str = data_rows.TRAINING) -> data_rows.BadRows:
    """The rows, from :func:`load_rows`, that cannot be used.

    For the rewards that ask Math-Verify, it reads every label.

    Args:
        flag: what errors call the data set by.

    Raises:
        UsageError: there are some, and ``--data.skip_bad_rows`` does not say to drop them; or no verifier starts.
    """
    bad = data_rows.find(rows, args)
    if args.reward.remote_url and Path(args.reward.remote_url[0]) in MATH_FILES:
        labels = {row: label for row, label in enumerate(rows[args.data.label_key][:]) if row not in bad.rows}
        unreadable = math_labels.unreadable(labels.values())
        for row, label in labels.items():
            if label in unreadable:
                bad.add(row, f"with a label that Math-Verify cannot read; {data_rows.FIRST}{unreadable[label]}")
    if bad.rows and not args.data.skip_bad_rows:
        may_skip = flag == data_rows.TRAINING and len(bad.rows) < len(rows)
        others = ", or give --data.skip_bad_rows to drop them" * may_skip
        raise UsageError(f"--{flag} {args.data.prompt_dataset}: {bad.error()}; fix them{others}")
    return bad


def load_held_out(args: SimpleNamespace, strategy: Any) -> Any:
    """``--eval.dataset``, read like the training data.

    Raises:
        UsageError: it cannot be read, or some of its rows cannot be used.
    """
    as_training = copy.deepcopy(args)
    data = as_training.data
    data.prompt_dataset, data.prompt_split, data.prompt_probs = args.eval.dataset, args.eval.split, None
    data.skip_bad_rows, data.drop_duplicates = False, True
    rows = load_rows(as_training, strategy, data_rows.HELD_OUT)
    find_bad_rows(rows, as_training, data_rows.HELD_OUT)
    return rows


def train_on(rows: list[int], args: SimpleNamespace) -> None:
    """Let OpenRLHF's ``prepare_datasets`` load the chosen rows, and the held-out ones as they were checked.

    It looks up ``blending_datasets`` in its module, and gives a maximum only for the training data set.
    """
    import openrlhf.trainer.ppo_trainer as ppo_trainer

    def chosen(datasets: str, probabilities: str | None, strategy: Any, *_: Any, **options: Any) -> Any:
        if "max_count" in options:
            return load_rows(args, strategy).select(rows)
        return load_held_out(args, strategy)

    upstream.replace(ppo_trainer, "blending_datasets", chosen)


def with_columns(rows: Any, args: SimpleNamespace) -> Any:
    """``rows`` with the input and label columns at the top level.

    Raises:
        UsageError: the data set does not have one of them.
    """
    for flag, key in (("data.input_key", args.data.input_key), ("data.label_key", args.data.label_key)):
        if key is None:
            continue
        column, *fields = key.split(".")
        if key not in rows.column_names and fields and _holds(rows.features.get(column), fields):
            # Not Dataset.flatten(): it loses the columns of a concatenated data set, which OpenRLHF makes.
            rows = rows.add_column(key, [functools.reduce(dict.__getitem__, fields, row) for row in rows[column][:]])
        if key not in rows.column_names:
            raise data_rows.no_column(flag, key, rows.column_names)
    return rows


def _holds(feature: Any, fields: list[str]) -> bool:
    for field in fields:
        if not isinstance(feature, dict) or field not in feature:
            return False
        feature = feature[field]
    return True


def choose(loaded: Any, bad: data_rows.BadRows, args: SimpleNamespace, strategy: Any, tokenizer: Any) -> Prompts:
    """Decide which rows of the data set, from :func:`load_rows`, are trained on; none of the bad ones.

    Raises:
        UsageError: no prompt left, or fewer than one rollout batch; or messages without a chat template.
    """
    from jinja2 import TemplateError
    from openrlhf.datasets import PromptDataset, prompts_dataset
    from tqdm import tqdm

    upstream.replace(prompts_dataset, "tqdm", functools.partial(tqdm, delay=1.0))  # a bar only where it takes long
    first_label: dict[str, str] = {}
    rows, duplicates, relabelled = [], 0, []
    texts, labels = loaded[args.data.input_key][:], data_rows.labels_of(loaded, args)
    for row, (prompt, label) in enumerate(zip(texts, labels, strict=True)):
        if row in bad.rows:
            continue
        if isinstance(prompt, list) and not args.data.apply_chat_template:
            raise UsageError(
                f"--data.prompt_dataset {args.data.prompt_dataset}: the prompts are messages ({bad.name(row)}); give "
                "--data.apply_chat_template, and a model that has a template"
            )
        key = data_rows.prompt_key(prompt)
        duplicates += key in first_label
        if key not in first_label or not args.data.drop_duplicates:
            rows.append(row)
        elif first_label[key].strip() != label.strip():
            relabelled.append(row)
        first_label.setdefault(key, label)
    kept_duplicates = 0 if args.data.drop_duplicates else duplicates
    try:
        seen = PromptDataset(loaded.select(rows), tokenizer, strategy, input_template=args.data.input_template)
    except TemplateError as error:
        raise UsageError(
            f"--data.prompt_dataset {args.data.prompt_dataset}: the model's chat template refuses a prompt: {error}; "
            "change the prompt, or leave the template out with --no-data.apply_chat_template"
        ) from error
    limit = _max_tokens(args)
    lengths = [len(ids) for ids in tokenizer(seen.prompts, add_special_tokens=False)["input_ids"]]
    fits = [i for i, length in enumerate(lengths) if 0 < length <= limit]
    empty = sum(length == 0 for length in lengths)
    prompts = Prompts(
        texts=[seen.prompts[i] for i in fits],
        labels=[str(seen.labels[i]) for i in fits],
        rows=[rows[i] for i in fits],
        total=len(loaded),
        bad=bad.report() if bad.rows else "",
        duplicates=duplicates,
        kept_duplicates=kept_duplicates,
        relabelled=f", {len(relabelled)} of them with another label ({bad.names(relabelled)})" if relabelled else "",
        too_long=len(lengths) - len(fits) - empty,
        max_tokens=limit,
        empty=empty,
    )
    if len(fits) < args.rollout.batch_size:
        raise UsageError(
            f"data set {args.data.prompt_dataset!r} leaves {len(fits)} prompts of {len(loaded)}, fewer than one "
            f"--rollout.batch_size ({args.rollout.batch_size}), which can be lower; {prompts.report()}"
        )
    return prompts


def _max_tokens(args: SimpleNamespace) -> int:
    """Return the tokens of the longest prompt allowed. OpenRLHF would cut longer ones from the left."""
    return int(args.data.max_len - (args.rollout.max_new_tokens or 1))

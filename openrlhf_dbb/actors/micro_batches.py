"""Which rows make a micro-batch, and which of their tokens a pass computes.

Rows come prompt by prompt, so that they can share it, or by length, so that little is padded. The
order with less work is taken. Losses and gradients are sums over an optimizer update, so they stay
the same.

Two things save work. Equal rows are computed once: where answers are short, most rollouts of an
easy prompt are equal. A prompt is computed once for all of its rollouts, if that is less work. A
sequence is then a prompt with its responses side by side, or all prompts and responses of the
micro-batch. A response attends to its prompt and to itself, and its positions continue the
prompt's. Source: Prefix Grouper (Liu et al. 2025, arXiv 2506.05433), which splits attention.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch
from openrlhf.trainer.ppo_utils.experience import Experience, make_experience_batch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

# Tokens of a sequence at which attention costs as much as the rest of a layer: 450 by the memory of
# eager attention on a processor, 1,700 by its time in float32. On an H100 1,100 to 15,000 chose the
# quicker way in six shapes above LEAST.
SPAN = {"cpu": 800, "cuda": 2500}
# Tokens of a micro-batch from which rows share prompts; with fewer an H100 waits for launches and
# gains nothing.
LEAST = {"cpu": 0, "cuda": 8192}
# A sequence has a multiple of so many tokens. Without CUDA every new length compiles the matrix
# products anew, which takes longer than the padding, and what is compiled stays in memory.
ROUND = 8


T = TypeVar("T")


class Row(NamedTuple):
    """Length and prompt of a row, by which rows are put together into micro-batches."""

    prompt: tuple[int, ...]
    length: int  # tokens of prompt and response

    @classmethod
    def of(cls, row: Experience) -> "Row":
        """Return the row of an experience of one rollout without padding."""
        before_actions = len(row.sequences) - len(row.action_mask)
        end_of_prompt = before_actions + int(row.action_mask.int().argmax())
        return cls(tuple(row.sequences[:end_of_prompt].tolist()), len(row.sequences))


def together(
    batches: Sequence[list[Experience]],
    accumulated: int,
    device: str,
    longest_shared: int,
    extra_rows: Sequence[Experience] = (),
) -> Iterator[Experience]:
    """Yield as many micro-batches, with the rows of each optimizer update in the order that is less work.

    Args:
        batches: the rows of each micro-batch, without padding.
        accumulated: micro-batches of an optimizer update.
        device: "cpu" or "cuda".
        longest_shared: tokens of a row up to which rows may share their prompt.
        extra_rows: to train on beside these; each update takes its share of them.
    """
    updates = -(-len(batches) // accumulated)
    remaining = iter(batches)
    for extra_rows_of_update in _cut(extra_rows, updates):
        batches_of_update = list(itertools.islice(remaining, accumulated))
        rows = [*itertools.chain(*batches_of_update), *extra_rows_of_update]
        for numbers in chosen(rows, len(batches_of_update), device, longest_shared):
            yield make_experience_batch([rows[number] for number in numbers])


def chosen(
    experiences: Sequence[Experience], count: int, device: str, longest_shared: int
) -> list[Sequence[int]]:
    """Return for each of ``count`` micro-batches the numbers of its rows; otherwise as above."""
    rows = [Row.of(experience) for experience in experiences]
    # Prompts of equal length need no padding.
    by_prompt = sorted(range(len(rows)), key=lambda n: (len(rows[n].prompt), rows[n].prompt))
    # The longest first: the others find room in the memory that they leave.
    by_length = sorted(by_prompt, key=lambda n: -rows[n].length)

    def work(micro_batches: list[Sequence[int]]) -> int:
        total = 0
        for numbers in micro_batches:
            total += _work([rows[number] for number in numbers], device, longest_shared)
        return total

    return min(_cut(by_prompt, count), _cut(by_length, count), key=work)


def _cut(rows: Sequence[T], count: int) -> list[Sequence[T]]:
    """Return so many parts of nearly equal size, in order."""
    ends = [len(rows) * part // count for part in range(count + 1)]
    return [rows[start:end] for start, end in itertools.pairwise(ends)]


def _work(rows: Sequence[Row], device: str, longest_shared: int) -> int:
    """Return the least work of a micro-batch; see :func:`laid_out` for its ways."""
    longest = max(row.length for row in rows)
    apart = _cost(len(rows), longest, device)
    if longest > longest_shared or len(rows) * longest < LEAST[device]:
        return apart
    responses: Counter[tuple[int, ...]] = Counter()  # tokens, by prompt
    for row in rows:
        responses[row.prompt] += row.length - len(row.prompt)
    prompts = [len(prompt) for prompt in responses]
    aligned = _cost(len(prompts), max(prompts) + max(responses.values()), device)
    in_one = _cost(1, sum(prompts) + responses.total(), device)
    return min(apart, aligned, in_one)


def _cost(sequences: int, width: int, device: str) -> int:
    """Return the work of so many sequences of ``width`` tokens, in tokens times tokens."""
    return sequences * width * (width + SPAN[device])


def first_equal(rows: torch.Tensor) -> torch.Tensor:
    """Return for each row of (B, T) the index (B,) of the first row that equals it."""
    _, kinds = torch.unique(rows, dim=0, return_inverse=True)
    return (kinds[:, None] == kinds).int().argmax(dim=1)


def without_padding_behind(mask: torch.Tensor) -> torch.Tensor:
    """Return ones in place of an attention mask (B, T) whose zeros come last in each row.

    No token of a causal model sees what comes after it. With ones torch takes an attention that
    computes half of the square; with any zero it reads a mask of (B, T, T) and computes all of it.
    """
    ends_only = bool((mask[:, 1:] <= mask[:, :-1]).all())
    return torch.ones_like(mask) if ends_only else mask


def laid_out(
    sequences: torch.Tensor,
    attention: torch.Tensor,
    wanted: torch.Tensor,
    dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens to compute for the log-probs of the wanted ones, and their attention mask.

    Args:
        sequences, attention, wanted: (B, T); ``wanted`` is bool.
        dtype: of the model; None if its rows cannot share a prompt.

    Returns:
        Places (G, L) in the flattened batch, -1 for padding. A mask (G, L), or (G, 1, L, L) to add
        to the scores.
    """
    device = wanted.device
    rows = wanted.any(dim=1)
    columns = wanted.any(dim=0).nonzero()
    is_empty = len(columns) == 0
    end = wanted.shape[1] - 1 if is_empty else int(columns[-1])
    rows[0] |= is_empty  # every rank needs a pass
    places = torch.arange(wanted.numel(), device=device).view_as(wanted)
    plain = places[rows, :end]
    plain_mask = attention[rows, :end]
    if dtype is None or is_empty or plain.numel() < LEAST[device.type]:
        return plain, plain_mask

    column = torch.arange(wanted.shape[1], device=device)
    first = wanted.int().argmax(dim=1, keepdim=True)
    last = (wanted * column).amax(dim=1, keepdim=True)
    is_token = attention.cumsum(dim=1) > 0
    is_prompt = is_token & (column < first)
    owner = first_equal(sequences.masked_fill(~is_prompt, -1))
    # The prompt's last token goes with each response: a place predicts one token.
    is_prompt = is_token & (column < first - 1)
    is_response = (column >= first - 1) & (column < last) & rows[:, None]
    prompts = []
    responses = []
    for row in owner[rows].unique():
        has_prompt = owner == row
        prompts.append(places[row, is_prompt[row]])
        responses.append(places[is_response & has_prompt[:, None]])

    best = plain
    for shared in (_aligned(prompts, responses), _in_one(prompts, responses)):
        padded = pad(shared, (0, -shared.shape[1] % ROUND), value=-1)
        if _work_of(padded) < _work_of(best):
            best = padded
    if best is plain:
        return plain, plain_mask
    return best, _mask(best, is_prompt, owner, dtype)


def _aligned(prompts: list[torch.Tensor], responses: list[torch.Tensor]) -> torch.Tensor:
    """Return places (G, L) of a prompt with its responses in each sequence."""
    left = pad_sequence(prompts, batch_first=True, padding_value=-1, padding_side="left")
    right = pad_sequence(responses, batch_first=True, padding_value=-1)
    return torch.cat([left, right], dim=1)


def _in_one(prompts: list[torch.Tensor], responses: list[torch.Tensor]) -> torch.Tensor:
    """Return places (1, L) of each prompt with its responses, one after the other."""
    pairs = zip(prompts, responses, strict=True)
    return torch.cat(list(itertools.chain(*pairs)))[None]


def _work_of(places: torch.Tensor) -> int:
    sequences, width = places.shape
    return _cost(sequences, width, places.device.type)


def _mask(
    places: torch.Tensor, prompt: torch.Tensor, owner: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return the mask (G, 1, L, L) with which a response sees its prompt and itself.

    Args:
        places: (G, L), as :func:`laid_out` returns them.
        prompt: (B, T), the tokens of prompts.
        owner: (B,), the first row with the same prompt.
        dtype: of the mask.
    """
    is_prompt = prompt.flatten()[places][:, None]
    row = places // prompt.shape[1]
    same_row = row[:, None] == row[..., None]
    prompt_of = owner[row]
    same_prompt = prompt_of[:, None] == prompt_of[..., None]
    is_there = (places >= 0)[:, None]
    seen = (is_prompt & same_prompt) | same_row
    seen = seen & is_there & torch.ones_like(seen).tril()
    mask = torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
    return mask[:, None]

"""A tokenizer that other processes load by its name.

OpenRLHF sends the tokenizer to the vLLM actors with every prompt; unpickling it there takes longer than the prompt.
"""

from __future__ import annotations

import functools
from typing import Any

from openrlhf.utils import get_tokenizer


class NamedTokenizer:
    """A tokenizer as OpenRLHF loads it; a process that receives it loads it once, from the model's files.

    Args:
        tokenizer: what ``openrlhf.utils.get_tokenizer`` returned for the model.
        model: folder or name of the model.
        use_fast: as passed there.
    """

    def __init__(self, tokenizer: Any, model: str, use_fast: bool) -> None:
        self._tokenizer, self._model, self._use_fast = tokenizer, model, use_fast

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __reduce__(self) -> Any:
        return _load, (self._model, self._use_fast)


@functools.lru_cache(maxsize=2)
def _load(model: str, use_fast: bool) -> Any:
    return get_tokenizer(model, None, "left", None, use_fast=use_fast)

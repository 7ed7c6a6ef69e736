"""Score and answer of a response, as a verifier gives them."""

from __future__ import annotations

from typing import NamedTuple


class Verdict(NamedTuple):
    """What a verifier says about a response.

    Attributes:
        score: 1.0 correct, 0.0 wrong or no answer, None not verified (missing, not wrong).
        answer: normalized, to be compared with the answers of other responses; None if there is none.
    """

    score: float | None
    answer: str | None

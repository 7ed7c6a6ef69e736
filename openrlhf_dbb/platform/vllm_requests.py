"""What a vLLM engine is asked and answers, by token ids, in evaluations and in training."""

from typing import Any, NamedTuple


class Request(NamedTuple):
    """A prompt to be answered N times; the answer has the same number."""

    number: int
    prompt: list[int]  # token ids
    max_tokens: int  # of each response


class Finished(NamedTuple):
    """The N responses to a request."""

    number: int
    responses: list[str]  # without special tokens
    tokens: list[int]  # lengths
    truncated: list[bool]  # whether ``max_tokens`` cut the response


def sampling_params(sampling: dict[str, Any], request: Request) -> Any:
    """Return the ``vllm.SamplingParams`` of a request.

    Args:
        sampling: n, temperature (0 is greedy) and top_p.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        **sampling,
        max_tokens=request.max_tokens,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def answers(number: int, output: Any) -> Finished:
    """Return vLLM's output of a request as its answer."""
    samples = output.outputs
    return Finished(
        number,
        responses=[sample.text for sample in samples],
        tokens=[len(sample.token_ids) for sample in samples],
        truncated=[sample.finish_reason == "length" for sample in samples],
    )

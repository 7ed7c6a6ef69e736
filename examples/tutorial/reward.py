"""The tutorial's verifier: is the right number the only one in the response?"""

import re


def reward_func(queries, prompts, labels, **kwargs):
    """Score responses; called by the training with one of them at a time.

    Args:
        queries: prompts and responses, with special tokens.
        prompts: what the model was given.
        labels: the answers from the data set: ["76"].

    Returns:
        {"rewards": [...]}, for each response 1.0 (right), 0.0 (wrong) or None (could not be verified).

    Raises:
        ValueError: a label is not a number; this stops the training.
    """
    responses = [query.removeprefix(prompt) for query, prompt in zip(queries, prompts, strict=True)]
    return {"rewards": [score(*pair) for pair in zip(responses, labels, strict=True)]}


def score(response, label):
    """1.0 if the response has one number and it is the label, else 0.0: listing all four must not pay."""
    if not label.isdigit():
        raise ValueError(f"the label {label!r} is not a whole number; fix this row of the data set")
    numbers = re.findall(r"-?\d+(?:[.,]\d+)*", response)
    return 1.0 if numbers == [label] else 0.0

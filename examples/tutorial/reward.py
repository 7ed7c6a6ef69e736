"""The tutorial's verifier: is the number right that the model has written from its last digit?"""

END = "<eos>"  # what the model ends a response with; another model has another token


def reward_func(queries, prompts, labels, **kwargs):
    """Score responses; called by the training with one of them at a time.

    Args:
        queries: prompts and responses, with special tokens: ["12+9=12<eos>"].
        prompts: what the model was given: ["12+9="].
        labels: the answers from the data set: ["21"].

    Returns:
        {"rewards": [...]}, for each response 1.0 (right), 0.0 (wrong) or None (could not be verified).

    Raises:
        ValueError: a label is not a number; this stops the training.
    """
    responses = [query.removeprefix(prompt) for query, prompt in zip(queries, prompts, strict=True)]
    return {"rewards": [score(*pair) for pair in zip(responses, labels, strict=True)]}


def score(response, label):
    """1.0 if the digits of the response, read backwards, are the label, else 0.0."""
    if not label.isdigit():
        raise ValueError(f"the label {label!r} is not a whole number; fix this row of the data set")
    digits = response.removesuffix(END).strip()
    return 1.0 if digits[::-1] == label else 0.0

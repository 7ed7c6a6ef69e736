"""Tasks of the package reasoning-gym as prompts with labels: problems that a program makes and verifies.

A spec is ``reasoning_gym:TASK?SETTING=VALUE&...``. The settings are the task's own, with ``size`` (the number of
problems) and ``seed`` (default 0) among them. A setting that is a list takes its name once for each entry.

A label is JSON that says how the problem is made again. Problems are made and verified in processes of their own, for
Python's hash seed, the global random generator and a time limit.

Usage: python -m openrlhf_dbb.tasks SECONDS    one such process, as ``rewards.verifier_pool`` starts it
"""

import contextlib
import dataclasses
import functools
import json
import random
import re
import sys
from typing import TYPE_CHECKING, Any

from openrlhf_dbb.errors import UsageError, did_you_mean
from openrlhf_dbb.rewards import answers, values, verifier_pool

if TYPE_CHECKING:  # a task's process does not wait for it
    from openrlhf_dbb.chosen import Values

PREFIX = "reasoning_gym:"
INSTRUCTION = "Give only the answer."
# One mixes others. The verifier of the second takes any text, that of the third an answer to any other puzzle.
_LEFT_OUT = {"composite", "game_of_life_halting", "puzzle24"}
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def is_spec(name: str) -> bool:
    """Return whether a data set's name is a spec, ``reasoning_gym:...``."""
    return name.startswith(PREFIX)


def label_and_verifier(run: "Values") -> None:
    """A task brings its label and its verifier along."""
    if not is_spec(run.values["data.prompt_dataset"] or ""):
        return
    brought = {"data.label_key": "label", "reward.remote_url": "reasoning_gym"}
    for flag, value in brought.items():
        if not run.is_given(flag):
            run.put({flag: value}, "--data.prompt_dataset")


def sized(name: str, size: int) -> str:
    """Return a task, which may have settings behind it, with another number of problems."""
    return f"{name}{'&' if '?' in name else '?'}size={size}"


@functools.lru_cache(maxsize=4)
def problems(spec: str, instruction: str = INSTRUCTION) -> list[dict[str, str]]:
    """Return the problems of a spec, each with "prompt" and "label"; the same for the same spec.

    The prompt is the question, then the instruction in a line of its own. A question that the task repeats keeps its
    first label, so that both are one prompt.

    Raises:
        UsageError: there is no such task or setting, or the task refuses a value.
    """
    rows = []
    for question, label in _ask(spec, task=spec.removeprefix(PREFIX)):
        rows.append({"prompt": f"{question}\n{instruction}".rstrip(), "label": label})
    return rows


def answer(label: str) -> str:
    """Return the answer in a task's label, which also says how the problem is made again.

    Other labels are their own answers.
    """
    if not label.startswith('{"answer": '):
        return label
    try:
        about = json.loads(label)
    except ValueError:
        return label
    return str(about["answer"]) if about.keys() >= {"task", "index"} else label


def examples(names: list[str] | None) -> list[tuple[str, str | None, str]]:
    """Return name, answer and first question of tasks (None: all); raise as :func:`problems`."""
    rows = _ask("tasks", names=names)
    return [(name, json.loads(label)["answer"], question) for name, question, label in rows]


def _ask(source: str, **request: Any) -> Any:
    with contextlib.closing(
        verifier_pool.VerifierPool(1, 3600.0, verifier_pool.TASK_WORKER)
    ) as pool:
        reply = pool.ask(request)
    if "rows" not in reply:
        raise UsageError(f"{source}: {reply['unverified']}")
    return reply["rows"]


# The functions below run in the process.


def reply_to(**request: Any) -> dict[str, Any]:
    """Return ``rows``, or ``correct``; else the reason, as ``verifier_pool.reply_to``."""
    failed = "unverified"
    try:
        if "task" in request:
            return {"rows": _rows(request["task"])}
        if "names" in request:
            names = request["names"] or _names()
            return {"rows": [(name, *_rows(sized(name, 1))[0]) for name in names]}
        failed = "bad_label"
        dataset, entry = _problem(request["label"])
        failed = "unverified"
        texts = filter(None, _candidates(request["answer"].strip(), entry["answer"]))
        # Some tasks give partial credit to any text. The parts of a wrong answer may add up to 1.0000000000000002.
        return {"correct": any(dataset.score_answer(text, entry) == 1 for text in texts)}
    except MemoryError:  # ends the process: it cannot be trusted any more
        raise
    except Exception as error:
        return {failed: str(error) if isinstance(error, UsageError) else repr(error)}


def _candidates(response: str, right: str | None) -> list[str | None]:
    """Return the texts that may be the answer, as ``rewards.reasoning_gym.score`` explains."""
    tagged = _TAGGED.findall(response)
    if tagged:
        return [tagged[-1].strip()]
    line = response.rpartition("\n")[2]
    number = values.read(str(right))
    if not isinstance(number, values.Number):
        return [response, line]
    term = answers.find(line, number)
    return [values.inner(term).text if term else None]


def _names() -> list[str]:
    from reasoning_gym.factory import DATASETS

    return sorted(DATASETS.keys() - _LEFT_OUT)


def _rows(spec: str) -> list[tuple[str, str]]:
    task, _, query = spec.partition("?")
    settings = _settings(task, query)
    labels: dict[str, str] = {}
    rows = []
    try:
        for index in range(len(_dataset(task, json.dumps(settings)))):
            about: dict[str, Any] = {"task": task, "index": index, "settings": settings}
            _, entry = _entry(**about)
            question = entry["question"]
            label = json.dumps({"answer": entry["answer"], **about})
            rows.append((question, labels.setdefault(question, label)))
    except Exception as error:  # a value that the task cannot use ends in any of Python's errors
        why = error or type(error).__name__
        raise UsageError(f"the task refuses {settings}: {why}; change them") from error
    return rows


def _settings(task: str, query: str) -> dict[str, Any]:
    from reasoning_gym.factory import DATASETS

    if task not in _names():
        raise UsageError(
            f"unknown task {task!r}{did_you_mean(task, _names())}; openrlhf-dbb tasks lists all"
        )
    defaults = dataclasses.asdict(DATASETS[task][1]())
    settings: dict[str, Any] = {"seed": 0}
    for part in filter(None, query.split("&")):
        name, _, text = part.partition("=")
        if name not in defaults:
            hint = did_you_mean(name, defaults)
            raise UsageError(f"unknown setting {name!r}{hint}; known: {', '.join(defaults)}")
        value: Any = text
        with contextlib.suppress(ValueError):  # a text is its own value
            value = json.loads(text)
        if isinstance(defaults[name], (list, tuple)):
            value = [*settings.get(name, []), value]
        settings[name] = value
    return settings


@functools.lru_cache(maxsize=64)
def _dataset(task: str, settings: str) -> Any:
    import reasoning_gym

    options = json.loads(settings)
    # The package makes problem i from seed + i, so that seeds 1 and 2 would share all problems but one.
    options["seed"] *= 100_000
    return reasoning_gym.create_dataset(task, **options)


def _entry(task: str, index: int, settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    dataset = _dataset(task, json.dumps(settings))
    random.seed(index)  # list_functions draws from the global generator
    return dataset, dataset[index]


@functools.lru_cache(maxsize=1024)  # a label comes back with each rollout of its group
def _problem(label: str) -> tuple[Any, dict[str, Any]]:
    about = json.loads(label)
    answer = about.pop("answer")
    dataset, entry = _entry(**about)
    if entry["answer"] != answer:
        raise ValueError(
            f"the reasoning-gym of this machine makes a problem with the answer {entry['answer']!r}"
        )
    return dataset, entry


if __name__ == "__main__":
    verifier_pool.serve(float(sys.argv[1]), "reasoning_gym", reply_to)

"""Generates for a strategy that judges groups: several generations of TRL make one batch.

Axes: R rollouts of a generation on all processes, B on this process, F reward functions.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from accelerate.utils import broadcast_object_list

from openrlhf_dbb.core.arrays import Floats
from openrlhf_dbb.core.filling import Answer
from openrlhf_dbb.integrations.shared import RowAnswer, RowRequest
from openrlhf_dbb.integrations.trl_processes import gathered
from openrlhf_dbb.integrations.trl_rows import Row, StepMetrics, batch_of, cut


class Rollout(NamedTuple):
    """A rollout as the first process knows it.

    Attributes:
        serial: its number among the rollouts that were generated for the batch, from 0.
        response: :class:`openrlhf_dbb.integrations.trl_memory.Response`.
        rewards: (F,) of each reward function; NaN where missing.
    """

    serial: int
    response: Any
    rewards: Floats


def generate_rows(
    trainer: Any, columns: Sequence[str], data_R: Sequence[int], rollouts: int
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Generate one rollout of each row of the data set, ``rollouts`` of a prompt side by side; on all processes.

    Returns:
        This process's share of the rows, which divide evenly, with these columns; TRL's batch.
    """
    share = len(data_R) // trainer.accelerator.num_processes
    first = share * trainer.accelerator.process_index
    data_B = [trainer.train_dataset[place] for place in data_R[first : first + share]]
    inputs = [{name: row[name] for name in columns} for row in data_B]
    whole_group = trainer.num_generations
    trainer.num_generations = rollouts
    try:
        return inputs, trainer.generate_as_trl(inputs)
    finally:
        trainer.num_generations = whole_group


class Generation:
    """What is generated for one batch: the first process asks, the others follow.

    Attributes:
        generated: rollouts so far, of all processes.
        is_running: TRL generates.
    """

    def __init__(self, memory: Any, inputs: list[dict[str, Any]]) -> None:
        """``memory`` is a :class:`Memory`; reward functions see the columns of TRL's ``inputs``."""
        self.generated = 0
        self.is_running = False
        self._memory = memory
        self._trainer = memory.trainer
        self._columns = list(inputs[0])
        self._rows: dict[int, Row] = {}  # those that this process has generated, by serial number
        self._metrics = StepMetrics(self._trainer._metrics["train"])

    def generate(self, requests: Sequence[RowRequest]) -> list[RowAnswer]:
        """Answer the filler, on the first process."""
        answers: dict[int, RowAnswer] = {}
        for rollouts in sorted({request.rollouts for request in requests}):
            asked = [request for request in requests if request.rollouts == rollouts]
            data_R = [request.prompt for request in asked for _ in range(rollouts)]
            order = (self._evenly(data_R, rollouts), rollouts)
            broadcast_object_list([order])
            found_R = self._generate(*order)
            scores_R = self._memory.scores(found_R, rollouts)
            for place, request in enumerate(asked):
                of_group = slice(place * rollouts, (place + 1) * rollouts)
                answers[request.ticket] = Answer(found_R[of_group], scores_R[of_group])
        return [answers[request.ticket] for request in requests]

    def _evenly(self, data_R: list[int], rollouts: int) -> list[int]:
        """Return rows with further groups of the last one, until processes get equally many.

        What is generated beyond the requests is not used.
        """
        rows_R = list(data_R)
        while len(rows_R) % self._trainer.accelerator.num_processes:
            rows_R += [data_R[-1]] * rollouts
        return rows_R

    def end(self) -> None:
        """Let the other processes go on, on the first one."""
        broadcast_object_list([None])

    def follow(self) -> None:
        """Generate what the first process asks for, on the others."""
        while True:
            order = [None]
            broadcast_object_list(order)
            if order[0] is None:
                return
            self._generate(*order[0])

    def _generate(self, data_R: list[int], rollouts: int) -> list[Rollout]:
        """Generate one rollout of each row, ``rollouts`` of a prompt; on all processes."""
        self.is_running = True
        inputs, output = generate_rows(self._trainer, self._columns, data_R, rollouts)
        first = len(inputs) * self._trainer.accelerator.process_index
        responses_R = self._memory.responses(inputs, output)
        rewards_R_F, ids_B, _ = self._memory.just_scored()
        self.is_running = False
        for place, row in enumerate(cut(output, [len(ids) for ids in ids_B])):
            self._rows[self.generated + first + place] = row
        serials_R = range(self.generated, self.generated + len(data_R))
        self.generated += len(data_R)
        self._metrics.rollouts.append(len(data_R))
        return [Rollout(*found) for found in zip(serials_R, responses_R, rewards_R_F, strict=True)]

    def batch(self, trained: Sequence[int]) -> tuple[dict[str, Any], list[int]]:
        """Return this process's share of the rollouts with these serial numbers, on all processes.

        They come as TRL's batch, and with the number of tokens of each completion.
        """
        self._metrics.join()
        wanted = set(trained)
        rows = dict(gathered(lambda: [pair for pair in self._rows.items() if pair[0] in wanted]))
        accelerator = self._trainer.accelerator
        share = len(trained) // accelerator.num_processes
        first = share * accelerator.process_index
        mine = [rows[serial] for serial in trained[first : first + share]]
        return batch_of(self._trainer, mine), [len(row["completion_ids"]) for row in mine]

"""The squared error of the estimates against the probes of a run: each probe is read from the database once."""

from __future__ import annotations

from typing import Any

import numpy as np

from estimators.probe_error import squared_errors
from openrlhf_dbb.watch.numbers import rounded, whole
from openrlhf_dbb.watch.series import Columns, thinned_sums
from storage import PosteriorStore
from storage.engine import chunks

_STEPS = 1_000  # read in one transaction

_READ = """
    SELECT p.step, p.samples, p.successes, p.squares, h.mean, h.successes / h.rollouts
    FROM dbb_probe p JOIN dbb_history h ON h.run_id = p.run_id AND h.step = p.step AND h.prompt_id = p.prompt_id
    WHERE p.run_id = :run AND p.step BETWEEN :first AND :last AND p.samples > 1 ORDER BY p.step"""


class ProbeErrors:
    """Sums of the squared errors of each probed step. Not for several threads at once.

    A probe with an estimate is of a group that the step was trained on; others, and probes of one rollout, say nothing.
    """

    def __init__(self, run_id: int) -> None:
        self._run_id = run_id
        self._start_over(0)

    def _start_over(self, restarts: int) -> None:
        self._until, self._restarts = 0, restarts
        self._sums = Columns()

    @property
    def steps(self) -> int:
        """How many probed steps were read."""
        return self._sums.size

    def behind(self, last: int, restarts: int) -> bool:
        """Whether steps until ``last`` have not been read.

        Args:
            restarts: of the series; if it has grown, what was read is forgotten.
        """
        if restarts != self._restarts:
            self._start_over(restarts)
        return self._until < last

    def read_part(self, store: PosteriorStore, last: int) -> None:
        """Read the probes of some of the steps until ``last``, in one short transaction."""
        first, until = self._until + 1, min(self._until + _STEPS, last)
        key = {"run": self._run_id, "first": first, "last": until}
        with store.database.transaction() as connection:
            if not self._sums.size and not list(chunks(connection, f"{_READ} LIMIT 1", key | {"last": last})):
                self._until = last
                return
            rows = [row for part in chunks(connection, _READ, key) for row in part]
        self._until = until
        if not rows:
            return
        step, samples, successes, squares, mean, group = np.array(rows, dtype=np.float64).T
        errors = (squared_errors(each, samples, successes, squares) for each in (mean, group))
        found = dict(zip(("estimate", "group"), errors, strict=True)) | {"samples": samples, "n": np.ones_like(step)}
        steps, sums = thinned_sums(step + 1, 1, *found.values())
        self._sums.append({"step": steps - 1} | dict(zip(found, sums, strict=True)), len(steps))

    def curves(self, width: int) -> dict[str, Any] | None:
        """Mean squared error over points of ``width`` steps, of the estimates and of S / N; None without probes."""
        if not self._sums.size:
            return None
        names = ("n", "estimate", "group")
        step, (n, estimate, group) = thinned_sums(self._sums["step"], width, *(self._sums[name] for name in names))
        return {
            "step": whole(step),
            "estimate": rounded(estimate / n),
            "group": rounded(group / n),
            "groups": int(self._sums["n"].sum()),
            "samples": int(self._sums["samples"].sum()),
        }

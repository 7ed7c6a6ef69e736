"""The ledger of groups: what became of every group that asynchronous training asked for.

A group is open from the call that asks for its rollouts until a step settles it, or until it is abandoned: its rollouts
are in no step.

Axis in comments: K groups.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection

from storage.bulk import insert_columns
from storage.checks import integers
from storage.engine import Database, execute
from storage.errors import StoreError

SETTLED = ("trained", "filtered", "stale")
"""What a step makes of its groups."""

FATES = ("open", *SETTLED, "abandoned")
"""Everything that a group can be."""

Fates = Mapping[str, NDArray[np.int64]]
"""Ordinals of groups by fate."""

UNDONE = "(fate = 'open' OR step > :step)"
"""SQL that is true of the groups that going back to ``:step`` abandons."""

_STORED = "SELECT ordinal, pass, prompt_id, rollouts, policy_version FROM dbb_group WHERE run_id = :run AND {among}"
_SETTLE = "UPDATE dbb_group SET fate = :fate, step = :step WHERE run_id = :run AND fate = 'open' AND {among}"
_SETTLED = "SELECT ordinal, fate, step FROM dbb_group WHERE run_id = :run AND {among}"
_ABANDON = f"UPDATE dbb_group SET fate = 'abandoned', step = NULL WHERE run_id = :run AND {UNDONE}"

_LOWEST = {"ordinals": 1, "passes": 0, "prompt_ids": 0, "rollouts": 1}


@dataclass
class GroupRows:
    """Groups that are asked for together, before any of their rollouts is generated.

    Attributes:
        ordinals: (K,) int, >= 1, unique: the number of the group in the run, never used again.
        passes: (K,) int, >= 0, pass over the data.
        prompt_ids: (K,) int.
        rollouts: (K,) int, >= 1, how many were asked for.
        policy_version: training steps that the policy had seen by then, finite, >= 0.
    """

    ordinals: NDArray[np.int64]
    passes: NDArray[np.int64]
    prompt_ids: NDArray[np.int64]
    rollouts: NDArray[np.int64]
    policy_version: float

    def checked(self) -> GroupRows:
        """A copy with exact types, sorted by ordinal.

        Raises:
            StoreError: a wrong shape or type, a value out of range, or an ordinal that is there twice.
        """
        columns = {name: integers(f"groups.{name}", getattr(self, name)) for name in _LOWEST}
        size = len(columns["ordinals"])
        for name, lowest in _LOWEST.items():
            values = columns[name]
            if len(values) != size:
                raise StoreError(f"groups.{name} has {len(values)} values for {size} ordinals; give one for each")
            if size and values.min() < lowest:
                at = int(values.argmin())
                raise StoreError(f"groups.{name}[{at}] is {values[at]}; it must be at least {lowest}")
        _refuse_twice("groups.ordinals", columns["ordinals"])
        version = self.policy_version
        if not isinstance(version, int | float | np.number) or not 0 <= version < math.inf:
            raise StoreError(
                f"groups.policy_version is {version!r}; it must be a finite number of training steps, at least 0"
            )
        order = np.argsort(columns["ordinals"])
        return GroupRows(**{name: values[order] for name, values in columns.items()}, policy_version=float(version))


def checked_fates(step: int, fates: Fates) -> Fates | None:
    """A copy as int64, sorted; None if there are no groups.

    Raises:
        StoreError: an unknown fate, ordinals that are no vector of integers, or a group that is there twice.
    """
    for fate in fates:
        if fate not in SETTLED:
            raise StoreError(f"step {step}: fates holds {fate!r}; it may hold {', '.join(SETTLED)}")
    checked = {fate: np.sort(integers(f"fates[{fate!r}]", fates[fate])) for fate in SETTLED if fate in fates}
    _refuse_twice(f"step {step}: fates", np.concatenate([np.empty(0, dtype=np.int64), *checked.values()]))
    return {fate: ordinals for fate, ordinals in checked.items() if len(ordinals)} or None


def _refuse_twice(name: str, ordinals: NDArray[np.int64]) -> None:
    in_order = np.sort(ordinals)
    twice = in_order[1:][in_order[1:] == in_order[:-1]]
    if twice.size:
        raise StoreError(f"{name}: group {twice[0]} is there more than once; name it once")


def write(connection: Connection, database: Database, run_id: int, name: str, rows: GroupRows) -> None:
    """Write checked rows as open groups of a run, in this transaction; those already there stay as they are.

    Raises:
        StoreError: an ordinal is there with other content.
    """
    query = _STORED.format(among=database.one_of("ordinal"))
    found: Any = execute(connection, query, {"run": run_id, "ids": database.ids(rows.ordinals)})
    stored = {row[0]: tuple(row[1:]) for row in found}
    versions = np.full(len(rows.ordinals), rows.policy_version)
    contents = zip(*(each.tolist() for each in (rows.passes, rows.prompt_ids, rows.rollouts, versions)), strict=True)
    for ordinal, content in zip(rows.ordinals.tolist(), contents, strict=True):
        if stored.get(ordinal, content) != content:
            raise StoreError(
                f"group {ordinal} of run {name!r} is already recorded with different content: (pass, prompt_id, "
                f"rollouts, policy_version) is {stored[ordinal]}, not {content}; go on after Run.last_ordinal()"
            )
    new = ~np.isin(rows.ordinals, list(stored))
    insert_columns(
        connection,
        "dbb_group",
        {
            "run_id": run_id,
            "ordinal": rows.ordinals[new],
            "pass": rows.passes[new],
            "prompt_id": rows.prompt_ids[new],
            "rollouts": rows.rollouts[new],
            "policy_version": versions[new],
            "fate": "open",
        },
    )


def settle(connection: Connection, database: Database, run_id: int, name: str, step: int, fates: Fates) -> None:
    """Give groups their fates in a step of the run, in its transaction; only checked fates.

    Raises:
        StoreError: one of them is not open.
    """
    among = database.one_of("ordinal")
    for fate, ordinals in fates.items():
        key = {"run": run_id, "ids": database.ids(ordinals)}
        settled = execute(connection, _SETTLE.format(among=among), {**key, "fate": fate, "step": step}).rowcount
        if settled == len(ordinals):
            continue
        found: Any = execute(connection, _SETTLED.format(among=among), key)
        stored = {row[0]: (row[1], row[2]) for row in found}
        ordinal = next(each for each in ordinals.tolist() if stored.get(each) != (fate, step))
        was, of = stored.get(ordinal, ("not recorded", None))
        raise StoreError(
            f"step {step} of run {name!r}: group {ordinal} cannot be {fate}, it is {was}"
            f"{'' if of is None else f' in step {of}'}; only an open group, recorded by record_groups, can"
        )


def abandon(connection: Connection, run_id: int, step: int) -> None:
    """Abandon the run's open groups, and those that a step after ``step`` settled, in this transaction."""
    execute(connection, _ABANDON, {"run": run_id, "step": step})

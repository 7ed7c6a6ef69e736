"""Whether the prompts of a stored run were drawn by its posteriors: with strategy posterior and dbb, by visits."""

import sqlite3

import numpy as np
import pytest

from openrlhf_dbb.core.strategies.posterior import expected_variance, inclusion


def check_draws(database, prompts, *, batch, rollouts, discount, floor=0.25, power=0.5):
    """Every step's probabilities are those of the posteriors right before it, whatever was killed and undone.

    Args:
        database: path of a SQLite store with one run.
        prompts: P, of the run.
        batch, rollouts: B and N.
    """
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
        history = connection.execute(
            "SELECT step, prompt_id, rollouts, successes, inclusion FROM posterior_history ORDER BY step, prompt_id"
        ).fetchall()
    known = {}  # (alpha, beta); all others have the prior
    for step in range(1, history[-1][0] + 1):
        rows = [row[1:] for row in history if row[0] == step]
        assert len(rows) == batch
        assert sum(count for _, count, _, _ in rows) == batch * rollouts
        assert all(count == rollouts for _, count, _, _ in rows)
        of_all = np.array([*known.values(), *[(1.0, 1.0)] * (prompts - len(known))])
        expected = inclusion(expected_variance(*(discount * of_all).T) ** power, batch, floor)
        place = {prompt: at for at, prompt in enumerate(known)}
        for prompt, count, successes, stored in rows:
            assert stored == pytest.approx(expected[place.get(prompt, -1)], rel=1e-9), (step, prompt)
            alpha, beta = known.get(prompt, (1.0, 1.0))
            known[prompt] = discount * alpha + successes, discount * beta + count - successes

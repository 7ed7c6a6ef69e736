"""Groups that an earlier policy generated. A group here is (prompt, generated at update, successes, rollouts)."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf_dbb import estimators

PROMPTS = 3
MOST = 5  # rollouts of a group


def by_updates(**parameters):
    return estimators.build("dbb", forgetting="updates", **({"discount": 0.5, "updates_per_epoch": 1.0} | parameters))


def rewards(successes, rollouts):
    return [1.0] * successes + [0.0] * (rollouts - successes) + [np.nan] * (MOST - rollouts)


def observe(dbb, state, groups):
    """One step with these groups; the estimate."""
    lag_P = np.array([state["updates"][0] + 1 - generated_at for _, generated_at, _, _ in groups])
    rewards_P_G = np.array([rewards(*counted) for _, _, *counted in groups]).reshape(-1, MOST)
    return dbb.observe_at(state, np.array([group[0] for group in groups], dtype=np.int64), rewards_P_G, lag_P)


def closed_form(dbb, groups):
    """What the state of each prompt must be, from the definition: (alpha, beta, seen_at, first_at)."""
    rows = []
    for prompt in range(PROMPTS):
        seen = [group[1:] for group in groups if group[0] == prompt]
        if not seen:
            rows.append((dbb.prior_alpha, dbb.prior_beta, -1.0, 0.0))
            continue
        first, last = min(at for at, _, _ in seen), max(at for at, _, _ in seen)
        prior = dbb.discount ** (1 + (last - first) / dbb.updates_per_epoch)
        weights = [dbb.discount ** ((last - at) / dbb.updates_per_epoch) for at, _, _ in seen]
        alpha = prior * dbb.prior_alpha + sum(w * s for w, (_, s, _) in zip(weights, seen, strict=True))
        beta = prior * dbb.prior_beta + sum(w * (n - s) for w, (_, s, n) in zip(weights, seen, strict=True))
        rows.append((alpha, beta, last, first))
    return dict(zip(("alpha", "beta", "seen_at", "first_at"), np.array(rows).T, strict=True))


def in_steps(data, dbb, groups):
    """The state after the groups were observed in some order, each at its own update or some steps later."""
    steps = {}
    for group in data.draw(st.permutations(groups)):
        step = math.ceil(group[1]) + data.draw(st.integers(0, 6))
        while group[0] in [prompt for prompt, *_ in steps.get(step, [])]:  # a prompt has one group in a step
            step += 1
        steps.setdefault(step, []).append(group)
    state = dbb.initial_state(PROMPTS)
    for step in range(1, max(steps) + 1):
        observe(dbb, state, steps.get(step, []))
    return state


GROUPS = st.lists(
    st.tuples(
        st.integers(0, PROMPTS - 1),
        st.integers(4, 28).map(lambda quarters: quarters / 4),
        st.integers(0, MOST),
        st.integers(1, MOST),
    ).map(lambda group: (*group[:2], min(group[2:]), group[3])),
    min_size=1,
    max_size=8,
)


@given(
    data=st.data(),
    groups=GROUPS,
    discount=st.floats(0.2, 1.0),
    updates_per_epoch=st.floats(1.0, 20.0),
    prior=st.tuples(st.floats(0.1, 4.0), st.floats(0.1, 4.0)),
)
@settings(max_examples=200, deadline=None)
def test_neither_the_order_nor_the_steps_of_observation_matter(data, groups, discount, updates_per_epoch, prior):
    dbb = by_updates(discount=discount, updates_per_epoch=updates_per_epoch, prior_alpha=prior[0], prior_beta=prior[1])
    state = in_steps(data, dbb, groups)
    for field, values in closed_form(dbb, groups).items():
        np.testing.assert_allclose(state[field], values, rtol=1e-12, atol=1e-12, err_msg=field)


@pytest.mark.parametrize("lag", [0.0, 0.5, 4.0])
def test_the_first_group_of_a_prompt_discounts_the_prior_once_however_late_it_is(lag):
    dbb = by_updates()
    state = dbb.initial_state(PROMPTS) | {"updates": np.array([2.0])}
    observe(dbb, state, [(1, 3.0 - lag, 1, 4)])
    assert (state["alpha"][1], state["beta"][1]) == (0.5 + 1, 0.5 + 3)
    assert (state["seen_at"][1], state["first_at"][1]) == (3 - lag, 3 - lag)
    assert [state[field][[0, 2]].tolist() for field in dbb.state_fields] == [[1, 1], [1, 1], [-1, -1], [0, 0]]
    observe(dbb, state, [])
    observe(dbb, state, [(1, 5.0 - lag, 4, 4)])  # no first group any more, whatever number its update had
    assert (state["alpha"][1], state["beta"][1]) == (0.25 * 1.5 + 4, 0.25 * 3.5)

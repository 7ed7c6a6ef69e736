"""Stored posteriors in any trainer: estimators and storage around a loop, no framework needed.

    python examples/any_trainer.py        (from the repository; writes any_trainer.db)

The "policy" here is a table of success probabilities that rises a little at every visit.
"""

import numpy as np

from estimators import build, standardized
from storage import StepRows, open_store

PROMPTS, ROLLOUTS, STEPS = 20, 8, 5

random = np.random.default_rng(0)
texts = [f"What is {i} + {i}?" for i in range(PROMPTS)]
labels = [str(2 * i) for i in range(PROMPTS)]
success = random.uniform(0.05, 0.6, PROMPTS)

dbb = build("dbb", discount=0.5)
with open_store("sqlite:///any_trainer.db") as store:
    ids = store.register_prompts(texts, labels)
    run = store.create_run(
        f"demo-{len(store.runs())}", estimator="dbb", estimator_version=dbb.version, parameters={"discount": 0.5},
        state_fields=dbb.state_fields, model="table", dataset="sums", dataset_digest="", reward="exact", config={},
    )  # fmt: skip
    state, last_visit = dbb.initial_state(PROMPTS), np.full(PROMPTS, -1)
    for step in range(1, STEPS + 1):
        rewards_P_G = (random.random((PROMPTS, ROLLOUTS)) < success[:, None]).astype(float)
        new_state, estimate = dbb.observe(state, rewards_P_G)
        run.record_step(
            step,
            StepRows(
                prompt_ids=ids,
                rollouts=np.full(PROMPTS, ROLLOUTS),
                successes=rewards_P_G.sum(axis=1),
                mean=estimate.mean,
                variance=estimate.variance,
                state=np.column_stack([new_state[name] for name in dbb.state_fields]),
                previous_state=np.column_stack(
                    [np.where(last_visit < 0, np.nan, state[name]) for name in dbb.state_fields]
                ),
                previous_step=last_visit,
            ),
        )
        advantages_P_G = standardized(rewards_P_G, estimate)  # here the policy would be updated with them
        state, last_visit, success = new_state, np.full(PROMPTS, step), np.minimum(success + 0.08, 1)
        print(
            f"step {step}: success rate {rewards_P_G.mean():.2f}, posterior mean {estimate.mean.mean():.2f}, "
            f"mean |advantage| {np.abs(advantages_P_G).mean():.2f}"
        )
    run.finish()
    print(f"look: openrlhf-dbb --store.url sqlite:///{store.location} show {run.record.name}")

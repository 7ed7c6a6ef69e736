"""Stored posteriors in any trainer: a loop around Posteriors, no framework needed.

    python examples/any_trainer.py        (from the repository; writes any_trainer.db)

The "policy" here is a table of success probabilities that rises a little at every step.
posteriors.ipynb compares estimators on such a table.
"""

import argparse
import time

import numpy as np

from openrlhf_dbb import Posteriors

argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
PROMPTS, ROLLOUTS, STEPS = 20, 8, 5

random = np.random.default_rng(0)
texts = [f"What is {i} + {i}?" for i in range(PROMPTS)]
labels = [str(2 * i) for i in range(PROMPTS)]
policy = random.uniform(0.05, 0.6, PROMPTS)

name = f"demo-{time.time_ns()}"
with Posteriors.create("sqlite:///any_trainer.db", name, texts, labels, parameters={"discount": 0.5}) as posteriors:
    for step in range(1, STEPS + 1):
        drawn = np.repeat(np.arange(PROMPTS), ROLLOUTS)
        rewards = random.random(len(drawn)) < policy[drawn]  # here the policy would answer and be verified
        scored = posteriors.observe(step, [texts[i] for i in drawn], [labels[i] for i in drawn], rewards)
        policy = np.minimum(policy + 0.08, 1)  # here it would be trained with scored.advantages
        posteriors.checkpoint(step, f"step{step}")  # before a model checkpoint counts as saved
        print(
            f"step {step}: success rate {rewards.mean():.2f}, posterior mean {scored.mean.mean():.2f}, "
            f"mean |advantage| {scored.metrics['estimator/abs_advantage']:.2f}"
        )
    posteriors.finish()
    print(f"look: openrlhf-dbb --store.url sqlite:///{posteriors.store.location} show {name}")

"""Stored posteriors in any trainer: a loop around Posteriors, no framework needed.

    python examples/any_trainer.py                         (from the repository; writes any_trainer.db)
    python examples/any_trainer.py --strategy posterior    draws the prompts by their posteriors

The "policy" here is a table of success probabilities that rises a little at every step.
posteriors.ipynb compares estimators on such a table.
"""

import argparse
import time

import numpy as np

from openrlhf_dbb import Posteriors
from openrlhf_dbb.core import strategies
from openrlhf_dbb.core.step import StepExtras

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--strategy", default="plain", help="plain or posterior (plain)")
options = parser.parse_args()
PROMPTS, ROLLOUTS, STEPS, GROUPS = 20, 8, 5, 10

random = np.random.default_rng(0)
texts = [f"What is {i} + {i}?" for i in range(PROMPTS)]
labels = [str(2 * i) for i in range(PROMPTS)]
policy = random.uniform(0.05, 0.6, PROMPTS)
strategy = strategies.get(options.strategy)()
sampler = strategy.sampler(strategies.RunFacts(GROUPS, ROLLOUTS))

name = f"demo-{time.time_ns()}"
with Posteriors.create(
    "sqlite:///any_trainer.db", name, texts, labels, estimator="dbb"
) as posteriors:
    place = {number: texts.index(text) for (text, _), number in posteriors.prompt_ids.items()}
    for step in range(1, STEPS + 1):
        prompts, extras = np.arange(PROMPTS), StepExtras()
        if strategy.draws:
            drawn = [sampler.next_prompt(posteriors.predictive) for _ in range(GROUPS)]
            prompts = np.array([place[each.prompt_id] for each in drawn])
            weights = np.repeat([each.weight for each in drawn], ROLLOUTS)
            extras = StepExtras(
                weights=weights, inclusion=np.repeat([each.inclusion for each in drawn], ROLLOUTS)
            )
        rows = np.repeat(prompts, ROLLOUTS)
        # Here the policy would answer and be verified
        rewards = random.random(len(rows)) < policy[rows]
        of_rows = [texts[i] for i in rows], [labels[i] for i in rows]
        scored = posteriors.observe(step, *of_rows, rewards, extras=extras)
        if strategy.draws:
            for each, group in zip(drawn, rewards.reshape(GROUPS, ROLLOUTS), strict=True):
                sampler.observe(each, strategies.varies(group.astype(float)))
            sampler.end_step()
            if step * GROUPS % PROMPTS == 0:
                sampler.end_pass()  # a pass tells whether the draws pay
        policy = np.minimum(policy + 0.08, 1)  # here it would be trained with scored.advantages
        posteriors.checkpoint(step, f"step{step}")  # before a model checkpoint counts as saved
        print(
            f"step {step}: success rate {rewards.mean():.2f}, posterior mean {scored.mean.mean():.2f}, "
            f"mean |advantage| {scored.metrics['estimator/abs_advantage']:.2f}"
        )
    posteriors.finish()
    print(f"look: openrlhf-dbb --store.url sqlite:///{posteriors.store.location} show {name}")

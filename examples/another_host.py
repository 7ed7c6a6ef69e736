"""A sketch of a further host: the orchestrator of prime-rl as of spring 2026.

tests/test_hosts.py runs it with a stand-in for prime-rl. Its ``scheduler.generate_batch`` and
``compute_advantages`` are replaced. ``interleave_rollout``, ``training_batch_sender.send`` and
``ckpt_manager.save`` stay. docs/hosts.md explains the parts.
"""

import asyncio
from concurrent.futures import FIRST_COMPLETED, wait

import numpy as np

from openrlhf_dbb import Posteriors
from openrlhf_dbb.core import exact_json, rules
from openrlhf_dbb.core.filling import Answer, Filler, ShuffledPrompts
from openrlhf_dbb.core.host import Capability, Host
from openrlhf_dbb.core.strategies import STRATEGIES, RunFacts
from openrlhf_dbb.core.texts import label_text, prompt_text

PRIME_RL = Host(
    name="prime-rl",
    lacks={
        Capability.EXTRA_ROWS: "this sketch sends the rollouts of a step alone",
        Capability.READ: "a rollout of verifiers has a reward, not what was read",
    },
    tested={},  # a test for each other row of FEATURES
)


class Rollouts:
    """The Engine: a group is judged when it is finished, while others are generated."""

    def __init__(self, generate, loop):
        # (row, rollouts): vf_utils.generate with the row's example, model and clients
        self._generate = generate
        self._loop = loop  # asyncio's, in which the orchestrator runs
        self._begun = {}

    def begin(self, requests):
        for request in requests:
            work = self._generate(request.prompt, request.rollouts)
            self._begun[asyncio.run_coroutine_threadsafe(work, self._loop)] = request.ticket

    def finished(self):
        done, _ = wait(self._begun, return_when=FIRST_COMPLETED)
        answers = []
        for future in done:
            rollouts = future.result()
            rewards = [rollout["reward"] for rollout in rollouts]  # None where the verifier failed
            answer = Answer(rollouts, np.array(rewards, dtype=float))
            answers.append((self._begun.pop(future), answer))
        return answers


class Memory:
    def __init__(self, store, name, examples, engine, strategy, groups, rollouts):
        self.keys = [(prompt_text(row["prompt"]), label_text(row["answer"])) for row in examples]
        self.posteriors = Posteriors.create(store, name, *zip(*self.keys, strict=True))
        self.strategy = strategy
        chosen = STRATEGIES.build(strategy)
        estimator = self.posteriors.estimator
        plan = rules.Plan(estimator, strategy=chosen, group=rollouts, host=PRIME_RL)
        line = rules.refusal(plan)
        if line is not None:
            raise ValueError(line)
        prompts = ShuffledPrompts([self.posteriors.prompt_ids[key] for key in self.keys], seed=0)
        forecast = self.posteriors.predictive if chosen.draws else None
        sampler = chosen.sampler(RunFacts(groups, rollouts))
        self.filler = Filler(prompts, engine, sampler, predictive=forecast)

    def step(self):
        """Return rollouts to train on and their advantages, one for each sample of interleave_rollout."""
        batch = self.filler.fill_over_passes(self.strategy)
        groups = batch.trained + batch.filtered
        rows = batch.groups_of_each()
        texts, labels = zip(*[self.keys[group.prompt] for group, _ in rows], strict=True)
        scores = np.concatenate([group.scores for group in groups])
        step, extras = self.posteriors.step + 1, batch.extras(rows)
        scored = self.posteriors.observe(step, texts, labels, scores, extras=extras)
        rollouts = [rollout for group in batch.trained for rollout in group.rollouts]
        return rollouts, scored.advantages[: len(rollouts)]

    def save(self, folder):
        """Call it before ``ckpt_manager.save``; a resume loads the filler and opens the run by Posteriors.resume."""
        self.posteriors.checkpoint(self.posteriors.step, folder.name)
        (folder / "filler.json").write_text(exact_json.dumps(self.filler.state(), "the filler"))

"""The Ray actors of a session, which begin one run after another."""

from __future__ import annotations

import gc
from typing import Any

import ray
import torch
from openrlhf.utils.agent import SingleTurnAgentExecutor

from openrlhf_dbb.actors.policy_actor import PolicyActor
from openrlhf_dbb.actors.vllm_actor import StrictRolloutActor


class SharedPolicy(PolicyActor):
    """The policy's actor; can be given another model."""

    def init_model_from_pretrained(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        """Drop the previous run's model, load this run's, and send it to vLLM, which still holds the previous one."""
        self.actor = self.actor_optim = self.actor_scheduler = self.trainer = None
        gc.collect()
        super().init_model_from_pretrained(strategy, *args, **kwargs)
        # Only trained weights are sent, and the engines have the previous run's below this run's adapters, too.
        made: Any = self.trainer
        frozen = [weight for weight in made.actor.parameters() if not weight.requires_grad]
        for weight in frozen:
            weight.requires_grad = True
        if strategy.args.vllm.enable_sleep and torch.distributed.get_rank() == 0:
            ray.get([engine.wake_up.remote(tags=["weights"]) for engine in made.vllm_engines])
        self.broadcast_to_vllm()
        for weight in frozen:
            weight.requires_grad = False


class SharedRollouts(StrictRolloutActor):
    """vLLM's actor; can begin another run."""

    async def begin(self, seed: int, reward: Any) -> None:
        """Sample from a new random stream, and score with this reward function."""
        await self.llm.collective_rpc(_seed, args=(seed,))
        await self.llm.reset_prefix_cache()
        self.executor = SingleTurnAgentExecutor(reward)


def _seed(worker: Any, seed: int) -> None:
    """Runs in a vLLM worker. With CUDA vLLM draws the seed of each request from numpy."""
    import numpy as np

    np.random.seed(seed)
    torch.manual_seed(seed)

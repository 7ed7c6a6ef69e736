"""OpenRLHF's policy actor with our training pass, extra rows, and a quicker weight sync."""

import contextlib
from pathlib import Path
from typing import Any

from openrlhf_dbb.platform import cpu

with cpu.without_unused("policy"):
    import ray
    import torch
    from openrlhf.trainer.ppo_utils.experience import (
        Experience,
        make_experience_batch,
        remove_padding_in_sequences,
        split_experience_batch,
    )
    from openrlhf.trainer.ray import ppo_actor
    from openrlhf.trainer.ray.ppo_actor import PolicyModelActor
    from openrlhf.trainer.ray.utils import get_physical_gpu_id
    from openrlhf.utils.distributed_util import torch_dist_barrier_and_cuda_sync
    from torch.multiprocessing.reductions import reduce_tensor

    import openrlhf_dbb.actors.vllm_actor  # noqa: F401  Ray imports it with the engines' handles
    from openrlhf_dbb import upstream
    from openrlhf_dbb.actors.micro_batches import chosen
    from openrlhf_dbb.actors.training_pass import NOT_FINITE, PolicyTrainer, ResponseActor
    from openrlhf_dbb.errors import RunError
    from openrlhf_dbb.platform import cuda, machine
    from openrlhf_dbb.platform.weights import (
        BUCKET_BYTES,
        Parameter,
        Weight,
        buckets,
        gather,
        merged,
        pack,
    )
    from openrlhf_dbb.saved import best_model, checkpoints

_OF_ROWS = ("sequences", "action_mask", "attention_mask")  # what ``forward`` takes of a micro-batch


class PolicyActor(upstream.plain_class(PolicyModelActor)):  # type: ignore[misc]
    """OpenRLHF's policy actor with our training pass, transfer of weights and saved files."""

    def init_model_from_pretrained(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        """Load the model with our model and trainer classes in place of upstream's."""
        upstream.replace(ppo_actor, "Actor", ResponseActor)
        upstream.replace(ppo_actor, "ActorPPOTrainer", PolicyTrainer)
        super().init_model_from_pretrained(strategy, *args, **kwargs)

    def try_longest_micro_batch(self) -> None:
        """Take a micro-batch of the longest rollouts forward and backward on every rank; it leaves no trace.

        Raises:
            RunError: it does not fit into the GPU's memory, or its gradient is not finite.
        """
        args = self.strategy.args
        rows = cuda.rows(args, "train")
        length = args.data.max_len
        try:
            if args.ds.enable_sleep:
                self.reload_states()  # of DeepSpeed's engine
            gradient = self._gradient_of_embeddings(rows, length)
        except torch.OutOfMemoryError as error:
            raise RunError(
                f"--train.micro_batch_size {args.train.micro_batch_size}: {rows} rows of {length} tokens do not fit "
                f"into {machine.look().describe() or 'the memory'}; {cuda.less_memory(args)}"
            ) from error
        if not gradient.isfinite().all():
            raise RunError(
                f"{NOT_FINITE}; {rows} rows of {length} tokens gave it before the training, so try another "
                "--ds.attn_implementation, such as eager"
            )
        del gradient
        torch.cuda.empty_cache()
        if args.ds.enable_sleep:
            self.offload_states()

    def _gradient_of_embeddings(self, rows: int, length: int) -> torch.Tensor:
        """Return the gradient of the mean log-prob of equal tokens down to the embeddings (B, T, H).

        It does not go down to the weights, whose gradients DeepSpeed would add up.
        """
        args = self.strategy.args
        policy = self.actor
        engine = policy.model
        tokens = torch.ones(rows, length, dtype=torch.long, device=torch.cuda.current_device())
        actions = tokens[:, 1:][:, -(args.rollout.max_new_tokens or length) :]
        embedded = list[torch.Tensor]()
        embeddings = engine.module.get_input_embeddings()
        hook = embeddings.register_forward_hook(
            lambda _, __, output: embedded.append(output.requires_grad_())
        )
        longest_shared = policy.longest_shared
        policy.longest_shared = 0  # as if each row had its own prompt
        policy.model = engine.module.train()  # the engine would count the pass
        try:
            later = _later_states(engine.optimizer)
            with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
                log_probs, output = policy(
                    tokens, actions, tokens, return_output=True,
                    ring_attn_group=self.strategy.ring_attn_group,
                    return_entropy=args.actor.entropy_coef is not None,
                )  # fmt: skip
                (gradient,) = torch.autograd.grad(log_probs.mean(), embedded)
            del later, output
            return gradient
        finally:
            hook.remove()
            policy.model = engine
            policy.longest_shared = longest_shared

    def execute_batch(
        self, method_name: str, all_data: dict[str, list[Any]], start_idx: int, end_idx: int
    ) -> list[Any]:
        """Call a method on each micro-batch, as upstream does; ``forward`` in the rows' better order.

        Returns:
            For ``forward`` the log-probs (B, A) of each micro-batch as it was given.
        """
        keeps_order = self.strategy.args.ds.packing_samples or "mm_train_inputs_list" in all_data
        if method_name != "forward" or keeps_order:
            return super().execute_batch(method_name, all_data, start_idx, end_idx)
        batches = []
        for number in range(start_idx, end_idx):
            parts = {name: all_data[name][number] for name in _OF_ROWS}
            batches.append(Experience(**parts))
        rows = []
        for batch in batches:
            rows += remove_padding_in_sequences(split_experience_batch(batch))
        in_order = iter(self._log_probs(rows, len(batches)))
        results = []
        for batch in batches:
            result = torch.zeros(batch.action_mask.shape)
            for row in result:
                values = next(in_order)[: len(row)]
                row[: len(values)] = values
            results.append(result)
        return results

    def _log_probs(self, rows: list[Experience], count: int) -> list[torch.Tensor]:
        """Return the log-probs of each row, computed in ``count`` micro-batches, with padding behind them."""
        device = next(self.actor.parameters()).device.type
        log_probs = [torch.empty(0)] * len(rows)
        for numbers in chosen(rows, count, device, self.actor.longest_shared):
            batch = make_experience_batch([rows[number] for number in numbers])
            computed = self.forward(batch.sequences, batch.action_mask, batch.attention_mask)
            for number, values in zip(numbers, computed, strict=True):
                log_probs[number] = values
        return log_probs

    def broadcast_to_vllm(self) -> None:
        """Send the weights to vLLM, many parameters in one message; see ``platform.weights``.

        A message is a broadcast, or on shared GPUs a handle of the policy's memory. This sends
        trained weights only, with adapters merged: vLLM has loaded the frozen ones. Upstream sends
        one parameter at a time; its way is taken where this process has no whole weights to send.
        """
        trainer = self.trainer
        args = self.strategy.args
        # Both are refused with LoRA
        if args.vllm.sync_with_ray or args.ds.tensor_parallel_size > 1:
            super().broadcast_to_vllm()
            return
        trained = {}
        for name, weight in merged(trainer.actor.model.module).items():
            if weight.requires_grad:
                trained[name] = weight
        cleared = []
        if torch.distributed.get_rank() == 0 and args.vllm.enable_prefix_caching:
            cleared = [engine.reset_prefix_cache.remote() for engine in trainer.vllm_engines]
        torch.cuda.empty_cache()
        parameters = [
            Parameter(name, weight.dtype, weight.shape) for name, weight in trained.items()
        ]
        device = next(iter(trained.values())).device.type
        for bucket in buckets(parameters, BUCKET_BYTES[device]):
            self._send(bucket, trained)
        ray.get(cleared)
        torch.cuda.empty_cache()
        torch_dist_barrier_and_cuda_sync()

    def _send(self, bucket: list[Parameter], trained: dict[str, Weight]) -> None:
        """Send a bucket of the trained weights; all ranks call this."""
        trainer = self.trainer
        sends = torch.distributed.get_rank() == 0
        with contextlib.ExitStack() as gathered:
            if self.strategy.args.ds.zero_stage == 3:
                for parameter in bucket:
                    gather(gathered, trained[parameter.name].parts)
            # ZeRO 3 takes the memory of a gathered weight back, while an engine may still read it.
            if sends or trainer.use_cuda_ipc:
                packed = pack(bucket, trained, copy=trainer.use_cuda_ipc)
        if trainer.use_cuda_ipc:
            self._share(bucket, packed)
        elif sends:
            received = [engine.receive_weights.remote(bucket) for engine in trainer.vllm_engines]
            trainer._model_update_group.broadcast(packed, src=0, stream=torch.cuda.current_stream())
            ray.get(received)

    def _share(self, bucket: list[Parameter], packed: torch.Tensor) -> None:
        """Have the engine on each rank's GPU load a bucket from that rank's memory; all ranks call this."""
        handles_of_ranks: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(
            handles_of_ranks, {get_physical_gpu_id(): reduce_tensor(packed)}
        )
        if torch.distributed.get_rank() == 0:
            handles = {}
            for handle_of_gpu in handles_of_ranks:
                handles.update(handle_of_gpu)
            ray.get(
                [
                    engine.receive_weights.remote(bucket, handles)
                    for engine in self.trainer.vllm_engines
                ]
            )
        torch_dist_barrier_and_cuda_sync()  # no rank gives its memory up before all have been read

    def save_best(self, folder: str) -> dict[str, int]:
        """Save the policy into an empty folder, and return the files that this rank's host sees there."""
        ckpt = self.strategy.args.ckpt
        last = ckpt.output_dir
        ckpt.output_dir = folder  # upstream's save_model takes no folder
        self.save_model()
        ckpt.output_dir = last
        return checkpoints.sizes(Path(folder))

    def save_card(self, text: str) -> None:
        """Write the model card beside the trained model. The driver may not see this folder."""
        if torch.distributed.get_rank() == 0:
            (Path(self.strategy.args.ckpt.output_dir) / best_model.CARD).write_text(
                text, encoding="utf-8"
            )

    def append_extra_rows(self, experience: list[Experience]) -> None:
        """Keep rows for the next ``fit``. Their number may differ between ranks."""
        self.trainer.extra_rows += experience

    def checkpoint_files(self, tag: str) -> dict[str, int]:
        """Return size in bytes by path of a checkpoint's files, as this rank's host sees them."""
        return checkpoints.sizes(checkpoints.actor_folder(Path(self.strategy.args.ckpt.path), tag))


def _later_states(optimizer: Any) -> list[torch.Tensor]:
    """Return tensors as large as what comes with the first step: Adam's moments and gradients."""
    adam = getattr(optimizer, "optimizer", optimizer)
    if adam.state:
        return []
    parts = [part for group in adam.param_groups for part in group["params"]]
    # 10 bytes a parameter of this rank's share.
    return [torch.empty(10 * part.numel(), dtype=torch.uint8, device=part.device) for part in parts]

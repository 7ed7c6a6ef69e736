"""List every name of OpenRLHF that the product uses beyond its command line, compared with the installed OpenRLHF.

A name that is not in the list fails a test. A name that an upgrade has changed is a line of
``python tests/upstream_internals.py``, which names the file that has to follow.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from package_source import Package, parameters

from openrlhf_dbb.upstream import COMMAND, installed_folder, main_block


@dataclass(frozen=True)
class Internal:
    """A function, a class or a method of OpenRLHF, and what this package does with it.

    Attributes:
        name: ``function``, ``Class`` or ``Class.method``.
        use: ``replaced`` (see :func:`replace`), ``subclassed``, ``overridden`` (by a method of a subclass),
            ``called``, ``used`` (its attributes) or ``imitated`` (ours is called in its place).
        where: our files that do so, below ``openrlhf_dbb/``.
        parameters: of a function or method, without ``self``, as in the checked version.
        attributes: of a class or its instances, that are read or set.
    """

    name: str
    use: str
    where: str
    parameters: str | None = None
    attributes: str = ""


# fmt: off
INTERNALS: Mapping[str, Sequence[Internal]] = {
    COMMAND: (
        Internal("train", "called", "upstream/__init__.py", "args"),
        Internal("PolicyModelActor", "replaced", "upstream/__init__.py"),
        Internal("get_strategy", "replaced", "upstream/__init__.py", "args"),
        Internal("placement_group", "replaced", "upstream/__init__.py"),
    ),
    "openrlhf.datasets": (
        Internal("PromptDataset", "called", "prompts.py", attributes="prompts, labels"),
        Internal("PromptDataset", "used", "actors/generation.py", attributes="prompts, labels, images"),
        Internal("PromptDataset", "used", "actors/evaluation.py", attributes="prompts, labels, datasources"),
        Internal("PromptDataset", "used", "actors/trainer.py", attributes="prompts, labels, datasources"),
        Internal("PromptDataset.__init__", "called", "prompts.py", "dataset, tokenizer, strategy, input_template"),
    ),
    "openrlhf.datasets.prompts_dataset": (
        Internal("tqdm", "replaced", "prompts.py"),
        Internal("tqdm", "replaced", "upstream/__init__.py"),
    ),
    "openrlhf.datasets.utils": (
        Internal("blending_datasets", "called", "prompts.py",
                 "datasets, probabilities, strategy, seed, max_count, stopping_strategy, dataset_split"),
    ),
    "openrlhf.models": (
        Internal("Actor", "used", "actors/policy_actor.py", attributes="model, is_vlm"),
        Internal("PolicyLoss", "subclassed", "actors/policy_actor.py",
                 attributes="clip_eps_low, clip_eps_high, dual_clip, policy_loss_type, is_correction_level, "
                            "is_correction_mode, is_correction_gating, is_correction_threshold"),
        Internal("PolicyLoss.__init__", "overridden", "actors/policy_actor.py",
                 "clip_eps_low, clip_eps_high, dual_clip, token_level_loss, policy_loss_type, is_correction_level, "
                 "is_correction_mode, is_correction_gating, is_correction_threshold"),
        Internal("PolicyLoss.forward", "overridden", "actors/policy_actor.py",
                 "log_probs, old_log_probs, advantages, action_mask, rollout_log_probs, dp_size, batch_num_tokens, "
                 "global_batch_size"),
    ),
    "openrlhf.models.utils": (
        Internal("compute_reward", "called", "actors/experience_maker.py",
                 "r, kl_coef, kl, action_mask, reward_clip_range"),
    ),
    "openrlhf.trainer.ppo_trainer": (
        Internal("PPOTrainer", "replaced", "upstream/__init__.py"),
        Internal("tqdm", "replaced", "upstream/__init__.py"),
        Internal("blending_datasets", "replaced", "prompts.py"),
        Internal("compute_eval_metrics", "called", "actors/trainer.py",
                 "eval_dataloader, samples_list, n_samples_per_prompt"),
        Internal("PPOTrainer", "subclassed", "actors/trainer.py",
                 attributes="args, tokenizer, prompts_dataloader, eval_dataloader, max_steps, generate_kwargs, "
                            "samples_generator, experience_maker, kl_ctl, vllm_engines, actor_model_group, "
                            "critic_model_group, reward_model_group, reference_model_group, wandb_logger, "
                            "tensorboard_logger"),
        Internal("PPOTrainer.__init__", "overridden", "actors/trainer.py",
                 "pretrain, strategy, actor_model_group, critic_model_group, reward_model_group, "
                 "reference_model_group, vllm_engines, **generate_kwargs"),
        Internal("PPOTrainer.fit", "overridden", "actors/trainer.py", "global_step"),
        Internal("PPOTrainer.init_checkpoint_states", "overridden", "actors/trainer.py", ""),
        Internal("PPOTrainer.train_step", "overridden", "actors/trainer.py", "rollout_samples, global_step"),
        Internal("PPOTrainer.ppo_train", "overridden", "actors/trainer.py", "global_steps"),
        Internal("PPOTrainer.broadcast_to_vllm", "overridden", "actors/trainer.py", ""),
        Internal("PPOTrainer.save_logs_and_checkpoints", "overridden", "actors/trainer.py",
                 "global_step, logs_dict, client_states"),
        Internal("PPOTrainer.save_best_checkpoint", "overridden", "actors/trainer.py",
                 "eval_metrics, global_step, client_states"),
        Internal("PPOTrainer.evaluate", "overridden", "actors/trainer.py", "global_step, **generate_kwargs"),
    ),
    "openrlhf.trainer.ppo_trainer_async": (
        Internal("PPOTrainerAsync", "replaced", "upstream/__init__.py"),
    ),
    "openrlhf.trainer.ppo_utils.experience": (
        Internal("Experience", "used",
                 "actors/experience_maker.py, actors/generation.py, actors/policy_actor.py, "
                 "actors/replay.py, actors/replay_rows.py, actors/rollout_batch.py",
                 attributes="sequences, attention_mask, action_mask, action_log_probs, rollout_log_probs, kl, "
                            "returns, advantages, "
                            "rewards, scores, response_length, truncated, total_length, index, prompts, labels, "
                            "images, info"),
        Internal("split_experience_batch", "called", "actors/replay_rows.py", "experience"),
        Internal("remove_padding_in_sequences", "called", "actors/replay_rows.py", "items"),
    ),
    "openrlhf.trainer.ppo_utils.experience_maker": (
        Internal("RemoteExperienceMaker", "subclassed", "actors/experience_maker.py",
                 attributes="args, advantage_estimator, actor_model_group, kl_ctl, tokenizer"),
        Internal("RemoteExperienceMaker.__init__", "overridden", "actors/experience_maker.py",
                 "actor_model_group, critic_model_group, reward_model_group, initial_model_group, kl_controller, "
                 "strategy, tokenizer, **kwargs"),
        Internal("RemoteExperienceMaker.make_experience_batch", "overridden", "actors/experience_maker.py",
                 "rollout_samples"),
        Internal("RemoteExperienceMaker.split_rollout_samples", "called", "actors/experience_maker.py",
                 "rollout_samples"),
        Internal("RemoteExperienceMaker.make_experience", "called", "actors/experience_maker.py", "samples_list"),
        Internal("RemoteExperienceMaker.get_cumulative_returns", "called", "actors/experience_maker.py",
                 "rewards, action_mask, gamma"),
    ),
    "openrlhf.trainer.ppo_utils.kl_controller": (
        Internal("FixedKLController", "used", "actors/experience_maker.py", attributes="value"),
        Internal("AdaptiveKLController", "used", "actors/experience_maker.py", attributes="value"),
    ),
    "openrlhf.trainer.ppo_utils.length_penalty": (
        Internal("apply_length_penalties", "called", "actors/experience_maker.py", "experiences, args"),
    ),
    "openrlhf.trainer.ppo_utils.replay_buffer": (
        Internal("NaiveReplayBuffer", "used", "actors/policy_actor.py",
                 attributes="items, sample_batch_size, dynamic_batch, dynamic_indices"),
    ),
    "openrlhf.trainer.ppo_utils.samples_generator": (
        Internal("SamplesGenerator", "subclassed", "actors/generation.py",
                 attributes="args, prompts_dataloader, eval_dataloader, vllm_engines"),
        Internal("SamplesGenerator.__init__", "overridden", "actors/generation.py",
                 "strategy, prompts_dataloader, eval_dataloader, tokenizer, vllm_engines"),
        Internal("SamplesGenerator.generate_samples", "overridden", "actors/generation.py", "**generate_kwargs"),
        Internal("SamplesGenerator.generate_eval_samples", "overridden", "actors/generation.py", "**generate_kwargs"),
        Internal("SamplesGenerator._process_response_into_experience", "called", "actors/generation.py",
                 "response, **generate_kwargs"),
    ),
    "openrlhf.trainer.ray.launcher": (
        Internal("placement_group", "replaced", "upstream/__init__.py"),
        Internal("RayActorGroup", "used", "actors/experience_maker.py", attributes="_actor_handlers, duplicate_actors"),
        Internal("RayActorGroup", "used", "driver/launch.py", attributes="_actor_handlers"),
        Internal("RayActorGroup.async_run_method", "called", "actors/trainer.py", "method_name, *args, **kwargs"),
        Internal("RayActorGroup.async_run_method_batch", "called", "actors/experience_maker.py",
                 "method_name, **kwargs"),
    ),
    "openrlhf.trainer.ray.ppo_actor": (
        Internal("stateless_init_process_group", "replaced", "platform/backend.py",
                 "master_address, master_port, rank, world_size, device"),
        Internal("ActorPPOTrainer", "used", "actors/policy_actor.py",
                 attributes="actor, actor_loss_fn, replay_buffer, use_cuda_ipc, vllm_engines, _model_update_group"),
        Internal("PolicyModelActor", "subclassed", "actors/policy_actor.py", attributes="actor, strategy, trainer"),
        Internal("PolicyModelActor.__init__", "overridden", "actors/policy_actor.py",
                 "world_size, rank, master_addr, master_port"),
        Internal("PolicyModelActor.init_model_from_pretrained", "overridden", "actors/policy_actor.py",
                 "strategy, pretrain, max_steps, vllm_engines"),
        Internal("PolicyModelActor.save_checkpoint", "overridden", "actors/policy_actor.py",
                 "tag, client_states, metric_value, metric_key"),
        Internal("PolicyModelActor.save_model", "called", "actors/policy_actor.py", ""),
        Internal("PolicyModelActor.get_checkpoint_states", "called", "actors/trainer.py", ""),
        Internal("PolicyModelActor.fit", "overridden", "actors/policy_actor.py", "kl_ctl"),
        Internal("PolicyModelActor.broadcast_to_vllm", "overridden", "actors/policy_actor.py", ""),
    ),
    "openrlhf.trainer.ray.vllm_engine": (
        Internal("placement_group", "replaced", "upstream/__init__.py"),
        Internal("RolloutRayActor", "replaced", "upstream/__init__.py"),
        Internal("RolloutRayActor.get_num_unfinished_requests", "called", "actors/generation.py", ""),
        Internal("RolloutRayActor.sleep", "called", "actors/generation.py", "level"),
        Internal("RolloutRayActor.wake_up", "called", "actors/generation.py", "tags"),
        Internal("vllm", "replaced", "actors/vllm_actor.py"),
        Internal("RolloutRayActor", "subclassed", "actors/vllm_actor.py", attributes="executor, llm"),
        Internal("RolloutRayActor.__init__", "overridden", "actors/vllm_actor.py",
                 "*args, bundle_indices, agent_func_path, remote_rm_url, mm_pad_token_ids, **kwargs"),
        Internal("RolloutRayActor.generate", "overridden", "actors/vllm_actor.py",
                 "prompt_token_ids, sampling_params, multi_modal_data"),
        Internal("RolloutRayActor.pause_generation", "called", "actors/ahead.py", ""),
        Internal("RolloutRayActor.resume_generation", "called", "actors/ahead.py", ""),
        Internal("RolloutRayActor.get_num_unfinished_requests", "called", "driver/launch.py", ""),
    ),
    "openrlhf.trainer.ray.vllm_worker_wrap": (
        Internal("WorkerWrap", "subclassed", "platform/vllm_worker.py"),
        Internal("WorkerWrap", "used", "platform/weights.py", attributes="_model_update_group"),
        Internal("WorkerWrap.init_process_group", "imitated", "platform/vllm_worker.py",
                 "master_address, master_port, rank_offset, world_size, group_name, backend, use_ray"),
        Internal("WorkerWrap.update_weight", "imitated", "platform/vllm_worker.py",
                 "name, dtype, shape, empty_cache"),
    ),
    "openrlhf.utils": (
        Internal("get_strategy", "called", "driver/strategy.py", "args"),
        Internal("get_tokenizer", "called", "driver/preflight.py",
                 "pretrain, model, padding_side, strategy, use_fast"),
    ),
    "openrlhf.utils.agent": (
        Internal("SingleTurnAgentExecutor", "used", "actors/vllm_actor.py", attributes="reward_endpoints, reward_func"),
        Internal("SingleTurnAgentExecutor._fetch_rewards_via_func", "called", "actors/vllm_actor.py",
                 "queries_list, prompts_list, labels_list"),
        Internal("SingleTurnAgentExecutor._fetch_rewards_via_http", "called", "actors/vllm_actor.py",
                 "queries_list, prompts_list, labels_list"),
    ),
    "openrlhf.utils.config": (
        Internal("hierarchize", "called", "upstream/__init__.py", "args"),
    ),
    "openrlhf.utils.deepspeed": (
        Internal("DeepspeedStrategy", "subclassed", "platform/backend.py",
                 attributes="adam_offload, use_dynamic_batch, args, _unwrap_model"),
        Internal("DeepspeedStrategy", "subclassed", "platform/backend.py", attributes="setup_distributed"),
        Internal("DeepspeedStrategy", "used", "actors/policy_actor.py", attributes="args, ring_attn_group"),
        Internal("DeepspeedStrategy.load_ckpt", "called", "driver/strategy.py",
                 "model, load_dir, tag, load_module_strict, load_optimizer_states, load_lr_scheduler_states, "
                 "load_module_only"),
        Internal("DeepspeedStrategy.get_rank", "called", "driver/strategy.py", ""),
        Internal("DeepspeedStrategy.print", "imitated", "driver/strategy.py", "*msg"),
        Internal("DeepspeedStrategy.is_rank_0", "imitated", "driver/strategy.py", ""),
        Internal("DeepspeedStrategy.setup_dataloader", "imitated", "driver/strategy.py",
                 "replay_buffer, batch_size, pin_memory, shuffle, collate_fn, drop_last, sampler, consumed_samples, "
                 "num_workers"),
        Internal("DeepspeedStrategy.setup_distributed", "overridden", "platform/backend.py", "timeout"),
        Internal("DeepspeedStrategy.save_model", "overridden", "platform/backend.py",
                 "model, tokenizer, output_dir, **kwargs"),
        Internal("DeepspeedStrategy.get_ds_train_config", "overridden", "platform/backend.py",
                 "optim_dict, *, max_norm"),
    ),
    "openrlhf.utils.distributed_util": (
        Internal("torch_dist_barrier_and_cuda_sync", "called", "actors/policy_actor.py", ""),
    ),
    "openrlhf.utils.utils": (
        Internal("convert_to_torch_dtype", "called", "platform/backend.py", "param_dtype"),
        Internal("convert_to_torch_dtype", "replaced", "platform/backend.py", "param_dtype"),
    ),
    "openrlhf.utils.vlm_utils": (
        Internal("process_prompt_with_images", "called", "actors/vllm_actor.py", "processor, prompt, images"),
    ),
    "openrlhf.utils.logging_utils": (
        Internal("WandbLogger.log_eval", "called", "actors/trainer.py", "global_step, logs_dict"),
        Internal("WandbLogger.close", "called", "actors/trainer.py", ""),
        Internal("TensorboardLogger.log_eval", "called", "actors/trainer.py", "global_step, logs_dict"),
        Internal("TensorboardLogger.close", "called", "actors/trainer.py", ""),
    ),
}
# fmt: on
"""By module of OpenRLHF; names that it re-exports are listed where we import them from. Flags are not listed."""


def problems(package: Package | None = None) -> list[str]:
    """What of :data:`INTERNALS` is not as in the checked version, a line each; OpenRLHF is read, not imported.

    Args:
        package: OpenRLHF's source; the installed one if not given.
    """
    package = package or Package(installed_folder())
    lines = [line for module in INTERNALS for each in INTERNALS[module] for line in _differs(package, module, each)]
    if main_block(package.tree(COMMAND)) is None:
        lines.append(f"{COMMAND} no longer builds its parser under __main__ (called in upstream/__init__.py)")
    return lines


def _differs(package: Package, module: str, internal: Internal) -> Iterator[str]:
    what, use = f"{module}.{internal.name}", f"({internal.use} in {internal.where})"
    found = package.find(module, internal.name)
    if found is None:
        yield f"{what} is missing {use}"
        return
    if internal.parameters is not None and parameters(found.node) != internal.parameters:
        yield f"{what} takes ({parameters(found.node)}), checked was ({internal.parameters}) {use}"
    members = package.members(found)
    for attribute in filter(None, internal.attributes.split(", ")):
        if attribute not in members:
            yield f"{what} has no attribute {attribute} {use}"


def main() -> int:
    """Print what differs, a line each; exit code 1 if anything does."""
    found = problems()
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

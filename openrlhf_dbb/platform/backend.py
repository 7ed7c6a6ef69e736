"""Extends OpenRLHF's DeepSpeed strategy. OpenRLHF sends the strategy to every model actor."""

import functools
from datetime import timedelta
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.ops.adam import fused_adam
from openrlhf.utils.deepspeed import DeepspeedStrategy
from openrlhf.utils.utils import convert_to_torch_dtype
from peft import PeftModel
from transformers import PreTrainedConfig

from openrlhf_dbb import upstream
from openrlhf_dbb.platform.weights import GlooCommunicator, merged


class MergedModel:
    """A policy with adapters, as ``save_model`` reads one without. All ranks make it; rank 0 has its weights."""

    def __init__(self, model: PeftModel, *, keep: bool) -> None:
        self._weights = {}
        for name, weight in merged(model).items():
            gathered = weight.data  # by ZeRO 3 on every rank
            if keep:
                self._weights[name] = gathered.cpu()
        self.base: Any = model.get_base_model()
        self.config = self.base.config
        self.dtype = self.base.dtype

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the merged weights by name; none on ranks other than 0."""
        return dict(self._weights)

    _consolidated_16bit_state_dict = state_dict  # what ``save_model`` asks instead under ZeRO 3

    def save_pretrained(self, folder: str, **options: Any) -> None:
        """Write the base model; ``save_model`` gives the merged weights among the options."""
        self.base.save_pretrained(folder, **options)


class Backend(DeepspeedStrategy):
    """OpenRLHF's strategy with torch's Adam, and with dynamic batches that train on all of their micro-batches."""

    def setup_distributed(self, *args: Any, **kwargs: Any) -> None:
        """Set up the ranks as upstream does; turn cuDNN's attention off."""
        # On Hopper torch prefers cuDNN's attention, whose gradients are NaN at some lengths (pytorch issue 196678).
        torch.backends.cuda.enable_cudnn_sdp(False)
        super().setup_distributed(*args, **kwargs)

    def prepare(self, *models: Any) -> Any:
        """Prepare models as upstream does, a reward model with the mean and deviation of its configuration."""
        for entry in models:
            _fill_mean_and_deviation(_model_of(entry))
        prepared = super().prepare(*models)
        for entry in prepared if isinstance(prepared, list) else [prepared]:
            engine = getattr(_model_of(entry), "model", None)
            is_alone = self.stage == 0 and self.world_size == 1
            if is_alone and isinstance(engine, DeepSpeedEngine):
                # It would copy all gradients, twice, and sum nothing
                engine.enable_backward_allreduce = False
                engine.clip_fp32_gradients = functools.partial(_clip, engine)
        return prepared

    def save_model(self, model: Any, tokenizer: Any, output_dir: str, **kwargs: Any) -> None:
        """Save a model in the precision that it came in, tied weights once; adapters merged, or alone if asked for."""
        policy = self._unwrap_model(model)
        if isinstance(policy, PeftModel):
            if self.args.ckpt.save_adapter:
                return super().save_model(model, tokenizer, output_dir, **kwargs)
            model = policy = MergedModel(policy, keep=self.is_rank_0())
        original, _ = PreTrainedConfig.get_config_dict(self.args.actor.model_name_or_path)
        name_of_dtype = original.get("dtype") or original.get("torch_dtype") or ""
        dtype = getattr(torch, name_of_dtype, policy.dtype)
        trained = policy.config.dtype
        save = policy.save_pretrained
        tied = getattr(policy, "all_tied_weights_keys", ())

        def save_as_it_came(
            folder: str, state_dict: dict[str, torch.Tensor], **options: Any
        ) -> None:
            # Upstream hands copies over, in which save_pretrained cannot see that two weights were one.
            saved = {}
            for name, weight in state_dict.items():
                if name not in tied:
                    saved[name] = weight.to(dtype) if weight.is_floating_point() else weight
            save(folder, state_dict=saved, **options)
            policy.config.dtype = dtype  # upstream writes the configuration once more

        policy.save_pretrained = save_as_it_came
        try:
            super().save_model(model, tokenizer, output_dir, **kwargs)
        finally:
            del policy.save_pretrained
            policy.config.dtype = trained

    def save_ckpt(self, model: Any, *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint as upstream does; beside adapters without the weights that are frozen."""
        if isinstance(model.module, PeftModel):
            save = functools.partial(type(model).save_checkpoint, model)
            model.save_checkpoint = functools.partial(save, exclude_frozen_parameters=True)
        super().save_ckpt(model, *args, **kwargs)

    def load_ckpt(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a checkpoint as upstream does. Frozen weights that are not in it stay those of the base model."""
        is_whole = not isinstance(model.module, PeftModel)
        loaded = super().load_ckpt(model, *args, **kwargs, load_module_strict=is_whole)
        for state in model.basic_optimizer.state.values():
            # Buffers of ZeRO 3's sleep, which are now on the GPU, where they are of no use.
            state.pop("exp_avg_offload_buffer", None)
            state.pop("exp_avg_sq_offload_buffer", None)
        return loaded

    def get_ds_train_config(
        self, optim_dict: dict[str, Any] | None = None, *, max_norm: float | None = None
    ) -> dict[str, Any]:
        """Return upstream's configuration with torch's Adam and whole dynamic batches."""
        config = super().get_ds_train_config(optim_dict, max_norm=max_norm)
        if optim_dict is not None and optim_dict["type"] == "AdamW" and not self.adam_offload:
            # DeepSpeed's own Adam is compiled at the start: that takes a minute or more, and nvcc.
            # Torch's fused Adam needs no memory beside its states. Torch's other Adam needs that of
            # the largest weight several times.
            config["optimizer"]["params"].update(torch_adam=True, fused=True)
            if self.stage == 3:
                # To offload its state for --ds.enable_sleep, DeepSpeed asserts this class; the state is the same.
                upstream.replace(fused_adam, "FusedAdam", torch.optim.AdamW)
        if self.use_dynamic_batch:
            # OpenRLHF tells DeepSpeed that each micro-batch is a step. With ZeRO 1 and 2 DeepSpeed then keeps only the
            # gradients of the last micro-batch. With this setting the call of step() ends a step.
            config["managed_gradient_accumulation"] = False
        return config


def _model_of(entry: Any) -> Any:
    """Return the model of what ``prepare`` takes and returns: a model, alone or with its optimizer."""
    return entry[0] if isinstance(entry, tuple) else entry


def _fill_mean_and_deviation(model: Any) -> None:
    # transformers 5 makes a model without memory, then fills in the file's weights. These are in no file.
    for name, default in (("mean", 0.0), ("std", 1.0)):
        buffer = getattr(model, name, None)
        if isinstance(buffer, torch.Tensor):
            buffer.fill_(getattr(model.config, name, default))


def _clip(engine: DeepSpeedEngine) -> None:
    """Clip gradients in float32 without ZeRO; DeepSpeed would forget their norm, which is logged."""
    engine._global_grad_norm = torch.nn.utils.clip_grad_norm_(
        engine.module.parameters(), engine.gradient_clipping()
    )


class _CpuDevice(str):
    """A device name for OpenRLHF's ``tensor.to()``, which formats as an index in its ``f"cuda:{...}"``."""

    def __format__(self, spec: str) -> str:
        return "0"


def torch_dtype(param_dtype: str) -> torch.dtype:
    """Return the dtype of ``--ds.param_dtype``; OpenRLHF's function does not know fp32."""
    return torch.float32 if param_dtype == "fp32" else convert_to_torch_dtype(param_dtype)


class CpuBackend(Backend):
    """The backend without CUDA: over gloo, in float32, without extensions that are compiled at the start."""

    def setup_distributed(self, timeout: timedelta = timedelta(minutes=60)) -> None:
        """Set up the ranks without CUDA: Gloo stands in for NCCL."""
        import deepspeed
        from openrlhf.trainer.ray import ppo_actor
        from openrlhf.utils import utils

        # OpenRLHF calls these four on every machine.
        torch.cuda.current_device = lambda: _CpuDevice("cpu")
        torch.cuda.set_device = lambda *_: None
        torch.cuda.synchronize = lambda *_: None
        torch.cuda.current_stream = lambda: None
        # NCCL's communicator disables itself without a GPU, and every weight broadcast would do nothing in silence.
        upstream.replace(ppo_actor, "stateless_init_process_group", GlooCommunicator)
        # Looked up when a model is loaded
        upstream.replace(utils, "convert_to_torch_dtype", torch_dtype)
        # DeepSpeed would compile the shared-memory op now, which takes a minute and 8 GiB.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        super().setup_distributed(timeout)

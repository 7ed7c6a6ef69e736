"""The machine that a training runs on, with CUDA or without.

machine        what this host has: GPUs, driver, compiler, Ray cluster
cuda           flag values, refusals and environment with CUDA
cpu            the same without CUDA
cpu_engine     vLLM's engine in the process of its Ray actor, without CUDA
backend        OpenRLHF's DeepSpeed strategy for the policy
weights        the policy's weights, LoRA adapters merged, on their way to vLLM
vllm_worker    vLLM's worker extension, which receives these weights
vllm_requests  what an engine is asked and answers
ray_start      Ray, started on a machine that may be busy
actor_start    why an actor did not start, in one line
shims          a folder with stand-ins for compiled modules that are imported but not called
"""

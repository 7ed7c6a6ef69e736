"""The machine that a training runs on: with CUDA, without it, and what its processes need on either.

machine             what this host has for CUDA: GPUs, driver, compiler
cpu                 flag defaults, refusals and process settings without CUDA
cpu_strategy        DeepSpeed's strategy without CUDA: four torch.cuda calls, float32
cpu_engine          vLLM's engine in the process of its Ray actor, without CUDA
gloo                the process group that sends weights from DeepSpeed to vLLM without CUDA
cpu_weight_sync     its receiving end, in vLLM's workers
cuda                flag checks and process settings with CUDA
cuda_defaults       flag values that are fast with CUDA
attention           which attention implementation works on a GPU
training_strategy   DeepSpeed's strategy for the policy, with CUDA and without
weight_buckets      the policy's weights on their way to vLLM, many in one message
vllm_worker         vLLM's worker that receives these messages, with CUDA
network             the network interface that Ray chose, for every library
ray_address         the Ray cluster that a run joins
shims               stand-ins for compiled modules that are imported but not called
user_cache          the folder for what may be made again
"""

"""The process that the user starts, before and around the training.

The way of a command line, in order:

flags      the parser: OpenRLHF's flags, and ours beside them
arguments  layers of values with their origins: defaults, machine, preset, method, command line
settings   the values of all flags, frozen
checks     refuses what would train wrongly in silence, or fail after an expensive start
preflight  data, device, tokenizer and benchmarks; completes the settings
capacity   the shape of a model, and the disk space of its checkpoints
cpu_fit    threads, precision and memory without CUDA
gpu_fit    micro-batches that fit the memory of GPUs
start      the run to train: new, resumed or warm-started
cluster    Ray: start it or join it, check its hosts and GPUs, stop it
printed    the plan before the training, the summary after it
launch     runs OpenRLHF with our classes; names an actor that has died
light_backend  OpenRLHF's DeepSpeed backend as the driver needs it, without DeepSpeed
interrupt  Ctrl-C and SIGTERM at every moment
progress_line  the line on the terminal that says what the training is doing
"""

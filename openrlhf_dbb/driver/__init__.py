"""The process that the user starts, before and around the training.

The way of a command line, in order:

arguments  argv becomes frozen settings, each value with its origin
flags      OpenRLHF's parser with our flags
derived    values that follow from other flags
checks     refuses what would train wrongly in silence, or fail after an expensive start
rules/     the reasons to refuse, one function each
prepare    data, model files, reward, benchmarks; completes the settings; the run in the store
resume     the run that a training continues, and its checkpoint
printed    the plan before the training, the progress line, the summary after it
launch     starts or joins Ray, runs OpenRLHF with our classes; names an actor that has died

fit        threads, precision and micro-batches that fit the model and the machine
light_backend  OpenRLHF's DeepSpeed backend as the driver needs it, without DeepSpeed
interrupt  Ctrl-C and SIGTERM at every moment
"""

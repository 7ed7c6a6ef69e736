"""The process that the user starts, before and around the training.

The way of a command line, in order:

arguments  OpenRLHF's parser with our flags; argv becomes frozen settings, each value with its origin
checks     refuses what would train wrongly in silence, or fail after an expensive start
start      finds the run to continue; later creates the run, or resumes or warm-starts it
cluster    Ray: start it or join it, check its hosts, stop it
prepare    data, model files, reward and benchmarks; completes the settings
printed    the plan before the training, the summary after it
launch     runs OpenRLHF with our classes; names an actor that has died

capacity   the shape of a model, and the disk space of its checkpoints
fit        threads, precision and micro-batches that fit the model and the machine
light_backend  OpenRLHF's DeepSpeed backend as the driver needs it, without DeepSpeed
interrupt  Ctrl-C and SIGTERM at every moment
progress_line  the line on the terminal that says what the training is doing
"""

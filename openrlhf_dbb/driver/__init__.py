"""The process that the user starts, before and around the training.

The way of a command line, in order:

arguments      argv becomes frozen settings, each value with its origin
flags          OpenRLHF's parser with our flags
derived        values that follow from other flags, those of other owners among them
checks         refuses what would train wrongly in silence, or fail after an expensive start
rules/         the reasons to refuse that only the command knows, one function each
ray_session    starts Ray or joins a cluster, while the checks go on
resume         the run that a training continues, and its checkpoint
prepare        data, model files, reward, benchmarks; completes the settings; the run in the store
hub            fetches the models before the processes of the run start
printed        the plan before the training
launch         runs OpenRLHF with our classes
watching       shows the progress; names an actor that has died
summary        what is printed after the training

progress_line  the line that is shown while something goes on
fit            threads, precision and micro-batches that fit the model and the machine
light_backend  OpenRLHF's DeepSpeed backend as the driver needs it, without DeepSpeed
interrupt      Ctrl-C and SIGTERM at every moment
"""

"""What runs in the process the user starts, before and around the training.

arguments  command line over preset over defaults -> Settings
flags      the parser: OpenRLHF's flags, and ours beside them
settings   Settings: the values of all flags, frozen
checks     values and combinations of arguments that cannot work
capacity   does the training fit: GPU memory, main memory, disk
validation  the benchmarks of --eval.benchmarks, prepared as the command evaluate does
preflight  everything that can be refused before an engine starts; completes the settings
start      the run to train: new, resumed or warm-started
printed    the configuration before, the summary after
cluster    Ray: start it or join it, wait for its GPUs, stop it
nodes      what each node of a cluster has to have
launch     the actors, and what the training shows
progress_line  the line on the terminal that says what the training is doing
deaths     which part of a run has died
strategy   OpenRLHF's strategy object, without DeepSpeed
"""

"""The commands.

main        openrlhf-dbb: which commands there are, and how they end
parser      their parser: one-line errors, did you mean
train_grpo  train: arguments -> checks -> a run -> Ray's actors -> summary
evaluate    models on benchmarks; its compare needs no torch
stack       whether the training stack is installed

The commands that read a store are in openrlhf_dbb/inspect, lab and watch.
"""

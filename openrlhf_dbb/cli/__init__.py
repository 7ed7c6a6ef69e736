"""The commands.

main        openrlhf-dbb: which commands there are, and how they end
train_grpo  train: arguments -> checks -> a run -> Ray's actors -> summary
evaluate    models on benchmarks; its compare needs no torch
tasks       lists problems that a program makes, or tries a model on them

The commands that read a store are in openrlhf_dbb/inspect, lab and watch.
"""

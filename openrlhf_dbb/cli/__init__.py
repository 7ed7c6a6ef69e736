"""The commands.

main        openrlhf-dbb: which commands there are, and how they end
train_grpo  train: arguments -> checks -> a run -> Ray's actors -> summary
tasks       lists problems that a program makes, or tries a model on them

The other commands are in openrlhf_dbb/evaluation, inspect, lab and watch.
"""

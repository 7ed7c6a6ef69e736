"""The commands.

train_grpo  train: arguments -> checks -> a run -> Ray's actors -> summary
posteriors  openrlhf-dbb: look into a posterior store and keep it in order; needs no torch
evaluate    models on benchmarks; its compare and plot need no torch
lab         estimators measured without training; needs no torch
"""

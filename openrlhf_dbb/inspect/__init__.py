"""What the ``openrlhf-dbb`` command does, one module per kind of command; no torch.

runs            runs: all runs, newest first
show            show: one run on one screen
history         history: one prompt, visit by visit
compare_runs    compare: two runs
  held_out        held-out accuracy: their paired difference
  shared_training  training prompts of both: posterior means, learning curves
overview        a run in numbers, as these commands print it; whether it still runs
costs           costs: where the rollouts of runs went, and what an mixed group cost
"""

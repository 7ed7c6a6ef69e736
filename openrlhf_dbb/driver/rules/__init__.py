"""Why a command line is refused, one function for each reason. A breakpoint in it shows why it refuses.

run         of every training: names, folders, checkpoints, data
places      of every training: GPUs and adapters
replay      of every training: --replay.samples
recorded    of every training: --rollouts.record and --rollouts.of_run
alone       OpenRLHF alone, --estimator none
posteriors  with an estimator; among them those of the training's parts, ``core/rules.py``, and of evaluations
"""

"""One training step without torch, Ray and OpenRLHF.

posteriors   rewards of a step go in, advantages come out, everything is stored; what a run begins with
memory       the refusal of scores that a run's memory does not take
step         the rollouts of a step: columns, groups, advantages; whose texts are stored, which prompts are probed
strategies/  which prompts are generated for, and which groups are trained on
checkpoints  which model checkpoints are complete, and the newest one to resume from
best_model   the best model by evaluation
"""

KEEP = 64  # default number of rollouts of a step that are stored with their texts
NO_ANSWER = "no answer"  # how the text begins that a verifier gives where it could read none
IMPORTED = "import"  # method of a run that was read from a log: its estimator made no advantage, it only remembers
ALL = "all"  # the value that users give to store all

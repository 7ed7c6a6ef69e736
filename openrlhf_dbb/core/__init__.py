"""What a run computes and keeps, without torch, Ray and OpenRLHF.

posteriors   rewards of a step -> posteriors, stored -> advantages; what any trainer uses
ahead        batches made ahead of the training, in a thread
scored       what a step's rollouts were scored with, and what is logged of it
rollouts     the rollouts of a step as arrays, and the groups they form
usage        what became of every rollout of a step
kept         which of a step's rollouts are stored with their texts
probes       extra rollouts of some prompts that measure the estimates
strategies/  which prompts are generated for, and which groups are trained on
checkpoints  which model checkpoints are whole: manifests, the newest one to resume from
best_model   the best model by evaluation, kept through kills and resumes
replay/      RePO's cache of old rollouts: what is kept, chosen, and how it is weighted
"""

KEEP = 64
"""Rollouts of a step that are stored with their texts unless another number is given."""

ALL = "all"
"""What users write for all of them."""

"""What a run computes and keeps, without torch, Ray and OpenRLHF.

posteriors   rewards of a step -> posteriors, stored -> advantages; what any trainer uses
scored       what a step's rollouts were scored with, and what is logged of it
rollouts     the rollouts of a step as arrays, and the groups they form
usage        what became of every rollout of a step
probes       extra rollouts of some prompts that measure the estimates
strategies/  which prompts are generated for, and which groups are trained on
checkpoints  which model checkpoints are whole: manifests, the newest one to resume from
replay/      RePO's cache of old rollouts: what is kept, chosen, and how it is weighted
"""

"""OpenRLHF's trainer and actors, extended: knows torch, Ray and OpenRLHF.

In the process that the user starts:

trainer           OpenRLHF's trainer with a store: resume, step, checkpoint, evaluation
generation        rollout batches: prompts drawn, groups generated and judged
generation_ahead  makes them ahead of the training
experience_maker  the hook: advantages from the posteriors
evaluation        measures of an evaluation during training
model_card        the README.md of a saved model
progress          how far the training is, and warnings about it

In Ray's actors:

vllm_actor        OpenRLHF's vLLM actor: whole groups, checked rewards
policy_actor      OpenRLHF's policy actor: the sending end of the weight sync
training_pass     forward and backward passes without unused positions; Dr.GRPO's loss
micro_batches     which rows are computed together; a shared prompt is computed once
"""

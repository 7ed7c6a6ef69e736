"""OpenRLHF's trainer and actors, extended: knows torch, Ray and OpenRLHF.

In the process that the user starts:

trainer           OpenRLHF's trainer with a store: resume, step, checkpoint, evaluation
generation        rollout batches: prompts drawn, groups generated and judged
drawn_prompts     prompts in the order of a strategy that chooses them
responses         what the engines answer, as OpenRLHF's experiences
ahead             generation ahead of the training, in a thread
experience_maker  the hook: advantages from the posteriors
agreement         whether vLLM and the policy hold the same model, after a start
replay            RePO's replay beside a training step
replay_rows       between OpenRLHF's experiences and the replay cache
evaluation        evaluations during training
progress          the phase of the training, and how much of it is done
health            warnings about a run that learns nothing or gets worse
rewards           the error of a verification, and the shapes in which a reward comes

In Ray's actors:

vllm_actor        OpenRLHF's vLLM actor, strict about rewards
policy_updates    which policy an engine's response was written by
hidden_features   the policy's hidden states at the prompts, as features for estimators
policy_actor      OpenRLHF's policy actor: Dr.GRPO's loss, replayed rows, the sending end of the weight sync
tokenizers        a tokenizer that other processes load by its name
"""

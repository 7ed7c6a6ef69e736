"""What runs in Ray's actors: knows torch and OpenRLHF.

trainer           OpenRLHF's trainer with a store: resume, step, checkpoint, evaluation
generation        rollout batches: prompts drawn, groups generated and judged
rewards           what generation and vllm_actor share of rewards
vllm_actor        OpenRLHF's vLLM actor, strict about rewards
experience_maker  the hook: advantages from the posteriors
policy_actor      OpenRLHF's policy actor: Dr.GRPO's loss, replayed rows
replay            RePO's replay beside a training step
replay_rows       between OpenRLHF's experiences and the replay cache
evaluation        evaluations during training
tokenizers        a tokenizer that other processes load by its name
"""

"""Posteriors in other trainers, by these trainers' own means; each needs that trainer and the light install alone.

versions         which releases of a trainer an integration is written for
prompts          which prompt a row is about
runs             a run in the store, begun or continued by another trainer
trl              TRL's GRPOTrainer with advantages from the posteriors
trl_checkpoints  which step of which run a checkpoint of TRL belongs to
verl             verl's trainers with advantages from the posteriors
held_out         what a trainer's evaluation found, prompt by prompt, into the store
"""

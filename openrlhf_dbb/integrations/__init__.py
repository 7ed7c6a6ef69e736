"""Posteriors in other trainers. Each integration needs its trainer and the light install alone.

shared  what the integrations have in common: prompts as text, runs, allowed releases
trl     TRL's GRPOTrainer with advantages from the posteriors
verl    verl's trainers with advantages from the posteriors
"""

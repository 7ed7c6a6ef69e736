"""Posteriors in other trainers. Each integration needs its trainer and the light install alone.

shared      what the integrations have in common: settings, the steps of a run, prompts as text, allowed releases
hosts       what each trainer cannot do, and how its user writes a setting
trl         TRL's GRPOTrainer with advantages and draws from the posteriors, or remembering alone
verl        verl's trainers with advantages and draws from the posteriors
"""

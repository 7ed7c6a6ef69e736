"""Posteriors in other trainers. Each integration needs its trainer and the light install alone.

shared      what the integrations have in common: settings, the steps of a run, allowed releases
hosts       what each trainer cannot do, and how its user writes a setting
trl         TRL's GRPOTrainer with advantages and draws from the posteriors, or remembering alone
trl_*       the parts of that: settings; the memory beside a training, and the passive one; filling;
            replay; probes; rows of TRL's batches; what its processes do together
verl        verl's trainers with advantages and draws from the posteriors
"""

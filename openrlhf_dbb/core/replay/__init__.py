"""RePO's replay of old rollouts: what needs neither torch nor OpenRLHF.

    cache          the newest rollouts of every prompt, in memory and in a file
    selection      which of them are replayed
    normalization  their advantages, and their weight in the loss

``openrlhf_dbb/actors/replay.py`` puts it beside a training step.
"""

"""What a training of OpenRLHF leaves in its folders.

checkpoints  which model checkpoints are complete, and the newest one to resume from
generation   the state of the generation in a checkpoint
best_model   the best model by evaluation
"""

"""What a training of OpenRLHF leaves in its folders.

checkpoints  which model checkpoints are complete, and the newest one to resume from
best_model   the best model by evaluation
"""

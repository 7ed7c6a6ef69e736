"""Commands that read a store and print text or JSON; they need no torch.

show          runs, show, history, explain: all runs, one run, one prompt, one group; a run in numbers
compare_runs  compare: two runs, by held-out accuracy and cost
prompts       prompts: which rows of the data look wrong, or teach nothing
"""

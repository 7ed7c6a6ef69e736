"""Commands that read a store and print text or JSON; they need no torch.

show          runs: a table of all runs; show: one run on one screen; history: one prompt, visit by visit
compare_runs  compare: two runs, by held-out accuracy and cost
explain       explain: the arithmetic of a group's advantages
prompts       prompts: which rows of the data look wrong, or teach nothing
overview      a run in numbers, as these commands print it; whether the run still runs
"""

"""Commands that read a store and print text or JSON; they need no torch.

show          runs, show, history, explain: all runs, one run, one prompt, the advantages of one group
compare_runs  compare: two runs, by held-out accuracy and cost
prompts       prompts: which rows of the data look wrong, or teach nothing
overview      a run in numbers, as these commands print it; whether the run still runs
"""

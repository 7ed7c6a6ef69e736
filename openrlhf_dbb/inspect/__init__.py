"""Commands that read a store and print text or JSON; they need no torch.

show          runs: a table of all runs; show: one run on one screen; history: one prompt, visit by visit
compare_runs  compare: two runs, by held-out accuracy and cost
overview      a run in numbers, as these commands print it; whether the run still runs
"""

"""Commands that read a store and print text or JSON, and one that makes a run; none needs torch.

show          runs, show: all runs, one run
explain       history, explain: the visits of one prompt, the advantages of one group
compare_runs  compare: two runs, by held-out accuracy and cost
prompts       prompts: which rows of the data look wrong, or teach nothing
  facts         one run in words
  numbers       a run in numbers
  status        whether a run goes on, its age, its method

log_files, log_rollouts, log_run  import: makes a run of another trainer's log
"""

"""What the ``openrlhf-dbb`` command does, one module per kind of command; no torch.

show            runs, show, history: one run or one prompt as text
compare_runs    compare: two runs on the prompts they share
costs           costs: where the rollouts of runs went, and what an informative group cost
export          export: a run's history or rollout usage as CSV, JSON lines or Parquet
maintenance     prune, migrate, check
report          report: gathers what the page shows, and writes it
  trajectories    prompts by visit and by state: what was mastered, what was forgotten
  rollout_usage   where the rollouts went, by step and by prompt
  prompt_table    the table of prompts, with the history of each
  page            one self-contained HTML file made of page.html, page.css and page.*.js
"""

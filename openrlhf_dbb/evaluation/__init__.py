"""Evaluation: models on benchmarks, measured and compared; comparing needs no torch.

pipeline     the command evaluate: from its arguments to files on disk; repeated, it continues where it stopped
  benchmarks/       what can be evaluated, one TOML file each
  loading           the questions of a benchmark, from the hub or a file
  evaluated_model   the model, located and checked
  prompting         prompts as the model sees them
  plan              what an evaluation consists of, and whether it is the one on disk
  engines           vLLM in Ray actors
  answering         prompts answered by engines, and verified
  verifiers/        scores and answers of responses
  journal           finished rows of an unfinished evaluation
  writing           the journal into Parquet files
  summary           progress bar and final table
  record            results into the posterior store
results      evaluations on disk, and how they are read
metrics      Acc@N, Best@N, pass@k, majority@N, length, share truncated, share missing
statistics   paired tests, intervals, Holm's correction, detectable differences
formats      how tables write numbers
compare      the command compare
  alignment           what evaluations share: the same benchmarks, prompt by prompt
  differences         models against each other on these
  comparison_tables   as text and JSON
event_files  scalars that a training logged

Evaluations during training are in ``openrlhf_dbb.actors.evaluation``.
"""

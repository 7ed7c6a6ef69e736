"""Evaluation: models on benchmarks, measured and compared; comparing needs no torch.

command      the command evaluate
flags        its flags, the settings of an evaluation
pipeline     from these to files on disk; repeated, it continues where it stopped
  benchmarks/       the benchmarks, one TOML file each
  loading           the questions of a benchmark, from the hub or a file, and as the model sees them
  evaluated_model   the model, located and checked
  engines           vLLM in Ray actors
  answering         engines answer prompts, verifiers judge the responses
  verifiers         scores and answers of responses
results      evaluations on disk
metrics      Acc@N, Best@N, pass@k, majority@N, length, share truncated, share missing
compare      the command compare: models against each other on the benchmarks they share
paired_tests  paired t-tests, intervals, Holm's correction
"""

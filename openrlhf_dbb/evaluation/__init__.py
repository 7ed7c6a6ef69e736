"""Evaluation: models on benchmarks, measured and compared; comparing needs no torch.

command      the command evaluate and its flags
  benchmarks/  the benchmarks, one TOML file each
  model        the model, located and checked
  loading      the questions of a benchmark, as the model sees them
  engines      vLLM in Ray actors
  answering    the engines' answers to prompts, verified
  verifiers    scores and answers of responses
  summary      the table of an evaluation
results      evaluations on disk
metrics      Acc@N, Best@N, pass@k, majority@N, length, share truncated, share missing; paired tests
training     flags, derived values and rules of the evaluations during a training
held_out     samples of a training in another trainer than OpenRLHF, stored with its run
compare      the command compare: models against each other on the benchmarks they share
"""

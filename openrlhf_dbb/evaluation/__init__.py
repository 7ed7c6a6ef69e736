"""Evaluation: models on benchmarks, measured and compared; comparing needs no torch.

command      the command evaluate and its flags
  benchmarks/  the benchmarks, one TOML file each
  loading      the questions of a benchmark, as the model sees them; the model, located and checked
  engines      vLLM in Ray actors, and its verified answers to prompts
  verifiers    scores and answers of responses
results      evaluations on disk
metrics      Acc@N, Best@N, pass@k, majority@N, length, share truncated, share missing; paired tests
compare      the command compare: models against each other on the benchmarks they share
"""

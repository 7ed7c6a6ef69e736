"""The laboratory chooses an estimator and a discount from a run's record, without torch.

replay  lab replay: how other estimators would have done on a run's recorded successes, and their ranking
specs   estimators as text
"""

"""The laboratory chooses an estimator and a discount from a run's record, without torch.

replay    lab replay: how other estimators would have done on a run's recorded successes, and their ranking
recorded  a stored run's visits and probes; an estimator's output at each visit
specs     estimators as text
"""

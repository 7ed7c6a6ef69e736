"""The laboratory: choose an estimator and a discount before spending GPU hours; needs no torch.

simulate     any estimator where the truth is known
  regimes      how success probabilities may move during training
  play         simulated training, every estimator on the same draws
  experiment   estimators and discounts measured over seeds
mse          closed forms for given success probabilities, or for those a run has probed
  known        errors in closed form, and the noise of probes taken out of them
  probed       the probes of a stored run
  paper        the paper's numbers and a run's own
replay       what another estimator would have given on the recorded successes of a run
  recorded     the run, and the estimators to try on it
  visits       its visits, and what an estimator says at each
  criteria     how good that was
  outcomes     what all candidates came to, ranked
  recommend    which is best, and how sure that is
  replay_figures
calibration  were the forecasts of a run's next visits right
  forecast     PIT, coverage, reliability
specs        estimators as written on the command line
curves       figures of the error over discount, rollouts and prior
panels       small multiples
output       figures and CSV in the house style
"""

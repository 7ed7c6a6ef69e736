"""The laboratory: choose an estimator and a discount before spending GPU hours; needs no torch.

mse_command            lab mse: closed forms for given success probabilities, or for those a run has probed
  probabilities        errors in closed form, with the noise of probes removed
  probed               the probes of a stored run
  paper                the paper's numbers beside a run's own
replay_command         lab replay: what another estimator would have given on a run's recorded successes
  criteria             how good an estimator was at the recorded visits
  outcomes             all candidates by all criteria, ranked
  bootstrap            how sure a ranking is
  replay_figures       its figures
calibration_command    lab calibration: were the forecasts of a run's next visits right?
  forecast             PIT, coverage, reliability

Shared:

specs                  estimators as written on the command line
recorded               a stored run, and the estimators to try on it
visits                 a run's recorded visits, and an estimator's output at each
error_curves           figures of the error over discount, rollouts and prior
"""

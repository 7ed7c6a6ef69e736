"""A training with stored posteriors, for any trainer: without torch, Ray and OpenRLHF.

posteriors   rewards of a step go in, advantages come out, everything is stored
beginnings   what the posteriors of a run begin with: another run's, or pass rates
texts        the one text of a prompt and of a label
memory       the refusal of scores that a run's memory does not take
step         the rollouts of a step, and their advantages
arrays       what comes with a step, checked
groups       all rollouts of a prompt
step_metrics what is counted and logged of a step
scale        whether a run's scores are right and wrong, or other numbers
kept         the rollouts that are stored with their texts
probing      how much is probed, and what that asks of a trainer
probes       extra rollouts that measure the estimates
strategies/  which prompts are generated for, and which groups are trained on
drawn        a prompt that a strategy has drawn
exact_json   the state of a strategy in a checkpoint, as JSON
prompt_columns  what columns of a data set tell: pass rates that were measured before, sources
plan         what is chosen for a training; the contract of the parts that ask something of a trainer
rules        why a training is refused: the rules of its parts, which the command, TRL and verl ask alike
host         the seam to a trainer: what its integration can do, as data
filling      fills a step with groups, as a strategy decides, for a host that generates more
advantages   what becomes of the advantages between the store and the trainer: thinned, whitened
replay       earlier rollouts of a prompt that are trained on again (RePO), for a host that trains on further rows
loop         one's own training loop as a host
"""

KEEP = 64  # default number of rollouts of a step that are stored with their texts
NO_ANSWER = "no answer"  # how the text begins that a verifier gives where it could read none
SET_ASIDE = 3  # visits in a row without any score, after which strategies set a prompt aside
# Method of a run that was read from a log. Its estimator made no advantage; it only remembers.
IMPORTED = "import"
ALL = "all"  # the value that users give to store all

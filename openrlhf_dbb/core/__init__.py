"""One training step without torch, Ray and OpenRLHF.

posteriors   rewards of a step go in, advantages come out, everything is stored; what a run begins with
memory       the refusal of scores that a run's memory does not take
columns      checks prompts, labels and the values of each rollout
groups       the groups of a step
step         advantages of a step's rollouts
kept         which rollouts are stored with their texts
probes       which prompts are probed, and what probes measure
step_metrics what is logged of a step
beginnings   what a run begins with: another run's posteriors, known pass rates
strategies/  which prompts are generated for, and which groups are trained on
exact_json   the state of a strategy in a checkpoint, as JSON
prompt_columns  what columns of a data set tell: pass rates that were measured before, sources
rules        what does not go together, whatever the trainer; the command, TRL and verl ask them
host         the seam to a trainer: what its integration can do, as data
filling      fills a step with groups, as a strategy decides, for a host that generates more
advantages   what becomes of them between the store and the trainer: thinned, whitened
replay       earlier rollouts of a prompt that are trained on again (RePO), for a host that trains on further rows
loop         one's own training loop as a host
"""

KEEP = 64  # default number of rollouts of a step that are stored with their texts
NO_ANSWER = "no answer"  # how the text begins that a verifier gives where it could read none
SET_ASIDE = 3  # visits in a row without any score, after which strategies set a prompt aside
# Method of a run that was read from a log. Its estimator made no advantage; it only remembers.
IMPORTED = "import"
ALL = "all"  # the value that users give to store all

"""The laboratory chooses an estimator and a discount from a run's record, without torch.

replay    lab replay: how other estimators would have done on a run's recorded successes
mse       lab mse: errors in closed form, for given or probed success probabilities
scores    losses of an estimator at recorded visits, and the ranking of several estimators
recorded  a stored run's visits and probes; an estimator's output at each visit
specs     estimators as text
"""

from typing import Any


def add_commands(add: Any) -> None:
    from openrlhf_dbb.lab import mse, replay

    parser: Any = add("lab", lambda _: parser.print_help(), opens_store=False)
    commands = parser.add_subparsers(metavar="COMMAND", title="commands")
    mse.add_command(commands)
    replay.add_command(commands)

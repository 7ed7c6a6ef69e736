"""Tables that explain the results: the control in plain PyTorch, and runs whose responses may not end at once."""

from __future__ import annotations

from openrlhf_dbb.evaluation.formats import p_value
from study import analysis
from study.analysis import BASELINE
from study.cells import Table, difference, interval, percent
from study.data import ARMS, EXPERIMENTS, Study


def control(study: Study) -> Table:
    """Arms against GRPO in the control, by experiment."""
    rows = []
    for experiment, title in EXPERIMENTS.items():
        for shortest in (0, 1):
            mine = [row for row in study.control if (row.experiment, row.shortest) == (experiment, shortest)]
            found = {arm: {row.seed: row.accuracy for row in mine if row.arm == arm} for arm in ARMS}
            for arm, accuracy in found.items():
                if not accuracy:
                    continue
                ends = max(row.ends_at_once for row in mine if row.arm == arm)
                mean = percent(*analysis.mean_and_error(list(accuracy.values())))
                test = analysis.paired(accuracy, found[BASELINE])
                against = ["-"] * 3 if arm == BASELINE else [difference(test), interval(test), p_value(test.p)]
                rows.append([title, str(shortest), ARMS[arm], str(len(accuracy)), mean, *against, f"{100 * ends:.2g}"])
    header = (
        "experiment", "shortest", "arm", "n", "exact %", "vs. GRPO", "95 % interval", "p", "ends at once, most %",
    )  # fmt: skip
    note = (
        "Plain PyTorch in float32, exact held-out accuracy; differences in percentage points, paired by seed; p "
        "uncorrected. Shortest: tokens before a response may end. Ends at once: probability that the trained policy's "
        "first token is the end token, on the seed where it is largest."
    )
    return Table("The control: the same training without the pipeline", header, rows, note)


def masked(study: Study) -> Table:
    """Runs with and without ``min_new_tokens``, side by side."""
    found = {(row.arm, row.seed, row.min_new_tokens): row for row in study.masked}
    rows = []
    for arm, seed in sorted({key[:2] for key in found}, key=lambda key: (list(ARMS).index(key[0]), key[1])):
        pair = [row for least in (1, 0) if (row := found.get((arm, seed, least)))]
        if len(pair) == 2:
            cells = [(f"{100 * r.accuracy:.1f}", f"{100 * r.exact:.1f}", f"{100 * r.ends_at_once:.2g}") for r in pair]
            rows.append([ARMS[arm], str(seed), *cells[0], *cells[1]])
    header = (
        "arm", "seed", "1: Acc@8 %", "1: exact %", "1: ends at once %", "0: Acc@8 %", "0: exact %", "0: ends at once %",
    )  # fmt: skip
    note = (
        "1 and 0: --rollout.min_new_tokens. Acc@8: sampled by vLLM with this setting. Exact: of the saved policy, from "
        "its own token probabilities. Ends at once: the policy's probability of an empty response."
    )
    return Table("Responses that may not end at once, N = 2", header, rows, note)

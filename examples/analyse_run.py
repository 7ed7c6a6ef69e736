"""Analyse a run's posteriors with pandas, in cells (``# %%``) for Jupyter and editors.

    python examples/analyse_run.py        (store: $OPENRLHF_DBB_STORE_URL, else openrlhf_dbb.db here)

Needs pandas and matplotlib. Writes analyse_run.png.
"""

# %% Read the run: one row for each visit of a prompt
import pandas as pd

from openrlhf_dbb.estimators.probe_error import squared_errors
from openrlhf_dbb.storage import open_store, read_log, read_probes

RUN = None  # name, number or uuid; None: the newest run

with open_store(create=False) as store:
    run = store.find_run(RUN) if RUN else store.latest_run()
    history = pd.DataFrame(vars(read_log(store, run)))
    probes = pd.DataFrame(vars(read_probes(store, run)))
    texts = pd.read_sql(
        "SELECT prompt_id, prompt, label FROM prompts", store.database.engine, index_col="prompt_id"
    )
print(
    f"run {run.name}: {run.estimator}, {run.model}, {len(history)} visits of {history.prompt_id.nunique()} prompts"
)

# %% Average over the visits of an epoch: the k-th visits of all prompts are epoch k
history["epoch"] = history.groupby("prompt_id").cumcount() + 1
history["rate"] = history.successes / history.rollouts
history["zero_variance"] = history.rate.isin([0, 1])
by_epoch = history.groupby("epoch").agg(
    prompts=("prompt_id", "size"), success_rate=("rate", "mean"), posterior_mean=("mean", "mean"),
    zero_variance=("zero_variance", "mean"),
)  # fmt: skip
print("\nby epoch\n", by_epoch.round(3).to_string(), sep="")

# %% Show the prompts that changed most
first, last = (
    history.groupby("prompt_id")["mean"].first(),
    history.groupby("prompt_id")["mean"].last(),
)
moved = pd.DataFrame({"first": first, "last": last, "change": last - first}).sort_values("change")
moved = moved.join(texts.prompt.str.replace(r"\s+", " ", regex=True).str.slice(0, 60))
print("\nmost regressed\n", moved.head(5).round(3).to_string(), sep="")
print("\nmost improved\n", moved.tail(5).iloc[::-1].round(3).to_string(), sep="")

# %% Compare the posterior mean with the success rate of the prompt's next visit, binned by the mean
history["forecast"] = history.groupby("prompt_id")["mean"].shift()
revisits = history.dropna(subset="forecast")
bins = pd.cut(revisits.forecast, [0, 0.1, 0.3, 0.5, 0.7, 0.9, 1], include_lowest=True)
forecasts = revisits.groupby(bins, observed=True).agg(
    groups=("rate", "size"), forecast=("forecast", "mean"), actual=("rate", "mean")
)
print("\nforecast of the next visit\n", forecasts.round(3).to_string(), sep="")

# %% Measure the error against the probes, if there are any, without the noise of the probes
if len(probes):
    squared_error = squared_errors(probes["mean"], probes.samples, probes.successes, probes.squares)
    error = pd.Series(squared_error).groupby(probes.step).mean()
    print(f"\nmean squared error against {len(probes)} probes: {error.mean():.4f}")

# %% Draw the learning curve
columns = ["success_rate", "posterior_mean", "zero_variance"]
axes = by_epoch[columns].plot(marker="o", xlabel="epoch", ylim=(0, 1), title=run.name)
axes.figure.savefig("analyse_run.png", dpi=150)

"""Collecting the study: CSV files from stores with known numbers."""

import csv
import dataclasses

import numpy as np
import pytest

from openrlhf_dbb.evaluation import results
from openrlhf_dbb.storage import ProbeRows
from study import collect

# Successes of two prompts with 2 rollouts each, in each of 8 steps; 0 or 2 is a zero-variance group.
SUCCESSES = ((0, 1), (1, 1), (2, 1), (2, 2), (0, 0), (1, 0), (2, 1), (1, 1))
# Right ones of the 4 responses to each of two held-out prompts, after these steps.
RIGHT = {0: (0, 1), 2: (1, 1), 4: (2, 1), 6: (2, 2), 8: (4, 1)}


def logged(step):
    """What the trainer logs of a step, as far as the study reads it."""
    return {
        "estimator/abs_advantage": step / 8, "ppo_clip_ratio": step / 100, "actor_grad_norm": float(step),
        "entropy_loss": 1 / 3, "policy_loss": -step / 10,
    }  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "study"


@pytest.fixture
def trained(open_new, fill):
    """Function that makes a run of the study. It finishes with ``unused`` rollouts left over, or not at all: None."""
    store = open_new("sqlite")
    ids = fill.prompts(store, 4)

    def usage(successes, strategy):
        counts = fill.usage(ids[:2], successes, 2)
        if strategy == "plain":
            return counts
        kept = counts.trained - counts.zero_variance
        return dataclasses.replace(counts, trained=kept, informative=kept, rescued=0)

    def make(
        name,
        successes=SUCCESSES,
        right=RIGHT,
        probes=None,
        metrics=logged,
        alone=False,
        unused=0,
        **more,
    ):
        config = {
            "rollout.n_samples_per_prompt": 2, "rollout.strategy": "plain", "actor.adam.lr": 2e-4,
            "actor.model_name_or_path": f"model of seed {name.rpartition('-s')[2]}", "eval.dataset": "first",
            "data.max_samples": 256, "train.num_episodes": 4, "probe.fraction": 0.0 if probes is None else 0.1,
        } | more  # fmt: skip
        run = fill.run(store, name, config=config)
        for step in range(len(successes) + 1):
            if step:
                probed = {} if probes is None else {"probes": probes[step - 1]}
                counts = usage(successes[step - 1], config["rollout.strategy"])
                fill.step(run, step, ids[:2], successes[step - 1], 2, usage=counts, **probed)
                run.record_metrics(step, metrics(step))
            if step in right:
                rows = [fill.evaluation(ids[:2], right[step], "default" if alone else "heldout")]
                if not alone:
                    rows.append(fill.evaluation(ids[2:], (0, step / 2), "ood"))
                run.record_evaluation(step, "training", rows, model="tiny", config={})
        if unused is None:
            run.release()
        else:
            run.finish(unused)

    make.store = store
    return make


@pytest.fixture
def probes(trained, fill):
    """The first prompt has p~ = 1/4 in one step and 3/4 in the next. Each has the noise 1/4 * 3/4 / 15 = 0.0125."""
    ids = fill.prompts(trained.store, 1)
    return [ProbeRows(ids, np.array([16]), *np.full((2, 1), float(right))) for right in (4, 12)]


def collected(trained, folder):
    """Lines of each file."""
    collect.collect(trained.store.url, folder)
    return {path.stem: path.read_text().splitlines() for path in sorted(folder.glob("*.csv"))}


def column(lines, name):
    return [row[name] for row in csv.DictReader(lines)]


def test_every_number_of_a_run(trained, folder):
    trained("n2-dbb-s3")
    folder.mkdir()
    (folder / "times.jsonl").write_text(
        '{"run": "n2-dbb-s3", "seconds": 99}\n{"run": "other", "seconds": 1}\n'
        '{"run": "n2-dbb-s3", "seconds": 12.5, "commit": "0123abcd"}\n'
    )
    (folder / "exact.jsonl").write_text(
        '{"run": "n2-dbb-s3", "exact": 0.61, "ends_at_once": 0.001}\n'
    )
    # At the end 5 of the 8 held-out responses are right, of each prompt at least one.
    assert collected(trained, folder) == {
        "epochs": [
            "run,experiment,arm,n,seed,epoch,steps,rollouts,accuracy,ood,reward,zero_variance,rescued,abs_advantage,"
            "clip_fraction,grad_norm,entropy,length,best,loss",
            # of two prompts, the share with a right response among four
            "n2-dbb-s3,n2,dbb,2,3,0,,0,0.125,0,,,,,,,,,0.5,",
            "n2-dbb-s3,n2,dbb,2,3,1,2,8,0.25,0.125,0.375,0.25,0.25,0.1875,0.015,1.5,0.333333,10,1,-0.15",
            "n2-dbb-s3,n2,dbb,2,3,2,2,16,0.375,0.25,0.875,0.75,0.75,0.4375,0.035,3.5,0.333333,10,1,-0.35",
            "n2-dbb-s3,n2,dbb,2,3,3,2,24,0.5,0.375,0.125,0.75,0.75,0.6875,0.055,5.5,0.333333,10,1,-0.55",
            "n2-dbb-s3,n2,dbb,2,3,4,2,32,0.625,0.5,0.625,0.25,0.25,0.9375,0.075,7.5,0.333333,10,1,-0.75",
        ],
        "mse": ["run,n,seed,estimator,discount,mse,mse_point"],
        "priors": ["run,n,seed,prior_alpha,prior_beta,discount,mse"],
        "runs": [
            "run,experiment,arm,n,seed,learning_rate,start_accuracy,accuracy,best,start_ood,ood,reward_last,exact,"
            "ends_at_once,rollouts,trained,steps,seconds,commit",
            "n2-dbb-s3,n2,dbb,2,3,0.0002,0.125,0.625,1,0,0.5,0.625,0.61,0.001,32,32,8,12.5,0123abcd",
        ],
    }


def test_unknown_values_are_left_empty_and_reported(trained, folder, capsys):
    trained("n2-grpo-s1", right={4: (2, 1), 8: (4, 1)}, alone=True, metrics=lambda step: {})
    collected_files = collected(trained, folder)
    # A single data source is the held-out one; no seconds, and no evaluation before training or after every epoch.
    assert (
        collected_files["runs"][1] == "n2-grpo-s1,n2,grpo,2,1,0.0002,,0.625,1,,,0.625,,,32,32,8,,"
    )
    assert column(collected_files["epochs"], "accuracy") == ["", "", "0.375", "", "0.625"]
    assert column(collected_files["epochs"], "grad_norm") == [""] * 5
    assert "actor_grad_norm" in capsys.readouterr().out.splitlines()[0]


def test_a_method_that_discards_rollouts(trained, folder):
    # 6 steps: epochs end at 1.5, 3, 4.5 and 6, rounded to even steps.
    right = {0: (0, 0), 4: (2, 2), 6: (4, 2)}
    trained("n8-dapo-s1", SUCCESSES[:6], right, unused=6, **{"rollout.strategy": "dynamic"})
    found = collected(trained, folder)
    assert column(found["epochs"], "steps") == ["", "2", "1", "1", "2"]
    assert column(found["epochs"], "rollouts") == ["0", "8", "12", "16", "24"]
    # 0 at step 0, 0.5 at 4, 0.75 at 6, and on the lines between.
    assert column(found["epochs"], "accuracy") == ["0", "0.25", "0.375", "0.5", "0.75"]
    # Over all generated rollouts: zero-variance groups were not trained on.
    assert column(found["epochs"], "zero_variance") == ["", "0.25", "0.5", "1", "0.75"]
    assert column(found["epochs"], "rescued") == ["", "0", "0", "0", "0"]
    assert column(found["epochs"], "reward") == ["", "0.375", "0.75", "1", "0.125"]
    # 24 in steps and 6 left over; 1 + 2 + 1 + 0 + 0 + 1 groups of 2 differ.
    assert (column(found["runs"], "rollouts"), column(found["runs"], "trained")) == (["30"], ["10"])


def test_errors_against_probes_and_those_of_priors_at_their_best_discount(trained, folder, probes):
    for name in ("probe-n2-grpo-s1", "probe-n2-dbb-s1"):
        trained(name, ((1, 1), (2, 1)), {2: (4, 1)}, probes=probes)
    trained("n2-grpo-s1")
    files = collected(trained, folder)
    rows = list(csv.DictReader(files["mse"]))
    assert {row["run"] for row in rows} == {"probe-n2-grpo-s1"}
    found = {(row["estimator"], row["discount"]): row["mse"] for row in rows}
    # point: 0.5, then 1, each 1/4 off; 0.0625 - 0.0125. ema without a past is the same.
    assert found["point", ""] == found["ema", "0"] == "0.05"
    # dbb 0.5: Beta(1.5, 1.5), then Beta(2.75, 0.75): (0.05 + (2.75/3.5 - 0.75)^2 - 0.0125) / 2
    assert found["dbb", "0.5"] == "0.0193878"
    # laplace 0.5: 1.5/3, then 2.5/3: (0.05 + (1/12)^2 - 0.0125) / 2
    assert found["laplace", "0.5"] == "0.0222222"
    assert {row["mse_point"] for row in rows} == {"0.05"}
    every = [f"{step / 20:g}" for step in range(21)]
    keys = [("point", ""), *(("dbb", x) for x in every[1:]), *(("ema", x) for x in every[:-1])]
    keys += [*(("laplace", x) for x in every[1:]), ("empirical_bayes", ""), ("auto", "")]
    assert list(found) == keys
    rows = list(csv.DictReader(files["priors"]))
    assert {row["run"] for row in rows} == {"probe-n2-grpo-s1"}
    of = {
        (row["prior_alpha"], row["prior_beta"]): (float(row["discount"]), float(row["mse"]))
        for row in rows
    }
    assert len(of) == 36
    # Prior (1, 1) and discount 0.7: Beta(1.7, 1.7), then Beta(3.19, 1.19): (0.05 + (3.19/4.38 - 0.75)^2 - 0.0125) / 2.
    # At 0.6: Beta(2.96, 0.96), 0.755; at 0.65: Beta(3.0725, 1.0725), 0.741; the nearest to 0.75 is 0.6.
    assert of["1", "1"][0] == 0.6
    assert of["1", "1"][1] == pytest.approx(
        (0.05 + (2.96 / 3.92 - 0.75) ** 2 - 0.0125) / 2, rel=1e-5
    )


def test_runs_that_are_not_of_the_study_or_unfinished_are_reported(trained, folder, capsys):
    trained("n2-dbb-s10")
    trained("n2-auto-s1", unused=None)
    trained("mine")
    made = collected(trained, folder)
    assert column(made["runs"], "run") == ["n2-dbb-s10"]
    assert sorted(
        line for line in capsys.readouterr().out.splitlines() if line.startswith("left out")
    ) == [
        "left out: mine, not the name of a run of the study",
        "left out: n2-auto-s1, unfinished at step 8",
    ]
    assert collected(trained, folder) == made


def test_runs_start_at_the_mean_over_the_evaluations_of_their_model_on_their_data(trained, folder):
    late = {step: right for step, right in RIGHT.items() if step}
    trained("n2-grpo-s1", right={**RIGHT, 0: (1, 1)})
    trained("n2-auto-s1", right={**RIGHT, 0: (3, 1)})
    trained("n2-dbb-s1", right=late)
    trained("n2-dbb-s2", right=late)
    trained("n4-grpo-s1", right={**RIGHT, 0: (2, 0)}, **{"data.max_samples": 80})
    trained("n8-grpo-s1", right={**RIGHT, 0: (4, 4)}, **{"eval.dataset": "other"})
    found = collected(trained, folder)
    assert (
        " ".join(column(found["runs"], "run"))
        == "n2-auto-s1 n2-dbb-s1 n2-dbb-s2 n2-grpo-s1 n4-grpo-s1 n8-grpo-s1"
    )
    shared = [
        "0.375",
        "0.375",
        "",
        "0.375",
        "0.25",
        "1",
    ]  # 0.375 of (1 + 1) / 8 and (3 + 1) / 8; then their own
    assert column(found["runs"], "start_accuracy") == shared
    assert [
        row["accuracy"] for row in csv.DictReader(found["epochs"]) if row["epoch"] == "0"
    ] == shared


def test_evaluations_on_other_tasks_are_averaged_by_task(trained, folder):
    trained("n2-dbb-s1")
    shared = {"run": 0, "id": "", "prompt": "", "label": ""} | {
        "answers": [],
        "tokens": [],
        "truncated": [],
    }
    responses = results.Responses(folder / "transfer" / "n2-dbb-s1")
    for name, place, scores in (("lcm", 1, [0, 1.0]), ("sums", 0, [1, 1]), ("lcm", 0, [0, 0])):
        responses.append(
            results.Row(benchmark=name, place=place, scores=scores, responses=["", ""], **shared)
        )
    found = list(csv.DictReader(collected(trained, folder)["transfer"]))
    assert [list(row.values())[1:] for row in found] == [
        ["lcm", "2", "2", "0.25"],
        ["sums", "1", "2", "1"],
    ]

"""The figures of training dynamics: which numbers they show, from the store and from event files."""

import re
import time

import numpy as np
import pytest

from openrlhf_dbb.cli.main import main
from openrlhf_dbb.evaluation import dynamics, training_curves
from openrlhf_dbb.evaluation.training_curves import TrainingCurve


def curve(x, y):
    return TrainingCurve(np.array(x, dtype=float), np.array(y, dtype=float))


def points(curve):
    return list(zip(curve.x.tolist(), curve.y.tolist(), strict=True))


def log(folder, name, values, tag=training_curves.ENTROPY):
    """Write a TensorBoard event file as OpenRLHF does; ``values`` are (step, value)."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder / name)) as writer:
        for step, value in values:
            writer.add_scalar(tag, value, step)


@pytest.fixture
def trained(open_new, fill, tmp_path):
    """Function: a run of two steps of four prompts (4 rollouts of 10 tokens each) with three evaluations of two sets.

    ``successes``: of all prompts in each step; ``right``: of the four responses to each prompt of set "a".
    """
    store = open_new("sqlite")
    ids = fill.prompts(store, 4)

    def make(name, successes=(1, 3), right=((0, 0), (1, 1), (4, 0)), sets=("a", "b"), **usage):
        config = {"logger.tensorboard_dir": str(tmp_path / "events"), "logger.wandb.run_name": name}
        run = fill.run(store, name, config=config)
        for step in range(len(right)):
            if step:
                fill.step(run, step, ids, [successes[step - 1]] * 4, **usage)
            rows = [fill.evaluation(ids[:2], right[step], sets[0])]
            rows += [fill.evaluation(ids[2:], [4, 4], other) for other in sets[1:]]
            run.record_evaluation(step, "training", rows, model="tiny", config={})
        run.release()
        return store.find_run(name)

    make.store = store
    return make


def panels_of(trained, lines, over="steps", events=None):
    lines = {name: [run] if not isinstance(run, list) else run for name, run in lines.items()}
    first, second = dynamics.panels(trained.store, lines, over, events)
    return {panel.title: panel for panel in (*first, *second)}


def test_curves_over_steps(trained):
    found = panels_of(trained, {"run": trained("run")})
    assert list(found) == [
        "validation Acc@4, mean of 2 sets", "training reward", "response length (tokens)", "entropy (nats per token)",
        "validation Mean@4, mean of 2 sets", "validation Best@4, mean of 2 sets",
    ]  # fmt: skip
    shown = {title: [points(curve) for curve in panel.curves["run"]] for title, panel in found.items()}
    # Set a: 0, 2 of 8, 4 of 8 right, of two prompts none, both, one ever; set b: all.
    accuracy = [(0, 0.5), (1, (0.25 + 1) / 2), (2, (0.5 + 1) / 2)]
    assert shown["validation Acc@4, mean of 2 sets"] == [accuracy]
    assert shown["validation Mean@4, mean of 2 sets"] == [accuracy]
    assert shown["validation Best@4, mean of 2 sets"] == [[(0, 0.5), (1, 1.0), (2, 0.75)]]
    assert shown["training reward"] == [[(1, 0.25), (2, 0.75)]]
    assert shown["response length (tokens)"] == [[(1, 10.0), (2, 10.0)]]
    assert shown["entropy (nats per token)"] == []
    assert found["entropy (nats per token)"].notes == ["run: no event files found"]


def test_curves_over_rollouts(trained):
    found = panels_of(trained, {"run": trained("run")}, over="rollouts")
    # 16 rollouts a step; the first evaluation was before any.
    accuracy = found["validation Acc@4, mean of 2 sets"].curves["run"][0]
    assert points(accuracy) == [(0, 0.5), (16, 0.625), (32, 0.75)]
    assert points(found["training reward"].curves["run"][0]) == [(16, 0.25), (32, 0.75)]


def test_without_recorded_usage_rollouts_are_the_rewards_seen(trained):
    found = panels_of(trained, {"old": trained("old", usage=None)}, over="rollouts")
    assert points(found["training reward"].curves["old"][0]) == [(16, 0.25), (32, 0.75)]
    assert found["response length (tokens)"].curves == {"old": []}
    assert found["response length (tokens)"].notes == ["old: rollout usage not recorded"]


def test_validation_is_of_the_sets_that_all_runs_have(trained):
    lines = {"two": trained("two"), "one": trained("one", sets=("b",)), "new": trained("new", right=(), sets=("b",))}
    found = panels_of(trained, lines)
    panel = found["validation Acc@4"]
    assert points(panel.curves["two"][0]) == [(0, 1.0), (1, 1.0), (2, 1.0)]  # of set b
    assert points(panel.curves["one"][0]) == [(0, 0.0), (1, 0.25), (2, 0.5)]
    assert panel.curves["new"] == [] and panel.notes == ["new: no evaluation during training"]
    other = panels_of(trained, {"two": lines["two"], "c": trained("c", sets=("c",))})["validation Acc@4"]
    assert other.curves == {"two": [], "c": []}
    assert set(other.notes) == {f"{name}: it shares no validation set with all other runs" for name in ("two", "c")}


def test_evaluations_of_another_name_are_no_validation(trained, fill):
    run = trained("run", right=((0, 0),))
    ids = fill.prompts(trained.store, 4)
    for values in ({"run": run}, {"run": run, "step": 0}):
        rows = [fill.evaluation(ids, [4] * 4, "a")]
        trained.store.record_evaluation("by hand", rows, model="tiny", config={}, **values)
    trained.store.record_evaluation("training", rows, model="tiny", config={}, run=run)  # of no step
    assert points(training_curves.validation(trained.store, run).accuracy["a"]) == [(0, 0.0)]


def test_entropy_comes_from_the_event_files(trained, tmp_path):
    run = trained("run")
    log(tmp_path / "events", "run", [(1, 0.5), (2, 0.25), (3, 9.0)])
    # A resume repeated step 2; step 3 was rolled back.
    log(tmp_path / "events", "run", [(2, 0.75)])
    assert points(training_curves.entropy(run, None)) == [(1, 0.5), (2, 0.75)]
    (curve,) = panels_of(trained, {"run": run}, over="rollouts")["entropy (nats per token)"].curves["run"]
    assert points(curve) == [(16, 0.5), (32, 0.75)]


def test_scalars_are_read_by_tag_and_the_last_value_of_a_step_counts(tmp_path):
    log(tmp_path, "run", [(2, 0.25), (1, 0.5)], tag="a")
    log(tmp_path, "run", [(2, 0.75)], tag="a")
    log(tmp_path, "run", [(7, 8.0)], tag="b")
    found = training_curves.read_scalars(tmp_path / "run")
    assert {tag: (scalars.step.tolist(), scalars.value.tolist()) for tag, scalars in found.items()} == {
        "a": ([1, 2], [0.5, 0.75]),
        "b": ([7], [8.0]),
    }
    assert found["a"].wall_time[0] <= found["a"].wall_time[1] <= time.time()
    assert training_curves.read_scalars(tmp_path) == {}


def test_event_files_are_found_below_a_folder(trained, tmp_path):
    run = trained("run")
    log(tmp_path / "copied" / "x" / "tensorboard", "run", [(1, 0.5)])
    log(tmp_path / "copied" / "y" / "tensorboard", "other", [(1, 0.125)])
    assert points(training_curves.entropy(run, tmp_path / "copied")) == [(1, 0.5)]
    assert points(training_curves.entropy(run, tmp_path / "copied" / "x" / "tensorboard" / "run")) == [(1, 0.5)]
    assert training_curves.entropy(run, tmp_path / "copied" / "y") == "no event files found"


def test_event_files_without_entropy_say_how_to_log_it(trained, tmp_path):
    run = trained("run")
    log(tmp_path / "events", "run", [(1, 0.5)], tag="train/reward")
    assert training_curves.entropy(run, None) == "not logged; train with --actor.entropy_coef 0 to log it"


def test_a_band_is_of_the_points_that_all_runs_have():
    one, two = curve([0.0, 1, 2], [1.0, 2, 3]), curve([0.0, 1, 2], [3.0, 2, 7])
    band = training_curves.band([one, two])
    assert (band.x.tolist(), band.mean.tolist()) == ([0, 1, 2], [2, 2, 5])
    assert (band.low.tolist(), band.high.tolist()) == ([1, 2, 3], [3, 2, 7])


def test_a_band_interpolates_where_points_differ_and_does_not_go_beyond_a_run():
    one, two = curve([0.0, 10], [0.0, 1]), curve([5.0, 20], [2.0, 5])
    band = training_curves.band([one, two])
    # From 5 to 10: 0.5 and 1 of the first; 2 and 2 + 3 / 3 of the second.
    assert (band.x.tolist(), band.mean.tolist()) == ([5, 10], [1.25, 2.0])
    assert (band.low.tolist(), band.high.tolist()) == ([0.5, 1.0], [2.0, 3.0])


def test_an_average_is_of_the_points_that_all_curves_have():
    one, two = curve([0.0, 1, 2], [1.0, 2, 3]), curve([0.0, 2], [3.0, 7])
    assert points(training_curves.average([one, two])) == [(0, 2), (2, 5)]


def test_lines_are_groups_and_single_runs(trained):
    runs = {name: trained(name) for name in ("s1", "s2", "s3")}
    lines = dynamics.find_lines(trained.store, ["s3", "1"], ["seeds=s1,s2"])
    assert {name: [run.name for run in members] for name, members in lines.items()} == {
        "seeds": ["s1", "s2"], "s3": ["s3"], "s1": ["s1"],
    }  # fmt: skip
    found = panels_of(trained, {"seeds": [runs["s1"], runs["s2"]]})["training reward"]
    assert [points(curve) for curve in found.curves["seeds"]] == [[(1, 0.25), (2, 0.75)]] * 2


def command(trained, *argv):
    return main(["evaluate", "plot", "--store.url", trained.store.url, *argv])


def test_the_command_writes_both_figures_and_says_what_is_missing(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    trained("one"), trained("two", successes=(2, 2)), trained("three")
    log(tmp_path / "events", "three", [(1, 0.5), (2, 0.25)])
    assert command(trained, "three", "--group", "seeds=one,two", "--over", "rollouts") == 0
    names = [f"{name}.{kind}" for name in ("training_dynamics", "mean_and_best") for kind in ("png", "svg")]
    folder = tmp_path / "evaluations" / "plot"
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    assert (folder / "training_dynamics.png").read_bytes().startswith(b"\x89PNG")
    drawing = (folder / "training_dynamics.svg").read_text()
    shown = set(re.findall(r"<!-- (.*?) -->", drawing))
    assert {"seeds (mean and range of 2 runs)", "three", "training reward", "rollouts generated"} <= shown
    assert capsys.readouterr().out.splitlines() == [
        *(f"wrote evaluations/plot/{name}" for name in names),
        "note: entropy (nats per token): one: no event files found",
        "note: entropy (nats per token): two: no event files found",
    ]


def test_a_panel_without_any_curve_says_why(trained, tmp_path):
    trained("run", right=((0, 0),), sets=("a",))
    assert command(trained, "run", "--output", str(tmp_path / "out")) == 0
    drawing = (tmp_path / "out" / "training_dynamics.svg").read_text()
    assert "<!-- no event files found -->" in drawing and "<!-- nothing yet -->" in drawing


def test_the_same_figure_is_the_same_file(trained, tmp_path):
    trained("run")
    for folder in ("a", "b"):
        command(trained, "run", "--output", str(tmp_path / folder))
    for name in ("training_dynamics.png", "training_dynamics.svg", "mean_and_best.svg"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "no run given; name one or more, or use --group NAME=RUN,..."),
        (["nobody"], "there is no run 'nobody' in "),
        (["--group", "seeds"], "--group 'seeds' is not NAME=RUN,...; write for example --group dbb=seed-1,seed-2"),
        (["--group", "seeds="], "--group 'seeds=' is not NAME=RUN,..."),
        (["--group", "seeds=run,1"], "'seeds' has a run twice; name each once"),
        (["run", "1"], "'run' is named twice; name each once"),
        (["run", "--events", "/nowhere"], "--events /nowhere: no such folder; name one that contains event files"),
        (["run", "--output", "/dev/null/x"], "--output /dev/null/x: Not a directory; name a folder that can be"),
    ],
)
def test_what_cannot_be_drawn_is_one_clear_line(trained, capsys, argv, message):
    trained("run")
    assert command(trained, *argv) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"error: {message}") and printed.count("\n") == 1

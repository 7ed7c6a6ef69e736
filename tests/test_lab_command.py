"""The laboratory's command line: its commands, estimators as text, tables, figures without matplotlib."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from openrlhf_dbb import figures
from openrlhf_dbb.cli.main import main
from openrlhf_dbb.csv_files import write_csv
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.lab import specs
from openrlhf_dbb.lab.error_curves import ErrorCurve, merged

ROOT = Path(__file__).parents[1]


def test_help_names_the_commands():
    done = subprocess.run(
        [sys.executable, "-m", "openrlhf_dbb", "lab", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for command in ("mse", "replay", "calibration"):
        assert f"    {command} " in done.stdout or f"    {command}\n" in done.stdout


def test_files_go_to_a_folder_named_after_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["lab", "mse", "--p", "0.5", "--estimators", "point"]) == 0
    assert "lab/mse/moments.csv" in capsys.readouterr().out.splitlines()
    assert (tmp_path / "lab" / "mse" / "discounts.png").exists()


def test_folder_that_cannot_be_made(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["lab", "mse", "--p", "0.5", "-o", str(tmp_path / "file" / "out")]) == 2
    assert capsys.readouterr().err == (
        f"error: --output {tmp_path}/file/out: Not a directory; name a folder that can be written\n"
    )


def test_without_matplotlib(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["lab", "mse", "--p", "0.5", "-o", str(tmp_path)]) == 2
    assert capsys.readouterr().err == 'error: figures need matplotlib: pip install "openrlhf-dbb[lab]"\n'


@pytest.mark.parametrize(
    ("text", "label", "family"),
    [
        ("point", "point", "point"),
        ("dbb", "dbb 0.5", "dbb"),
        ("dbb:discount=0.25,prior_alpha=2", "dbb 0.25 prior_alpha=2", "dbb prior_alpha=2"),
        ("dbb:partial_credit=true", "dbb 0.5 partial_credit=True", "dbb partial_credit=True"),
        ("empirical_bayes:half_life=100", "empirical_bayes half_life=100", "empirical_bayes half_life=100"),
        ("estimators.laplace:LaplaceSmoothing:smoothing=0.3", "laplace 0.3", "laplace"),
    ],
)
def test_estimators_as_text(text, label, family):
    estimator = specs.parse(text)
    assert specs.label(estimator) == label
    assert specs.family(estimator) == family


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("magic", "estimator 'magic': unknown estimator 'magic'; known: "),
        ("dbb:decay=0.4", "estimator 'dbb:decay=0.4': estimator 'dbb' has no parameter 'decay'; it has: discount, "),
        ("dbb:discount=2", "estimator 'dbb:discount=2': dbb.discount = 2.0 is not in (0, 1]"),
        ("dbb:discount=half", "estimator 'dbb:discount=half': discount = 'half' is not of type float"),
        ("dbb:discount=0.4,", "estimator 'dbb:discount=0.4,': '' is not PARAMETER=VALUE"),
        ("dbb:partial_credit=1", "estimator 'dbb:partial_credit=1': partial_credit = '1' is neither true nor false"),
        ("no_such_module:Thing", "estimator 'no_such_module:Thing': estimator 'no_such_module:Thing' cannot be imp"),
    ],
)
def test_wrong_estimators(text, message):
    with pytest.raises(UsageError) as caught:
        specs.parse(text)
    assert str(caught.value).startswith(message)


def test_discounts_outside_the_range_are_left_out():
    assert list(specs.swept(specs.parse("ema"), (0.0, 0.5, 1.0))) == [0.0, 0.5]
    assert list(specs.swept(specs.parse("dbb"), (0.0, 0.5, 1.0))) == [0.5, 1.0]


def test_csv_keeps_numbers_in_full(tmp_path):
    path = write_csv(tmp_path / "numbers.csv", ("name", "x"), [("a", 0.1 + 0.2), ("b", None)])
    assert path.read_text() == "name,x\na,0.30000000000000004\nb,\n"


def test_curves_that_coincide_are_one():
    x = np.array([0.2, 0.4])
    curves = [ErrorCurve("dbb", "dbb", x, np.array([1.0, 2.0])), ErrorCurve("ema", "ema", x, np.array([1.0, 2.1]))]
    curves.append(ErrorCurve("gaussian", "gaussian", x, np.array([1.0, 2.0 + 1e-12])))
    assert [curve.label for curve in merged(curves)] == ["dbb, gaussian", "ema"]


def test_every_estimator_has_a_look_of_its_own():
    looks = [(look["color"], look["marker"]) for look in figures.STYLE.values()]
    assert len(set(looks)) == len(looks)
    assert figures.style("somebody_elses")["color"] not in {color for color, _ in looks}


def test_a_pipe_that_is_closed_early_ends_it_quietly(tmp_path):
    command = f"{sys.executable} -m openrlhf_dbb lab mse --p 0.2,0.4 -o {tmp_path}; echo $? >&2"
    done = subprocess.run(["bash", "-c", f"{{ {command}; }} | true"], text=True, capture_output=True)
    assert done.stderr.strip() == "0"

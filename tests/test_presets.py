"""Presets: those that come with the package, and one of the user's own."""

import pytest

from openrlhf_dbb.driver import arguments
from openrlhf_dbb.errors import UsageError

OWN_MODEL = ["--actor.model_name_or_path", "some/model", "--reward.remote_url", "math_answer"]


def parse(*argv):
    return arguments.parse(list(argv))


OWN = """
extends = "default"
[flags]
estimator = "dbb"
actor.adam.lr = 2e-6
rollout.batch_size = 32
"train.batch_size" = 256
[flags.eval]
temperature = 0.5
[estimator.dbb]
dbb.discount = 0.9
[estimator.point]
rollout.n_samples_per_prompt = 4
"""


def test_a_preset_of_ones_own_is_a_file(tmp_path):
    (tmp_path / "mine.toml").write_text(OWN)
    settings = parse("--preset", f"{tmp_path}/mine.toml", *OWN_MODEL, "--rollout.batch_size", "64")
    args = settings.args
    assert (args.actor.adam.lr, args.rollout.batch_size, args.train.batch_size) == (2e-6, 64, 256)
    assert (args.eval.temperature, settings.parameters["discount"], args.train.num_episodes) == (0.5, 0.9, 4)
    assert settings.origin["actor.adam.lr"] == f"preset {tmp_path}/mine.toml"
    assert settings.origin["train.num_episodes"] == settings.origin["actor.adam.betas"] == "preset default"
    assert settings.run_name.startswith("dbb-mine-20")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[flags]\nactor.adam.lr = ", r"cannot be read: Invalid value \(at "),
        ("[flag]\nactor.adam.lr = 1e-6", r"has 'flag'; allowed: description, extends, needs_cuda, expects, flags, "),
        ("[flags]\nactor.adm.lr = 1e-6", r"sets --actor.adm.lr to 1e-06: .*, did you mean --actor.adam.lr\?"),
        ("[flags]\nactor.optim = 'adm'", r"sets --actor.optim to 'adm': .* invalid choice: 'adm' \(choose from"),
    ],
)
def test_a_faulty_preset_file_gets_one_clear_line(tmp_path, text, line):
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(UsageError, match=line) as caught:
        parse("--preset", f"{tmp_path}/mine.toml", *OWN_MODEL)
    assert f"{tmp_path}/mine.toml" in str(caught.value) and "\n" not in str(caught.value)

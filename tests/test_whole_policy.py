"""Rollouts come from the policy that is trained: a response may end at once, unless that is asked for."""

from types import SimpleNamespace

import pytest

from openrlhf_dbb.driver import arguments, checks
from openrlhf_dbb.errors import UsageError
from openrlhf_dbb.platform import cpu

cpu.prepare_driver()

from openrlhf_dbb.actors import trainer  # noqa: E402


class Reached(Exception):
    """OpenRLHF's trainer was called."""


@pytest.mark.parametrize(("flags", "least"), [([], 0), (["--rollout.min_new_tokens", "1"], 1)])
def test_the_sampling_of_all_rollouts_has_the_flags_least_length(monkeypatch, flags, least):
    given = {}

    def upstream(self, pretrain, strategy, *groups, **generate_kwargs):
        given.update(generate_kwargs)
        raise Reached

    monkeypatch.setattr(trainer.PosteriorTrainer.__mro__[1], "__init__", upstream)
    monkeypatch.setattr(trainer.prompts, "train_on", lambda rows, args: None)
    args = arguments.parse(["--preset", "tiny", *flags]).args
    with pytest.raises(Reached):
        trainer.PosteriorTrainer("m", SimpleNamespace(args=args), plan=SimpleNamespace(rows=[]), max_new_tokens=10)
    assert given == {"max_new_tokens": 10, "min_new_tokens": least}


@pytest.mark.parametrize("least", ["-1", "11"])
def test_a_least_length_that_no_response_can_have_is_refused(least):
    settings = arguments.parse(["--preset", "tiny", "--rollout.min_new_tokens", least])
    with pytest.raises(UsageError, match=f"--rollout.min_new_tokens {least} is out of range"):
        checks.check(settings)

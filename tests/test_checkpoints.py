"""Which checkpoint a run resumes from: only a whole one, and only if every rank has loaded it."""

from types import SimpleNamespace

import pytest

from openrlhf_dbb.driver.light_backend import _load
from openrlhf_dbb.errors import RunError
from openrlhf_dbb.saved import checkpoints, generation
from openrlhf_dbb.saved.checkpoints import newest_whole

SHARDS = (
    "mp_rank_00_model_states.pt",
    "bf16_zero_pp_rank_0_optim.pt",
    "bf16_zero_pp_rank_1_optim.pt",
)


def save(folder, step, run="mine", *, finish=True):
    """A checkpoint of two ranks: each file is as long as in any other checkpoint, with another content."""
    tag = f"global_step{step}"
    checkpoints.delete(folder, tag)
    actor = folder / "_actor" / tag
    actor.mkdir(parents=True)
    for shard in SHARDS:
        (actor / shard).write_bytes(f"{tag:>24} {shard:>32} {run:>8}".encode())
    if finish:
        checkpoints.complete(folder, tag, run, [checkpoints.sizes(actor)] * 2)


FAULTS = {
    "truncated": lambda path, older: path.write_bytes(path.read_bytes()[:-1]),
    "deleted": lambda path, older: path.unlink(),
    "zeros": lambda path, older: path.write_bytes(bytes(path.stat().st_size)),
    "an older one": lambda path, older: path.write_bytes(older.read_bytes()),
    "deep": lambda path, older: path.write_bytes(b"[" * 100_000),
    "no text": lambda path, older: path.write_bytes(b"\xff"),
    "no files": lambda path, older: path.write_text('{"run": "mine", "step": 6}'),
    "no sizes": lambda path, older: path.write_text(
        '{"run": "mine", "step": 6, "files": {"a": null}}'
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", [*SHARDS, checkpoints.MANIFEST])
def test_a_checkpoint_with_any_fault_in_any_file_is_passed_over_and_the_file_named(
    tmp_path, name, fault
):
    for step in (2, 4, 6):
        save(tmp_path, step)
    assert newest_whole(tmp_path, "mine", 7) == ("global_step6", [])
    path, older = (tmp_path / f"_actor/global_step{step}/{name}" for step in (6, 4))
    FAULTS[fault](path, older)
    tag, (line,) = newest_whole(tmp_path, "mine", 7)
    why = (
        "was not finished" if (name, fault) == (checkpoints.MANIFEST, "deleted") else "is damaged: "
    )
    assert tag == "global_step4" and line.startswith(f"checkpoint global_step6 {why}")
    assert path.name in line and "\n" not in line


def test_the_checkpoint_of_another_run_or_of_later_posteriors_is_not_taken(tmp_path):
    assert newest_whole(tmp_path / "nothing", "mine", 4) == (None, [])
    save(tmp_path, 2)
    save(tmp_path, 4)
    save(tmp_path, 6, run="other")
    for folder in ("global_step9_universal", "global_step", "step9"):
        (tmp_path / "_actor" / folder).mkdir()
    tag, (foreign, newer) = newest_whole(tmp_path, "mine", 3)
    assert tag == "global_step2"
    assert (
        "global_step6 belongs to another run" in foreign
        and "global_step4 is newer than the posteriors" in newer
    )
    assert newest_whole(tmp_path, "third", 6)[0] is None


def test_a_resume_deletes_later_checkpoints_of_its_run_alone_and_of_a_link_only_the_link(tmp_path):
    for step in (4, 6, 8):
        save(tmp_path, step)
    save(tmp_path, 10, finish=False)
    save(tmp_path, 12, run="other")
    linked = tmp_path / "_actor/global_step6"
    target = tmp_path / "elsewhere"
    linked.rename(target)
    linked.symlink_to(target)
    assert newest_whole(tmp_path, "mine", 7)[0] == "global_step6"
    checkpoints.delete_after(tmp_path, "mine", 4)
    assert (
        checkpoints.tags(tmp_path) == ["global_step12", "global_step4"] and not linked.is_symlink()
    )
    assert sorted(path.name for path in target.iterdir()) == sorted([*SHARDS, checkpoints.MANIFEST])


def test_of_a_large_file_blocks_from_its_beginning_to_its_end_are_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "WHOLE_BYTES", 100)
    monkeypatch.setattr(checkpoints, "BLOCK_BYTES", 10)
    monkeypatch.setattr(checkpoints, "BLOCKS", 4)
    path = tmp_path / "_actor/global_step1/shard"
    path.parent.mkdir(parents=True)
    for place in (0, 9, 40, 49, 80, 120, 129):  # blocks of 10 at 0, 40, 80 and 120 of 130 bytes
        path.write_bytes(bytes(130))
        checkpoints.complete(tmp_path, "global_step1", "mine", [checkpoints.sizes(path.parent)])
        assert newest_whole(tmp_path, "mine", 1)[0] is not None
        changed = bytearray(130)
        changed[place] = 1
        path.write_bytes(changed)
        assert newest_whole(tmp_path, "mine", 1)[0] is None


def test_a_folder_that_the_hosts_do_not_share_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "SHARED_WAIT_S", 0)
    save(tmp_path, 4, finish=False)
    here = checkpoints.sizes(tmp_path / "_actor/global_step4")
    there = here | {"zero_pp_rank_2_optim.pt": 7}
    with pytest.raises(RunError, match=r"zero_pp_rank_2_optim.pt \(1 of 4 files\)"):
        checkpoints.complete(tmp_path, "global_step4", "mine", [here, there])
    assert newest_whole(tmp_path, "mine", 4)[0] is None


@pytest.mark.parametrize("second", [(None, None), (2, "mine"), (4, "other")])
def test_a_rank_that_has_loaded_something_else_ends_the_run(tmp_path, second):
    checkpoints.check_loaded(tmp_path, "global_step4", "mine", [(4, "mine")] * 2)
    with pytest.raises(RunError, match=r"^rank 1 .*not global_step4 of run mine"):
        checkpoints.check_loaded(tmp_path, "global_step4", "mine", [(4, "mine"), second])


def test_a_rank_that_finds_no_checkpoint_does_not_begin_anew():
    backend = SimpleNamespace(get_rank=lambda: 3)
    with pytest.raises(
        RunError, match=r"^rank 3 on host .* finds no checkpoint global_step4 in there"
    ):
        _load(backend, lambda *_, **__: (None, None), "global_step4", "model", "there")


def test_the_state_of_the_generation_is_a_file_that_the_manifest_covers(tmp_path):
    state = {
        "generated": 32,
        "sampling": {"seen": {3: (1, 0.5)}},
        "again": [(7, None)],
        "drained": False,
    }
    save(tmp_path, 2)
    save(tmp_path, 4, finish=False)
    folder = tmp_path / "_actor/global_step4"
    sizes = generation.save(folder, state)
    assert sizes.keys() == {*SHARDS, "posteriors.json"}
    checkpoints.complete(tmp_path, "global_step4", "mine", [sizes])
    assert newest_whole(tmp_path, "mine", 4) == ("global_step4", [])
    assert generation.load(folder, {"run": "mine"}) == state
    path = folder / "posteriors.json"
    path.write_text(path.read_text().replace("32", "33"))
    tag, (line,) = newest_whole(tmp_path, "mine", 4)
    assert tag == "global_step2" and "posteriors.json" in line


def test_a_checkpoint_of_before_has_the_state_of_the_generation_in_its_client_states(tmp_path):
    save(tmp_path, 2)
    state = {"generated": 32, "sampling": {}, "again": [], "drained": False}
    assert newest_whole(tmp_path, "mine", 2) == ("global_step2", [])
    assert (
        generation.load(tmp_path / "_actor/global_step2", {"run": "mine", "generation": state})
        == state
    )

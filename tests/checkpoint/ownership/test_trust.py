"""Whose checkpoints are trusted, and what a hostile one could do: nothing."""

import dataclasses
import json
import os
import re
import resource
import shutil
import stat
from pathlib import Path

import pytest
import torch

from forge.checkpoint import Manifest
from forge.checkpoint.format import manifest, tensorfile
from forge.checkpoint.format.checksums import entry_of, num_chunks
from forge.checkpoint.format.names import STATE, TENSORS
from forge.checkpoint.ownership import trust
from forge.checkpoint.ownership.trust import MAX_STATE_BYTES, check_writable_size
from forge.config.schema import OnForeign
from forge.errors import CheckpointError, DamagedCheckpoint
from forge.filesystem.foreign import foreign

STRANGER = 4321
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def filled(open_store, commit):
    """A directory with the steps 1 and 2, of nobody's any more."""
    store = open_store()
    for step in (1, 2):
        commit(store, step)
    store.close()
    return store.directory


def everything(folder):
    return [folder, *folder.rglob("*")]


def give(path, uid=STRANGER):
    os.chown(path, uid, -1, follow_symlinks=False)


FOREIGN = {
    "directory of another": (lambda d: give(d), ".", rf"belongs to uid {STRANGER}, not to root"),
    "directory for everybody": (lambda d: d.chmod(0o777), ".", r"can be written by everybody"),
    "directory for a group": (
        lambda d: (os.chown(d, 0, STRANGER), d.chmod(0o770)),
        ".",
        rf"can be written by the group gid {STRANGER} \(it belongs to root \(uid 0\), mode 0770\)",
    ),
    "step of another": (lambda d: give(d / "step_2"), "step_2", "belongs to uid"),
    "step for everybody": (lambda d: (d / "step_2").chmod(0o757), "step_2", "by everybody"),
    "tensors of another": (
        lambda d: give(d / "step_2" / TENSORS),
        f"step_2/{TENSORS}",
        r"belongs to uid.*\(mode 0644\)",
    ),
    "state for everybody": (
        lambda d: (d / "step_2" / STATE).chmod(0o646),
        f"step_2/{STATE}",
        "can be written by everybody",
    ),
    "manifest of another": (
        lambda d: give(d / "step_2" / manifest.NAME),
        f"step_2/{manifest.NAME}",
        "belongs to uid",
    ),
    "link of another": (
        lambda d: (d.joinpath("step_9").symlink_to(d / "step_2"), give(d / "step_9")),
        "step_9",
        "belongs to uid",
    ),
    "link to another's": (
        lambda d: (
            shutil.copytree(d / "step_2", d.parent / "step_2"),
            shutil.rmtree(d / "step_2"),
            d.joinpath("step_2").symlink_to(d.parent / "step_2"),
            give(d.parent / "step_2"),
        ),
        "step_2",
        "belongs to uid",
    ),
}


@as_root
@pytest.mark.parametrize("case", FOREIGN)
def test_what_others_could_have_written_is_warned_of_once(case, filled, open_store, caplog):
    """By default a job continues, and says whose the files are and what to do."""
    harm, where, complaint = FOREIGN[case]
    harm(filled)
    store = open_store(filled)
    found = store.newest()
    store.newest()
    assert found.manifest.step == 2
    (said,) = [record.message for record in caplog.records if "decides what" in record.message]
    assert said.startswith(f"{os.path.normpath(filled / where)} ")
    assert re.search(complaint, said)
    assert "`resilience.checkpoint.on_foreign=ignore`" in said
    assert "chmod -R go-w" in said


@as_root
@pytest.mark.parametrize("case", FOREIGN)
def test_what_others_could_have_written_is_refused_where_the_policy_says_so(
    case, filled, open_store
):
    """A directory ends the start, before anything is written; a step is passed over."""
    harm, where, complaint = FOREIGN[case]
    harm(filled)
    before = sorted(os.listdir(filled)), (filled / ".fence.json").read_bytes()
    if where == ".":
        with pytest.raises(CheckpointError, match=complaint):
            open_store(filled, on_foreign=OnForeign.refuse)
        assert (sorted(os.listdir(filled)), (filled / ".fence.json").read_bytes()) == before
    else:
        store = open_store(filled, on_foreign=OnForeign.refuse)
        assert store.newest().manifest.step == (2 if where == "step_9" else 1)
        assert len(store.passed_over) == 1
        assert where in store.passed_over[0]


@as_root
@pytest.mark.parametrize("case", FOREIGN)
def test_a_group_that_shares_on_purpose_hears_nothing(case, filled, open_store, caplog):
    """`ignore` is for them."""
    FOREIGN[case][0](filled)
    assert open_store(filled, on_foreign=OnForeign.ignore).newest().manifest.step == 2
    assert "decides what" not in caplog.text


OURS = {
    "as it is": lambda d: None,
    "sticky": lambda d: d.chmod(0o1777),
    "read by all": lambda d: d.chmod(0o755),
    "our own group": lambda d: [p.chmod(0o775) for p in everything(d) if p.is_dir()],
    "a link to a step of ours": lambda d: d.joinpath("step_9").symlink_to(d / "step_2"),
}


@as_root
@pytest.mark.parametrize("case", OURS)
def test_what_is_ours_alone_is_trusted(case, filled, open_store, caplog):
    """Root's group has nobody else in it, as the group of each user under umask 002."""
    OURS[case](filled)
    store = open_store(filled, on_foreign=OnForeign.refuse)
    assert store.newest().manifest.step == 2
    store.close()
    assert open_store(filled).newest().manifest.step == 2
    assert "decides what" not in caplog.text


@as_root
def test_what_root_has_written_is_trusted_by_everybody(filled):
    """Whoever is root needs no checkpoint to do what they like."""
    filled.parent.parent.chmod(0o755)
    give(filled)
    assert foreign(filled) is not None
    child = os.fork()
    if not child:
        os._exit(_of_others(filled))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _of_others(filled):
    """In a process of the stranger's: its own directory, and a file of root's, are both fine."""
    one, other = os.open(filled, os.O_RDONLY), os.open(filled / "step_1", os.O_RDONLY)
    os.setuid(STRANGER)
    found = [foreign(Path(f"/proc/self/fd/{fd}")) for fd in (one, other)]
    return sum(text is not None for text in found)


@as_root
def test_under_refuse_what_is_saved_is_trusted_again_whatever_the_umask(tmp_path, open_store):
    """A job must not refuse at its resume what it has written itself."""
    os.chown(tmp_path, 0, STRANGER)
    tmp_path.chmod(0o2755)  # what is made below belongs to the group
    before = os.umask(0o002)
    try:
        store = open_store(tmp_path / "made", on_foreign=OnForeign.refuse)
        path = store.commit(store.snapshot(1, {"x": 1}, is_complete=False, copy=False))
        assert path.stat().st_gid == STRANGER
        assert store.newest().manifest.step == 1
        shared = open_store(tmp_path / "shared")
        path = shared.commit(shared.snapshot(1, {"x": 1}, is_complete=False, copy=False))
        assert stat.S_IMODE(path.stat().st_mode) & 0o777 == 0o775
    finally:
        os.umask(before)


# -- what a hostile checkpoint could do ------------------------------------------------------------


def rewrite(path, **changes):
    """A manifest that holds together, with these entries of files changed."""
    raw = json.loads((path / manifest.NAME).read_bytes())
    del raw["checksum"]
    raw["files"].update(changes.pop("files", {}))
    described = dataclasses.replace(Manifest(**raw), **changes)
    (path / manifest.NAME).write_bytes(described.to_bytes())


def hollow_entry(size):
    return {"size": size, "chunks": [0] * num_chunks(size)}


def hollow(path, name, size):
    """A file of that size that takes no room, and an entry that fits it but for the checksums."""
    os.truncate(path / name, size)
    rewrite(path, files={name: hollow_entry(size)})


def replaced(path, name, content):
    (path / name).write_bytes(content)
    rewrite(path, files={name: entry_of(content)})


def linked(path):
    (path / TENSORS).rename(path.parent / "elsewhere")
    (path / TENSORS).symlink_to(path.parent / "elsewhere")


header = b'{"x": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}'
HOSTILE = {
    "state of 100 GB": (lambda p: hollow(p, STATE, 100 << 30), "at most 1073741824 bytes"),
    "state that is deep": (lambda p: replaced(p, STATE, b"[" * 10**6), "cannot be read"),
    "state with a deep value": (
        lambda p: replaced(p, STATE, b"[" * 600 + b"]" * 600),
        "nested too deep|cannot be read|no attribute|not a mapping",
    ),
    "state that is no UTF-8": (lambda p: replaced(p, STATE, b'{"a": "\xff"}'), "cannot be read"),
    "header of 200 MB": (
        lambda p: replaced(p, TENSORS, (200 << 20).to_bytes(8, "little") + b" " * (200 << 20)),
        "header of 209715200 bytes",
    ),
    "deep header": (
        lambda p: replaced(p, TENSORS, (10**5).to_bytes(8, "little") + b"[" * 10**5),
        "is not in safetensors layout",
    ),
    "a path upwards": (
        lambda p: rewrite(p, files={"../x": entry_of(b"")}),
        "names a file outside the checkpoint",
    ),
    "an absolute path": (
        lambda p: rewrite(p, files={"/etc/passwd": entry_of(b"")}),
        "names a file outside the checkpoint",
    ),
    "a link out": (linked, "is not a plain file|cannot be opened"),
    "a size that is not there": (
        lambda p: rewrite(p, files={TENSORS: hollow_entry(1 << 40)}),
        f"{TENSORS}: expected {1 << 40} bytes, found",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_checkpoint_is_damage_and_takes_no_memory(case, filled, open_store):
    """Sizes are compared, and limited, before anything of that size is asked for."""
    harm, complaint = HOSTILE[case]
    harm(filled / "step_2")
    store = open_store(filled)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DamagedCheckpoint, match=complaint):
        store.read(filled / "step_2")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB
    assert store.newest().manifest.step == 1


def test_what_would_not_be_read_again_is_not_written():
    """A save that is too large fails as a save, not as a resume."""
    with pytest.raises(CheckpointError, match="Let state_dict"):
        check_writable_size(_Long())


def test_more_metrics_than_would_be_read_again_are_refused_as_they_are_written(
    store, commit, monkeypatch
):
    """What was saved for days could not be read by anybody, and was never removed either."""
    commit(store, 1)
    store.logged = lambda: {f"sample_{i}/loss": (1, 0.5) for i in range(20_000)}
    commit(store, 2)
    assert store.newest().manifest.metrics["sample_9/loss"] == 0.5
    monkeypatch.setattr(manifest, "MAX_BYTES", 1 << 20)
    with pytest.raises(CheckpointError, match=r"20000 names were given to run\.log\. Log fewer"):
        commit(store, 3)
    assert [path.name for path in store.directory.glob("*step_3*")] == []
    monkeypatch.undo()
    assert store.newest().manifest.step == 2


def test_a_manifest_of_forty_thousand_metrics_is_read_again(store, commit):
    """An evaluation that logs every sample is no reason to lose the run."""
    name = "validation/" + "a" * 200
    store.logged = lambda: {f"{name}/{i}": (1, 0.5) for i in range(40_000)}
    assert (commit(store, 1) / manifest.NAME).stat().st_size > 16 << 20
    assert len(store.newest().manifest.metrics) == 40_000


@pytest.mark.parametrize("limit", ["MAX_HEADER", "MAX_STATE_BYTES"])
def test_more_than_would_be_read_again_is_refused_at_the_start(limit, store, monkeypatch):
    """Not at the first save, hours later; and never at a resume."""
    state = {"tensors": {str(i): torch.ones(()) for i in range(100)}, "text": "a" * 8000}
    module = tensorfile if limit == "MAX_HEADER" else trust
    store.check_savable(state)
    monkeypatch.setattr(module, limit, 6000)
    with pytest.raises(
        CheckpointError, match=r"at most 6000 are (read again|kept)\. Let state_dict"
    ):
        store.check_savable(state)
    with pytest.raises(CheckpointError, match="Let state_dict"):
        store.commit(store.snapshot(1, state, is_complete=False, copy=False))


class _Long(bytes):
    def __len__(self):
        return MAX_STATE_BYTES + 1

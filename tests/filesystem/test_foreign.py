"""Who other than us could have written a file, where its mode and owner do not say so plainly."""

import os
import re
import struct
import subprocess

import pytest
from attempts import begin_ledger, by_an_earlier_version, collect, open_store, submit
from two_users import ATTACKER, VICTIM, as_user, place

from forge.checkpoint.inspection import load
from forge.filesystem.files import read_trusted, write_atomically
from forge.filesystem.foreign import foreign_file
from forge.jobdir import ledger
from forge.jobdir.job_files import forge_dir

STRANGER = 4321
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can play two users")


def foreign(path):
    fd = os.open(path, os.O_RDONLY)
    try:
        return foreign_file(fd, path if path.is_dir() else path.parent)
    finally:
        os.close(fd)


FOREIGN = {
    "a file of another user": (lambda p: os.chown(p, STRANGER, -1), "belongs to uid 4321, not to"),
    "a file for everybody": (lambda p: p.chmod(0o646), "can be written by everybody"),
    "a file for a group": (
        lambda p: (os.chown(p, 0, STRANGER), p.chmod(0o664)),
        "can be written by the group gid 4321 (it belongs to root (uid 0), mode 0664)",
    ),
    "a directory for everybody": (lambda p: p.parent.chmod(0o757), "can be written by everybody"),
}


@as_root
@pytest.mark.parametrize("case", FOREIGN)
def test_what_others_could_have_written_is_said(case, tmp_path):
    """The message names who can write, since that is what the user has to change."""
    folder = tmp_path / "job"
    folder.mkdir()
    path = folder / "task.pkl"
    path.touch()
    harm, problem = FOREIGN[case]
    harm(path)
    found = [foreign(one) for one in (folder, *sorted(folder.iterdir()))]
    assert [text for text in found if text and problem in text]


OURS = {
    "as it is": lambda p: None,
    "a sticky directory": lambda p: p.parent.chmod(0o1777),
    "read by all": lambda p: p.parent.chmod(0o755),
    "our own group": lambda p: p.chmod(0o664),
}


@as_root
@pytest.mark.parametrize("case", OURS)
def test_what_is_ours_alone_is_trusted(case, tmp_path):
    """Root's group has nobody else in it, as the group of each user under umask 002."""
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "task.pkl").touch()
    OURS[case](folder / "task.pkl")
    assert not any(foreign(one) for one in (folder, *folder.iterdir()))


@as_root
def test_what_root_has_written_is_trusted_by_everybody():
    """Whoever is root needs no file of a job to do what they like."""
    with place() as found:
        (found.shared / "root").mkdir()
        said = as_user(VICTIM, lambda: (foreign(found.shared / "root"), foreign(found.home)))
        assert said.text == "(None, None)\n"


@as_root
def test_whom_an_acl_lets_write_is_somebody_else(tmp_path):
    """In the mode of a file with an ACL the group's bits are its mask: the group is harmless."""
    path = tmp_path / "task.pkl"
    write_atomically(path, "x")
    path.chmod(0o664)
    assert foreign(path) is None  # root's own group
    entries = [(1, 6, 2**32 - 1), (2, 6, ATTACKER), (4, 4, 2**32 - 1), (16, 6, 2**32 - 1)]
    acl = b"".join(struct.pack("<HHI", *one) for one in [*entries, (32, 4, 2**32 - 1)])
    try:
        os.setxattr(path, "system.posix_acl_access", struct.pack("<I", 2) + acl)
    except OSError:
        pytest.skip("no ACLs here")
    assert "can be written by users or groups that its ACL names" in foreign(path)
    path.chmod(0o644)  # which takes the right out of the mask
    assert foreign(path) is None


@as_root
def test_a_disk_that_gives_every_file_to_one_user_is_no_foreign_one():
    """Some network disks do; whose a file is there tells by one that we make."""
    with place() as found:
        folder = found.shared / "job"

        def use():
            forge_dir(folder).mkdir(parents=True, mode=0o755)
            write_atomically(forge_dir(folder) / "plan.json", "{}")
            os.geteuid = lambda: 12345  # as if this were not who its files belong to
            assert read_trusted(forge_dir(folder) / "plan.json") == b"{}"
            left = sorted(os.listdir(forge_dir(folder)))
            forge_dir(folder).chmod(0o555)  # no second probe is made, nor could be
            assert read_trusted(forge_dir(folder) / "plan.json") == b"{}"
            return left

        assert as_user(ATTACKER, use).text == "['plan.json']\n"


@as_root
def test_a_colleague_can_look_at_what_was_saved_and_logged():
    """Groups share results on purpose: to read them executes nothing."""
    with place() as found:

        def save():
            store = open_store(found)
            store.commit(store.snapshot(1, {"x": 1}, copy=False))
            store.close()
            begin_ledger(found)

        def look():
            (attempt,) = ledger.read(found.job).attempts
            return attempt.start_step, load(found.job / "checkpoints").state

        assert as_user(VICTIM, save).code == 0
        said = as_user(ATTACKER, look)
        assert said.text == "(0, {'x': 1})\n"


@as_root
def test_the_command_in_the_message_is_all_that_a_job_of_an_earlier_version_needs():
    """Whose directories the group could write to."""
    with place() as found:
        as_user(VICTIM, lambda: by_an_earlier_version(submit)(found))
        said = as_user(VICTIM, lambda: collect(found)).text
        command = re.search(r"`(chmod -R go-w [^`]+)`", said)[1]
        subprocess.run(command, shell=True, check=True)
        assert "Untrusted" not in as_user(VICTIM, lambda: collect(found)).text

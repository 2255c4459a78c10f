"""`forge doctor`: on a healthy machine, and with each fault planted for real."""

from pathlib import Path

import forked
import pytest
from harness import FORGE
from sick_machine import FAULTS, examined, failed_in, is_found, is_possible

from forge.cli import doctor
from forge.cli.doctor import FAILS, OK, Row
from forge.errors import SlurmRefused


@pytest.mark.parametrize("fault", [pytest.param(one, id=one.name) for one in FAULTS])
def test_each_fault_is_found_and_nothing_else(fault, tmp_path):
    """People run it where a job went wrong: it has to say what is, and only that."""
    if not is_possible(fault):
        pytest.skip("needs root (mounts)")
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    code, output = examined(fault, folder)
    assert is_found(fault, code, output), output


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("resilience.health.checks.fan=warn", "there is no such key"),
        ("health.checks.shm=warn", "is not `resilience.<key>=<value>`"),
        ("resilience.health.checks.shm=much", "ignore | warn | refuse"),
        ("resilience.health.commands.nhc.run=[]", "expected a command"),
    ],
)
def test_an_override_that_makes_no_sense_ends_with_78(override, said):
    command = [FORGE, "doctor", override]
    done = forked.completed(command, Path.cwd(), joins_output=False)
    assert (done.returncode, done.stdout) == (78, "")
    assert said in done.stderr


def test_of_many_nodes_what_is_well_is_one_row_and_each_fault_its_own():
    """A table of a thousand lines hides the one that counts."""
    rows = [Row("shm", f"n{i}", FAILS if i == 3 else OK, "x", "y" * (i == 3)) for i in range(8)]
    merged = doctor.merged(rows)
    assert [(row.where, row.verdict) for row in merged] == [("n0 and 6 more", OK), ("n3", FAILS)]
    lines = list(doctor.table(merged))
    assert failed_in("\n".join(lines)) == ["shm"]
    assert lines[-1].strip() == "y"


def test_several_lines_of_slurm_are_one_sentence(monkeypatch, capsys):
    """Without a configuration scontrol prints four lines; escaped, they are hard to read."""

    def refuse():
        raise SlurmRefused("scontrol: error: first\nscontrol: fatal: second")

    monkeypatch.setattr(doctor.client, "can_submit", lambda: True)
    monkeypatch.setattr(doctor.client, "settings", refuse)
    doctor._print_cluster()
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.endswith("is unknown: scontrol: error: first scontrol: fatal: second")

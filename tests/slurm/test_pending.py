"""The reasons of Slurm for jobs that wait in its queue, as forge prints them."""

from io import StringIO
from pathlib import Path

import pytest

from forge.jobdir.job_state import State
from forge.launch.progress.display import Display
from forge.slurm import pending
from forge.sweeps import status
from forge.sweeps.job import SweepJob

STUCK = (
    *("DependencyNeverSatisfied", "JobHeldUser", "JobHeldAdmin", "launch_failed_requeued_held"),
    *("job requeued in held state", "SPECIAL_EXIT", "REQUEUE_HOLD", "RESV_DEL_HOLD"),
    *("JobHoldMaxRequeue", "PartitionDown", "PartitionInactive", "PartitionTimeLimit"),
    *("PartitionNodeLimit", "BadConstraints", "ReqNodeNotAvail, UnavailableNodes:n1"),
    *("ReservationDeleted", "InvalidAccount", "QOSNotAllowed", "AssocMaxCpuPerJobLimit"),
    *("QOSMaxWallDurationPerJobLimit", "QOSMaxMemoryPerNode", "QOSMinCpuNotSatisfied"),
    *("AssocGrpCPUMinutesLimit", "QOSGrpBillingMinutes", "AssocGrpWallLimit"),
    *("AssociationTimeLimit", "QOSResourceLimit", "MaxMemPerLimit", "DeadLine", "NodeDown"),
)
PASSING = (
    *("None", "Priority", "Resources", "BeginTime", "Dependency", "Licenses", "JobArrayTaskLimit"),
    *("AssocGrpCpuLimit", "AssocGrpCPURunMinutesLimit", "AssocMaxJobsLimit", "QOSGrpNodeLimit"),
    *("QOSMaxJobsPerUserLimit", "QOSMaxNodePerUserLimit", "Reservation"),
    "ReqNodeNotAvail, May be reserved for other job",
)


@pytest.mark.parametrize("reason", STUCK)
def test_a_reason_that_does_not_end_by_itself_is_told_apart(reason):
    """A job that waits permanently looks like one that waits for its turn."""
    assert pending.is_stuck(reason)


@pytest.mark.parametrize("reason", PASSING)
def test_a_reason_that_ends_when_others_do_is_no_alarm(reason):
    """Else people would cancel what is only waiting for its turn."""
    assert not pending.is_stuck(reason)


def test_each_change_of_a_reason_is_said_once_for_all_jobs_that_share_it():
    """A thousand lines would say nothing; and two reasons take turns while a job waits."""
    told = pending.Told()

    def said(*reasons):
        jobs = [(number, f"7_{number}", reason) for number, reason in enumerate(reasons)]
        return [line for line, _ in told.news(jobs)]

    assert said("None", "None", "None", "None") == []
    assert said("Priority", "Priority", "Priority", "Licenses") == [
        "jobs 0-2 waiting: Priority",
        "job 3 waiting: Licenses",
    ]
    assert said("Resources", "Priority", "Priority", "Licenses") == []
    (line,) = said("Resources", "JobHeldUser", "Priority", "JobHeldUser")
    assert line == (
        "jobs 1, 3 waiting: JobHeldUser, which does not end by itself: `scontrol release 7_1 7_3`"
        " lets Slurm start them."
    )
    assert said("Resources", "Priority", "", "JobHeldUser") == ["job 1 waiting: Priority"]
    (line,) = said("", "JobHeldUser", "", "JobHeldUser")
    assert line.startswith("job 1 waiting: JobHeldUser")


def test_the_numbers_of_many_jobs_are_short():
    assert pending.ranges([4, 0, 1, 2, 7]) == "0-2, 4, 7"
    held = [(number, f"7_{number}", "JobHeldUser") for number in range(1000)]
    ((line, _),) = pending.Told().news(held)
    assert "7_5 …`" in line


def test_the_table_and_its_summary_have_the_reasons():
    """Where a thousand jobs wait there is no row for each."""
    place = Path("multirun/0")
    waits = [SweepJob(number, place, (), State.queued, waits_for="Priority") for number in range(9)]
    waits.append(SweepJob(9, place, (), State.queued, because="preempted", waits_for="JobHeldUser"))
    assert [status.problem_of(job) for job in waits[:9]] == ["waits: Priority"] * 9
    assert status.problem_of(waits[9]) == "preempted, waits: JobHeldUser"
    stream = StringIO()
    with Display(stream, mode="plain") as shown:
        shown.update(waits)
    assert "10 queued (9 Priority, 1 JobHeldUser)" in stream.getvalue()

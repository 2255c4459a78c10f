"""A site's own check fails on one node of a true cluster: the job ends on the other.

finds      the check fails on the first node
brief      the exclusion is over when the job is requeued once more
struck     the wrapper is killed when it has written the exclusion, and not requeued the job
"""

import json
import shutil
import signal
import time

import pytest
from cluster import SBIN, wait_for
from slurm_apps import CONF, TRAIN, SlurmApp, reasons, table
from sweeps import assert_same_job

from forge.jobdir.job_files import forge_dir
from forge.process import processes

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

SITE = """
    gates=$1 kind=$2
    case $kind in finds|brief|struck)  # the first node that it looks at
      [ -e "$gates/sick $kind" ] || echo "$SLURMD_NODENAME" > "$gates/sick $kind" ;;
    esac
    [ "$(cat "$gates/sick $kind" 2> /dev/null)" = "$SLURMD_NODENAME" ] || exit 0
    echo "the fan of $SLURMD_NODENAME stands still"
    exit 3
"""
HEALTH = """\
      health:
        exclude_h: ${oc.select:hours.${kind},24}
        commands:
          site: {run: [sh, site.sh, "${gates}", "${kind}"], action: exclude_node}
"""
BEFORE = "      health: {enabled: false}\n"
NODELIST = "nodelist: ${oc.select:nodes.${kind},n1}"
CPUS = "cpus_per_task: ${oc.select:cpus.${kind},1}"
assert BEFORE in CONF
assert NODELIST in CONF
SICK_CONF = CONF.replace(BEFORE, HEALTH).replace(NODELIST, CPUS)
SICK_CONF = SICK_CONF.replace("holds: {}", "hours: {}\n    cpus: {}\n    holds: {}")
MISBEHAVE = """
    node = os.environ.get("SLURMD_NODENAME")
    if not hasattr(misbehave, "node"):
        misbehave.node = node
        with open(Path(cfg.gates, f"nodes of {cfg.kind}"), "a") as file:
            file.write(f"{node}\\n")
"""
BUDGETS = ("restarts", "preemptions", "timeouts", "failures", "early_evictions", "excluded")
REQUEUE_ONCE = """\
#!/bin/sh
if [ "$1" = requeue ] && [ ! -e "{gates}/killed" ]; then
  touch "{gates}/requeueing"
  while [ ! -e "{gates}/killed" ]; do sleep 0.05; done
  exit 1
fi
exec {scontrol} "$@"
"""


class SickApp(SlurmApp):
    """A sweep whose jobs make the site's check."""

    def __init__(self, cluster, folder):
        super().__init__(cluster, folder, TRAIN, SICK_CONF, MISBEHAVE)
        (folder / "site.sh").write_text(SITE)

    def ran_on(self, kind):
        """The node of each start that came to train."""
        path = self.gates / f"nodes of {kind}"
        return path.read_text().split() if path.exists() else []

    def fall_sick(self, kind, node):
        """From now on this job's check fails there."""
        (self.gates / "new").write_text(f"{node}\n")
        (self.gates / "new").rename(self.gates / f"sick {kind}")

    def excluded(self):
        """Nodes that the sweep has excluded."""
        paths = (forge_dir(self.sweep_dir) / "excluded").glob("n*.json")
        return {path.stem: json.loads(path.read_text()) for path in paths}

    def start_holding(self, *kinds, **tables):
        overrides = [f"++{name}={table(**values)}" for name, values in tables.items()]
        sweep = self.start(f"kind={','.join(kinds)}", *overrides)
        for kind in kinds:
            self.wait_for_gate(f"{kind} 0", sweep)
        return sweep


@pytest.fixture
def app(cluster, tmp_path):
    found = SickApp(cluster, tmp_path / "app")
    yield found
    found.close()


def assert_ended(app, sweep, undisturbed, *idle):
    assert sweep.wait() == 0, sweep.output
    for kind, job in app.jobs().items():
        if kind not in idle:
            assert_same_job(job, undisturbed)


def test_a_job_leaves_a_sick_node_and_ends_on_another(app, undisturbed):
    """Slurm would give the requeued job the same node again."""
    sweep = app.start("kind=finds")
    assert_ended(app, sweep, undisturbed)
    job = app.jobs()["finds"]
    ((sick, found),) = app.excluded().items()
    assert app.ran_on("finds") in (["n1"], ["n2"])
    assert app.ran_on("finds") != [sick]
    assert job.shown["ExcNodeList"] == sick
    assert reasons(job) == ["unhealthy", "finished"]
    assert job.counts["excluded"] == 1
    assert found["job"] == str(job.directory)
    assert f"the fan of {sick} stands still" in found["text"]


@pytest.mark.proofs
def test_an_exclusion_that_is_over_is_taken_out_at_the_next_requeue(app, undisturbed):
    """A node that was repaired is there for the job again."""
    sweep = app.start_holding("brief", hours={"brief": 0.006}, holds={"brief": 1})
    job = app.jobs()["brief"]
    ((sick, found),) = app.excluded().items()
    assert job.shown["ExcNodeList"] == sick
    assert app.ran_on("brief") != [sick]
    app.fall_sick("brief", "nowhere")  # it is repaired
    wait_for(lambda: time.time() > found["until"], "end of the exclusion")
    job.scancel("--signal=USR1")
    assert_ended(app, sweep, undisturbed)
    assert job.shown["ExcNodeList"] == "(null)"
    assert reasons(job) == ["unhealthy", "requested", "finished"]


@pytest.mark.proofs
def test_a_wrapper_killed_between_the_exclusion_and_the_requeue_loses_nothing(app, undisturbed):
    """The batch script starts another, which does not start the task there again."""
    tools = app.folder / "tools"
    tools.mkdir()
    real = shutil.which("scontrol", path=SBIN)
    (tools / "scontrol").write_text(REQUEUE_ONCE.format(gates=app.gates, scontrol=real))
    (tools / "scontrol").chmod(0o755)
    setup = f"hydra.launcher.setup=['export PATH={tools}:$PATH']"
    sweep = app.start("kind=struck", setup)
    app.wait_for_gate("requeueing", sweep)
    job = app.jobs()["struck"]
    (sick,) = app.excluded()
    assert job.shown["ExcNodeList"] == "(null)"
    assert processes.send(job.state["pid"], signal.SIGKILL)
    (app.gates / "killed").touch()
    assert_ended(app, sweep, undisturbed)
    assert len(app.ran_on("struck")) == 1
    assert app.ran_on("struck") != [sick]
    assert reasons(job) == ["unhealthy", "finished"]
    assert job.counts["excluded"] == 1
    assert job.shown["ExcNodeList"] == sick

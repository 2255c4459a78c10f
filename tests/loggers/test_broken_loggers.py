"""Loggers that fail or hang: training and saves continue, and the values come later."""

import threading

import pytest

import forge
from forge.jobdir import ledger
from forge.jobdir.metric_rows import MetricSource
from forge.loggers.follower import Follower


class Recorder(forge.loggers.Logger):
    """Remembers what it gets, unless it is away."""

    def __init__(self, *, is_away=False):
        self.is_away, self.rows, self.calls = is_away, {}, []

    def on_resume(self, step):
        self.rows = {one: row for one, row in self.rows.items() if one < step}
        return max(self.rows, default=-1) + 1

    def write(self, rows):
        if self.is_away:
            raise ConnectionError("the server is away")
        assert not self.rows.keys() & {row.step for row in rows}
        self.rows |= {row.step: row.values for row in rows}

    def close(self, *, is_finished):
        self.calls.append(is_finished)


class Stuck(Recorder):
    def __init__(self):
        super().__init__()
        self.is_writing, self.may_go_on = threading.Event(), threading.Event()

    def write(self, rows):
        self.is_writing.set()
        self.may_go_on.wait()
        super().write(rows)


@pytest.fixture
def policy(tmp_path):
    return {"checkpoint": {"dir": str(tmp_path / "job")}}


def train(policy, *loggers):
    with forge.Run(policy) as run:
        run.log_to(*loggers)
        for step in run.steps(20):
            run.log(loss=step / 2)


def test_a_logger_that_failed_gets_everything_once_it_works(policy, caplog):
    """A server that is away for an hour costs the curve nothing, and the training neither."""
    logger, other = Recorder(is_away=True), Recorder()
    train(policy, logger, other)
    assert other.rows == {step: {"loss": step / 2} for step in range(20)}
    assert "Recorder failed, and forge keeps trying while training continues: Conn" in caplog.text
    assert logger.rows == {}
    logger.is_away = False
    forge.loggers.export(policy["checkpoint"]["dir"], logger)  # as the message says
    assert logger.rows == other.rows
    assert logger.calls[-1]


def test_a_logger_that_hangs_ends_nothing(policy, tmp_path, caplog):
    """It would otherwise cost the rest of the allocation."""
    train(policy)
    run = next(iter(ledger.read(tmp_path / "job").runs))
    stuck = Stuck()
    follower = Follower(stuck, MetricSource(job=tmp_path / "job", run=run, attempt=1))
    follower.start()
    follower.finish()
    stuck.is_writing.wait()
    follower.join(0)
    assert "Stuck has not taken all values in time when the Run ended" in caplog.text
    stuck.may_go_on.set()
    follower.join(60)
    assert len(stuck.rows) == 20


def test_export_sends_what_a_logger_lacks(policy, tmp_path):
    """For a job that had no logger, or whose logger was away when it ended."""
    train(policy)
    logger = Recorder()
    for _ in range(2):
        forge.loggers.export(tmp_path / "job", logger)
        assert logger.rows == {step: {"loss": step / 2} for step in range(20)}
    assert logger.calls == [True, True]
    with pytest.raises(forge.ForgeError, match=r"expected the metrics of one Run, found .* 0 in"):
        forge.loggers.export(tmp_path / "job", logger, name="fold1")


def test_what_is_no_logger_is_refused(policy):
    """`TensorBoard` without its parentheses would only fail in its thread."""
    with forge.Run(policy) as run:
        with pytest.raises(forge.ForgeError, match="expected loggers such as"):
            run.log_to(forge.loggers.TensorBoard)
        for _ in run.steps(1):
            pass


def test_several_runs_of_a_job_have_files_of_their_own(tmp_path):
    """The folds of a cross-validation would otherwise overwrite each other's values."""
    for name in ("fold0", "fold1"):
        with forge.Run({"checkpoint": {"dir": str(tmp_path / "job")}}, name=name) as run:
            run.log_to(forge.loggers.CSV())
            for step in run.steps(3):
                run.log(loss=step)
    assert len(list((tmp_path / "job").glob("**/metrics_fold?.csv"))) == 2


@pytest.mark.parametrize(("logger", "package"), [("WandB", "wandb"), ("MLflow", "mlflow")])
def test_a_missing_package_is_one_sentence(logger, package, monkeypatch):
    """It names the extra that installs it."""
    monkeypatch.setattr("forge.loggers.logger.find_spec", lambda name: None)
    with pytest.raises(forge.ConfigError, match=rf"`{package}` is not installed: pip install"):
        getattr(forge.loggers, logger)()

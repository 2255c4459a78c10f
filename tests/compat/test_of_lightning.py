"""What forge needs of Lightning's private parts; in a process that has imported Lightning."""

import pytest
from contracts import contract
from lightning_jobs import check_part

from forge.compat import of_lightning


def test_loop_state():
    """The counters of all loops: a step, an epoch or a validation would be repeated without one."""
    with contract(of_lightning.loops, of_lightning.loop_state, of_lightning.load_loop_state):
        check_part("loop_state")
        check_part("load_loop_state")


def test_counts():
    """A step boundary is where the loop is done with all batches that it was given."""
    with contract(of_lightning.num_ready, of_lightning.is_in_step, of_lightning.set_fetched):
        check_part("num_ready")
        check_part("is_in_step")
        check_part("set_fetched")


def test_combined_loaders():
    """forge joins the loaders as Lightning does, and knows the end of a pass as early."""
    with contract(
        of_lightning.home, of_lightning.length_of, of_lightning.joined, of_lightning.mode_of
    ):
        check_part("length_of")
        check_part("joined")
        check_part("mode_of")


def test_logged_values():
    """The sums of an epoch decide what a plateau schedule or EarlyStopping does at its end."""
    with contract(of_lightning.logger_state, of_lightning.load_logger_state):
        check_part("logger_state")
        check_part("load_logger_state")
    with contract(of_lightning.results_state, of_lightning.load_results_state):
        check_part("results_state")
        check_part("load_results_state")


def test_metrics():
    """Metrics of torchmetrics are no part of the module's state_dict."""
    with contract(of_lightning.metric_state, of_lightning.load_metric_state):
        check_part("metric_state")
        check_part("load_metric_state")


def test_savers():
    """A ModelCheckpoint would save twice in one step, under two names."""
    with contract(of_lightning.saver_state, of_lightning.load_saver_state):
        check_part("saver_state")
        check_part("load_saver_state")


def test_leave_signals():
    """Lightning's handler would end the training without a save, or requeue the job as well."""
    with contract(of_lightning.leave_signals):
        check_part("leave_signals")


def test_what_is_refused():
    """Both are refused or named at the start."""
    with contract(of_lightning.starts_functions, of_lightning.validates_by_time):
        check_part("starts_functions")
        check_part("validates_by_time")


def test_a_broken_contract_names_the_release():
    """The release is read where the tests install Lightning."""
    broken = pytest.raises(pytest.fail.Exception, match=r"lightning 2\.\d")
    with broken, contract(of_lightning.num_ready):
        raise AssertionError

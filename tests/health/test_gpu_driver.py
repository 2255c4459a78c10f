"""The check of GPUs by their driver: what fails, what is none of its business, whom it names."""

import json
import sys
from pathlib import Path

import pytest
from nvml_answers import FOLDER, NUMBER, FakeNvml, recorded
from repository import ROOT, run

from forge.health import nvml
from forge.health.check import Check, Context, Scope, make
from forge.health.gpu_driver import gpu_driver

SECOND = "GPU 1 (GPU-22222222-aaaa-bbbb-cccc-000000000000, 00000000:43:00.0)"


@pytest.fixture
def look(monkeypatch):
    """Look at devices while some answers differ from a file's; `__` is a blank in a question."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)

    def looked(devices=(0, 1), name="made_up_h100", **changed):
        answers = recorded(name)
        for question, answer in changed.items():
            assert question.replace("__", " ") in answers
            answers[question.replace("__", " ")] = answer
        fake = FakeNvml(answers)
        monkeypatch.setattr(nvml, "driver", lambda: fake)
        looked.asked = fake.asked
        return gpu_driver(Context(Path(), Path(), devices))

    return looked


def fields(action):
    return [{"nvmlReturn": 0, "value": {"uiVal": action}}]


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.json")))
def test_a_healthy_gpu_does_not_fail(look, name):
    """A false alarm takes a node away from everybody; recordings are of healthy GPUs."""
    finding = look(tuple(range(recorded(name)["Count"])), name)
    assert finding is None or not finding.is_failed


@pytest.mark.parametrize(
    ("changed", "value"),
    [
        ({"TotalEccErrors__gpu1__1__0": 3}, "memory errors since the driver was loaded: 3"),
        ({"RemappedRows__gpu1": (2, 1, 1, 0)}, "a memory row waits"),
        ({"RemappedRows__gpu1": (2, 1, 1, 1)}, "could not be remapped"),
        ({"FieldValues__gpu1__[230]": fields(1)}, "a reset of the GPU"),
        ({"FieldValues__gpu1__[230]": fields(99)}, "recovery action 99"),
    ],
)
def test_a_sick_gpu_fails_and_is_named(look, changed, value):
    """Whoever repairs it has to find it: by CUDA's number alone they do not."""
    finding = look(**changed)
    assert finding.is_failed
    assert finding.value.startswith(SECOND)
    assert value in finding.value
    assert finding.remedy


def test_all_that_is_wrong_is_said_and_what_all_gpus_have_once(look):
    """A table with the same words for each of eight GPUs is not read."""
    finding = look(RemappedRows__gpu0=(4, 1, 0, 0))  # rows that have been remapped are no fault
    assert finding.value == (
        "uncorrected memory errors since the driver was loaded: 0; remapped memory rows: 5, none"
        " pending; no recovery action; remapped memory rows: 0, none pending"
    )
    finding = look(TotalEccErrors__gpu1__1__0=3, RemappedRows__gpu1=(2, 1, 1, 0))
    assert finding.value.count(SECOND) == 2


@pytest.mark.parametrize("error", ["not_supported", "function_not_found", "no_permission"])
def test_a_gpu_without_answers_fails_nothing(look, error):
    """Consumers' GPUs, MIG, drivers before the function: there is nothing to be seen there."""
    questions = [one for one in recorded("made_up_h100") if one.endswith(("1 0", "]"))]
    questions += ["RemappedRows gpu0", "RemappedRows gpu1"]
    nothing = {one.replace(" ", "__"): {"error": NUMBER[error]} for one in questions}
    assert look(**nothing) is None


@pytest.mark.parametrize("error", ["gpu_is_lost", "reset_required"])
@pytest.mark.parametrize("question", ["TotalEccErrors__gpu1__1__0", "FieldValues__gpu1__[230]"])
def test_a_gpu_that_is_gone_fails(look, question, error):
    """Nothing can be computed there; the others are their tasks'."""
    finding = look(**{question: {"error": NUMBER[error]}})
    assert finding.is_failed
    assert f"{SECOND}: no longer answers" in finding.value
    assert not look((0,), **{question: {"error": NUMBER[error]}}).is_failed


def test_an_unknown_error_is_no_verdict_and_hides_none(look):
    """The driver's "Unknown Error" says nothing of the GPU; what else there is, is still said."""
    unknown = {"TotalEccErrors__gpu0__1__0": {"error": NUMBER["unknown"]}}
    check = Check("gpu_driver", lambda context: look(**unknown), Scope.task)
    answer = make(check, Context(Path(), Path()))
    assert (answer.finding, "Unknown Error" in answer.error) == (None, True)
    for question in ("RemappedRows__gpu0", "RemappedRows__gpu1"):
        assert "a memory row waits" in look(**unknown, **{question: (2, 1, 1, 0)}).value


def test_nothing_is_asked_of_a_gpu_that_is_another_s(look):
    """The tasks of a node share it: each looks at its own."""
    assert not look((0,), TotalEccErrors__gpu1__1__0=9).is_failed
    assert [one for one in look.asked if one.endswith(("gpu1", "gpu1 1 0"))] == ["Name gpu1"]


def test_the_binding_is_imported_where_a_task_has_a_gpu(tmp_path):
    """torch may import it for itself; forge has no use for it on a machine without a GPU."""
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from forge.health.check import Context
from forge.health.gpu_driver import gpu_driver
for devices in ((), (0,)):
    print(gpu_driver(Context(None, None, devices)) is None, "pynvml" in sys.modules)
"""
    assert run([sys.executable, "-c", code], tmp_path).split() == ["True", "False", "True", "True"]


def test_recordings_say_where_they_are_from():
    """What was made up must not be taken for what a device has said."""
    for path in FOLDER.glob("*.json"):
        content = json.loads(path.read_text())
        assert ("driver" in content) is not path.stem.startswith("made_up_")

"""The checks of GPUs by NVML: what fails, what is none of their business, whom they name."""

import json
import sys
from pathlib import Path

import pytest
from nvml_answers import FOLDER, NUMBER, FakeNvml, recorded
from repository import ROOT, run

from forge.config.schema import CheckConfig, ChecksConfig
from forge.health import gpu, nvml
from forge.health.check import Check, Context, Scope, make
from forge.health.table import CHECKS
from forge.health.verdicts import Verdicts

LOOKS = [check.look for check in CHECKS if check.look.__module__ == gpu.__name__]
FIRST = "GPU 0 (GPU-11111111-aaaa-bbbb-cccc-000000000000, 00000000:1B:00.0)"
SECOND = "GPU 1 (GPU-22222222-aaaa-bbbb-cccc-000000000000, 00000000:43:00.0)"


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)


def looked(monkeypatch, look, name="made_up_h100", devices=(0, 1), **changed):
    """What a check finds, where some answers differ from a file's; `_` is a blank in a question."""
    answers = recorded(name)
    for question, answer in changed.items():
        assert question.replace("__", " ") in answers
        answers[question.replace("__", " ")] = answer
    fake = FakeNvml(answers)
    monkeypatch.setattr(nvml, "driver", lambda: fake)
    config = getattr(ChecksConfig(), look.__name__)
    return look(Context(config, Path(), Path(), devices))


def fields(action):
    return [{"nvmlReturn": 0, "value": {"uiVal": action}}]


@pytest.mark.parametrize("look", LOOKS, ids=lambda look: look.__name__)
@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.json")))
def test_a_healthy_gpu_fails_no_check(monkeypatch, name, look):
    """A false alarm takes a node away from everybody; recordings are of healthy GPUs."""
    devices = range(recorded(name)["Count"])
    found = looked(monkeypatch, look, name, devices=tuple(devices))
    assert found is None or not found.is_failed


@pytest.mark.parametrize(
    ("look", "changed", "value"),
    [
        (
            gpu.ecc,
            {"TotalEccErrors__gpu1__1__0": 3},
            "memory errors since the driver was loaded: 3",
        ),
        (gpu.row_remap, {"RemappedRows__gpu1": (2, 1, 1, 0)}, "a row waits"),
        (gpu.row_remap, {"RemappedRows__gpu1": (2, 1, 1, 1)}, "could not be remapped"),
        (gpu.recovery_action, {"FieldValues__gpu1__[230]": fields(1)}, "a reset of the GPU"),
        (gpu.recovery_action, {"FieldValues__gpu1__[230]": fields(99)}, "recovery action 99"),
    ],
)
def test_a_sick_gpu_fails_and_is_named(monkeypatch, look, changed, value):
    """Whoever repairs it has to find it: by CUDA's number alone they do not."""
    found = looked(monkeypatch, look, **changed)
    assert found.is_failed
    assert found.value.startswith(SECOND)
    assert value in found.value
    assert found.remedy


@pytest.mark.parametrize("look", LOOKS, ids=lambda look: look.__name__)
def test_where_the_policy_sets_no_threshold_none_is_exceeded(monkeypatch, look):
    """`threshold: null` is no threshold of 0."""
    answers = recorded("made_up_h100") | {"TotalEccErrors gpu0 1 0": 9}
    monkeypatch.setattr(nvml, "driver", lambda: FakeNvml(answers))
    assert not look(Context(CheckConfig(threshold=None), Path(), Path(), (0,))).is_failed


@pytest.mark.parametrize(
    ("look", "changed"),
    [
        (gpu.row_remap, {"RemappedRows__gpu0": (4, 1, 0, 0)}),  # and it has been done
    ],
)
def test_what_is_usual_fails_nothing(monkeypatch, look, changed):
    assert not looked(monkeypatch, look, **changed).is_failed


def test_what_all_gpus_have_is_said_once(monkeypatch):
    """A table with the same words for each of eight GPUs is not read."""
    found = looked(monkeypatch, gpu.row_remap)
    assert found.value == "remapped rows: 0, none waits"
    found = looked(monkeypatch, gpu.row_remap, RemappedRows__gpu1=(2, 0, 0, 0))
    assert found.value == "remapped rows: 0, none waits; remapped rows: 2, none waits"


@pytest.mark.parametrize("look", LOOKS, ids=lambda look: look.__name__)
@pytest.mark.parametrize("error", ["not_supported", "function_not_found", "no_permission"])
def test_who_has_no_answer_fails_nothing(monkeypatch, look, error):
    """Consumers' GPUs, MIG, drivers before the function: there is nothing to be seen there."""
    answers = recorded("made_up_h100")
    place = ("Count", "Handle", "UUID", "Name", "PciInfo")
    for question in answers:
        if not question.startswith(place):
            answers[question] = {"error": NUMBER[error]}
    monkeypatch.setattr(nvml, "driver", lambda: FakeNvml(answers))
    assert look(Context(CheckConfig(), Path(), Path(), (0, 1))) is None


@pytest.mark.parametrize("look", LOOKS, ids=lambda look: look.__name__)
@pytest.mark.parametrize("error", ["gpu_is_lost", "reset_required"])
def test_a_gpu_that_is_gone_fails_every_check(monkeypatch, look, error):
    """Whichever of them the policy acts on: nothing can be computed there."""
    answers = recorded("made_up_h100")
    for question in answers:
        if " gpu1" in question and not question.startswith(("UUID", "Name", "PciInfo", "MigMode")):
            answers[question] = {"error": NUMBER[error]}
    monkeypatch.setattr(nvml, "driver", lambda: FakeNvml(answers))
    found = look(Context(CheckConfig(threshold=0), Path(), Path(), (0, 1)))
    assert found.is_failed
    assert f"{SECOND}: does not answer" in found.value
    alone = look(Context(CheckConfig(threshold=1e9), Path(), Path(), (0,)))
    assert alone is None or not alone.is_failed


def test_a_gpu_that_is_gone_is_logged_once(monkeypatch, tmp_path):
    """Three checks say the same of it; what another GPU has is still logged."""
    answers = recorded("made_up_h100") | {"UUID gpu1": {"error": NUMBER["gpu_is_lost"]}}
    monkeypatch.setattr(nvml, "driver", lambda: FakeNvml(answers))
    noted, context = [], Context(CheckConfig(), tmp_path, tmp_path, (1,))
    judge = Verdicts(tmp_path, 0, lambda kind, **values: noted.append(values["check"]))
    checks = [Check(look.__name__, look, Scope.task) for look in LOOKS]
    for _ in range(2):
        for check in checks:
            assert judge.judge(check, CheckConfig(), make(check, context)) is None
    assert noted == ["ecc"]
    del answers["UUID gpu1"]
    answers |= {"UUID gpu1": "GPU-2", "RemappedRows gpu1": [0, 0, 1, 0]}
    for check in checks:
        judge.judge(check, CheckConfig(threshold=1e6), make(check, context))
    assert "row_remap" in noted


def test_an_unknown_error_is_no_verdict_and_hides_none(monkeypatch):
    """The driver's "Unknown Error" says nothing of the GPU; what another one has is still said."""
    unknown = {"error": NUMBER["unknown"]}
    config = ChecksConfig().ecc
    answers = recorded("made_up_h100") | {"TotalEccErrors gpu0 1 0": unknown}
    monkeypatch.setattr(nvml, "driver", lambda: FakeNvml(answers))
    context = Context(config, Path(), Path(), (0, 1))
    answer = make(Check("ecc", gpu.ecc, Scope.task), context)
    assert (answer.finding, "Unknown Error" in answer.error) == (None, True)
    answers["TotalEccErrors gpu1 1 0"] = 7
    assert gpu.ecc(context).value == (
        f"{SECOND}: uncorrected memory errors since the driver was loaded: 7"
    )


def test_nothing_is_asked_of_a_gpu_that_is_another_s(monkeypatch):
    """The tasks of a node share it: each looks at its own."""
    fake = FakeNvml(recorded("made_up_h100") | {"TotalEccErrors gpu1 1 0": 9})
    monkeypatch.setattr(nvml, "driver", lambda: fake)
    assert not gpu.ecc(Context(CheckConfig(threshold=0), Path(), Path(), (0,))).is_failed
    assert [one for one in fake.asked if one.endswith(("gpu1", "gpu1 1 0"))] == ["Name gpu1"]


def test_the_binding_is_imported_where_a_task_has_a_gpu(tmp_path):
    """torch may import it for itself; forge has no use for it on a machine without a GPU."""
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from forge.config.schema import CheckConfig
from forge.health.check import Context
from forge.health import gpu
for devices in ((), (0,)):
    print(gpu.ecc(Context(CheckConfig(), None, None, devices)) is None, "pynvml" in sys.modules)
"""
    assert run([sys.executable, "-c", code], tmp_path).split() == ["True", "False", "True", "True"]


def test_recordings_say_where_they_are_from():
    """What was made up must not be taken for what a device has said."""
    for path in FOLDER.glob("*.json"):
        content = json.loads(path.read_text())
        assert ("driver" in content) is not path.stem.startswith("made_up_")

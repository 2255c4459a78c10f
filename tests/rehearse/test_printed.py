"""What a script prints is compared, as far as two uninterrupted runs print it alike."""

import pytest

from forge.rehearse.printed import differing_prints, numbers_to_compare
from forge.rehearse.rehearsal import RehearsedRun


@pytest.fixture
def run(tmp_path):
    """A run whose attempts have printed these lines."""

    def make(*attempts):
        found = RehearsedRun("run", tmp_path / f"run_{len(list(tmp_path.iterdir()))}")
        found.directory.mkdir()
        with (found.directory / "output.log").open("w") as file:
            for lines in attempts:
                found.begins.append(file.tell())
                file.write("".join(f"{line}\n" for line in lines))
                file.flush()
        return found

    return make


def losses(begin, end, **lost):
    return [f"step {n}: loss {lost.get(f'at_{n}', 1 / (n + 1)):.4f}" for n in range(begin, end)]


def total(n):
    return f"total={n * 3 / 2}"


CASES = {
    "a resume that repeats lines": ([[*losses(0, 9)], [*losses(5, 20)]], None),
    "a total that is lost": (
        [losses(0, 9), [*losses(9, 12, at_9=0.7), *losses(12, 20)]],
        "printed: step 9: loss 0.7000; uninterrupted: step 9: loss 0.1000",
    ),
    "a wrong line that is printed again": (
        [losses(0, 9), losses(5, 12, at_10=0.7), losses(8, 20)],
        None,
    ),
    "lines that a kill has lost": ([losses(0, 4), losses(7, 20)], None),
    "another word": ([losses(0, 9), ["resumed from 8", *losses(8, 20)]], None),
    "the last result": (
        [losses(0, 9), losses(8, 20), ["best 0.3"]],
        "printed: best 0.3; uninterrupted: best 0.05",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_last_print_of_each_line_counts(run, case):
    """A script that prints its total, and logs nothing, is as wrong as one that logs it."""
    attempts, expected = CASES[case]
    whole = [*losses(0, 20), "best 0.05"]
    attempts = [*attempts[:-1], [*attempts[-1], *([] if case == "the last result" else whole[-1:])]]
    free = numbers_to_compare(run(whole), run(whole), 0.0)
    assert list(differing_prints(run(whole), run(*attempts), free, 0.0)) == (
        [expected] if expected else []
    )


def test_of_lines_without_a_step_the_last_counts(run):
    """Nothing in the others says which step they belong to."""
    whole = [total(n) for n in range(9)]
    free = numbers_to_compare(run(whole), run(whole), 0.0)
    lost = run(whole[:4], [total(n - 4) for n in range(4, 9)])
    found = list(differing_prints(run(whole), lost, free, 0.0))
    assert found == [f"printed: {total(4)}; uninterrupted: {total(8)}"]
    assert list(differing_prints(run(whole), run(whole[:5], whole[3:]), free, 0.0)) == []


def test_a_step_counts_in_its_epoch(run):
    """As in `epoch 1 step 0`, with a count that is no part of the place."""
    whole = [f"epoch {n // 4} step {n % 4} right {n * 7 % 5}" for n in range(12)]
    wrong = [line.replace("step 1 right 3", "step 1 right 4") for line in whole]
    free = numbers_to_compare(run(whole), run(whole), 0.0)
    found = list(differing_prints(run(whole), run(whole[:6], wrong[5:]), free, 0.0))
    assert found == ["printed: epoch 2 step 1 right 4; uninterrupted: epoch 2 step 1 right 3"]


@pytest.mark.parametrize(
    ("line", "other"),
    [
        ("[2026-11-24 18:44:23,966][HYDRA] epoch 1", "[2026-11-24 18:45:11,002][HYDRA] epoch 1"),
        ("epoch 1 at 18:59", "epoch 1 at 19:00"),
        ("epoch 1 took 3 s", "epoch 1 took 4 s"),
        ("epoch 1 took 3.1s", "epoch 1 took 3.4s"),
        ("memory: 2.5 GiB of 8 GiB", "memory: 2.6 GiB of 8 GiB"),
        ("10%|#  | 6/60\r20%", "10%|#  | 7/60\r20%"),
        ("forge: Training finished at step 60", "forge: Training finished at step 61"),
    ],
)
def test_measurements_are_not_compared(run, line, other):
    """They differ without any mistake, although two runs can print them alike by chance."""
    free = numbers_to_compare(run([line]), run([line]), 0.0)
    assert list(differing_prints(run([line]), run([], [other]), free, 0.0)) == []


def test_what_two_uninterrupted_runs_print_differently_is_not_compared(run):
    """Only the number itself: the others in the line are."""
    one, other = run(["pid 17 loss 0.5"]), run(["pid 18 loss 0.5"])
    free = numbers_to_compare(one, other, 0.0)
    assert list(differing_prints(one, run([], ["pid 19 loss 0.5"]), free, 0.0)) == []
    assert len(list(differing_prints(one, run([], ["pid 19 loss 0.6"]), free, 0.0))) == 1
    assert list(differing_prints(one, run([], ["pid 19 loss 0.50001"]), free, 1e-3)) == []


def test_lines_of_the_start_are_not_compared(run):
    """Each attempt prints where it begins."""
    whole = ["training from step 0", *losses(0, 9)]
    free = numbers_to_compare(run(whole), run(whole), 0.0)
    resumed = run(["training from step 0", *losses(0, 4)], ["training from step 3", *losses(3, 9)])
    assert list(differing_prints(run(whole), resumed, free, 0.0)) == []


SCRIPT = """
import torch, forge
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
total = 0.0
with forge.Run({"checkpoint": {"every_steps": 5}}, model=model) as run:
    print("begin with step", run.step)
    for step in run.steps(30):
        with torch.no_grad():
            model.weight += torch.rand(1, 2)
        total += float(model.weight.sum())
        if step % 3 == 0:
            print(f"step {step}: total {total:.6f}")
"""


@pytest.mark.proofs
@pytest.mark.slow
@pytest.mark.timeout(310)
def test_a_total_that_is_only_printed_is_found(rehearsed):
    """All checkpoints are equal, and nothing is logged."""
    assert rehearsed.run(SCRIPT) == 1, rehearsed.output
    assert "  printed: step " in rehearsed.output
    assert "`total`: 0, but " in rehearsed.output
    assert "leaf" not in rehearsed.output


@pytest.mark.proofs
@pytest.mark.slow
@pytest.mark.timeout(310)
def test_a_total_that_is_saved_is_printed_alike(rehearsed):
    """The comparison finds nothing in a script that is right."""
    script = SCRIPT.replace("{total:", "{run.state['total']:").replace("total = 0.0", "")
    script = script.replace('    print("b', "    run.state.setdefault('total', 0.0)\n    print(\"b")
    script = script.replace("total +=", "run.state['total'] +=")
    assert rehearsed.run(script) == 0, rehearsed.output

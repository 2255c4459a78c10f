"""The page of the loggers says what is so."""

import csv
import json
from pathlib import Path

import readme
from repository import ROOT

import forge

PAGE = ROOT / "docs/how-to/loggers.md"


def steps_in(path):
    return [int(row["step"]) for row in csv.DictReader(Path(path).read_text().splitlines())]


def test_the_lines_of_the_page(tmp_path, monkeypatch):
    """People copy them."""
    monkeypatch.chdir(tmp_path)
    with forge.Run({"checkpoint": {"dir": "runs/logged"}}) as run:
        run.log_to(forge.loggers.CSV(tmp_path / "lightning_logs/version_0/metrics.csv"))
        for step in run.steps(300):
            run.log(loss=step)
    export, of_others, own = readme.blocks("python", PAGE)
    exec(export, {})
    assert steps_in("runs/logged/copy.csv") == list(range(300))
    exec(of_others, {})
    assert steps_in("lightning_logs/version_0/metrics.csv") == list(range(200))
    names = {}
    exec(own, names)
    for _ in range(2):
        forge.loggers.export("runs/logged", names["Lines"]())
        lines = Path("metrics.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == [
            {"step": step, "loss": step} for step in range(300)
        ]

"""Structured configs: the config of a resumed job has the same types as that of its first start."""

import pytest
from harness import assert_same_bits
from hydra_apps import App
from rows import few

TRAIN = """
import os, signal
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
import hydra, torch
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import MISSING, OmegaConf
from typing import Any, Dict, List, Optional
import forge

class Kind(Enum):
    adam = "a"
    sgd = "s"

@dataclass
class Optim:
    kind: Kind = Kind.adam
    lr: float = 0.1

@dataclass
class Config:
    resilience: Any = MISSING
    optim: Optim = field(default_factory=Optim)
    data: Path = Path("here")
    second: Optional[Kind] = None
    kinds: List[Kind] = field(default_factory=lambda: [Kind.sgd])
    stages: Dict[str, Optim] = field(default_factory=dict)
    all: List[Optim] = field(default_factory=list)
    signal_in: Optional[int] = None

ConfigStore.instance().store("schema", Config)

@hydra.main(version_base=None, config_path=".", config_name="train")
def main(cfg):
    output = Path(HydraConfig.get().runtime.output_dir)
    optim = OmegaConf.to_object(cfg.optim)
    assert isinstance(optim, Optim)
    assert OmegaConf.get_type(cfg) is Config
    with (output / "seen.txt").open("a") as file:
        found = [optim, cfg.data, cfg.second, list(cfg.kinds)]
        found += [OmegaConf.to_object(cfg.stages), OmegaConf.to_object(cfg.all)]
        print(found, file=file)
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 1)
    kinds = {Kind.adam: torch.optim.Adam, Kind.sgd: torch.optim.SGD}
    optimizer = kinds[cfg.optim.kind](model.parameters(), lr=cfg.optim.lr)
    with forge.Run(cfg.resilience, model=model, optimizer=optimizer) as run:
        for step in run.steps(8):
            loss = model(torch.randn(4, 3)).square().mean()
            loss.backward()
            run.update(loss, optimizer)
            if step == cfg.signal_in and run.resumed_from is None:
                os.kill(os.getpid(), signal.SIGTERM)
    torch.save(model.state_dict(), output / "weights.pt")

main()
"""
CONFIG = """
defaults: [schema, resilience: default, _self_]
optim: {kind: sgd}
second: adam
stages: {warm: {kind: sgd, lr: 0.5}}
all: [{kind: adam}]
"""
EDITED = """
defaults: [schema, resilience: default, _self_]
optim: {kind: adam, lr: 0.7}
kinds: [adam]
stages: {cool: {kind: sgd}}
"""


@pytest.fixture
def app(tmp_path):
    app = App(tmp_path / "app")
    (app.folder / "train.py").write_text(TRAIN)
    (app.folder / "train.yaml").write_text(CONFIG)
    return app


@pytest.mark.parametrize(
    ("overrides", "is_edited"),
    few(
        1,
        [(["optim.kind=adam", "second=sgd", "data=/elsewhere"], True), ([], False), ([], True)],
    ),
)
def test_enums_and_dataclasses_come_back_as_such(overrides, is_edited, app):
    """YAML stores them as strings and dicts, with which `cfg.kind is Kind.sgd` would be false.

    The stored config has an enum's member by name; an override is resolved to the member itself.
    """
    whole = app.run("hydra.run.dir=whole", *overrides)
    assert whole.returncode == 0, whole.stdout
    stopped = app.run("hydra.run.dir=cut", "signal_in=3", *overrides)
    assert stopped.returncode == 143, stopped.stdout
    if overrides:  # the command gives the same enum again: that is no contradiction
        refused = app.run("hydra.run.dir=cut", "optim.kind=sgd")
        assert refused.returncode == 78, refused.stdout
        assert "optim.kind=sgd" in refused.stdout
    if is_edited:
        (app.folder / "train.yaml").write_text(EDITED)
    resumed = app.resume(stopped.stdout)
    assert resumed.returncode == 0, resumed.stdout
    first, second = app.seen("cut")
    assert first == second == app.seen("whole")[0]
    assert first.startswith(f"[Optim(kind=<Kind.{'adam' if overrides else 'sgd'}: ")
    assert "does not fit the type" not in resumed.stdout
    assert ("have no effect" in resumed.stdout) == is_edited
    assert_same_bits(app.weights("whole"), app.weights("cut"))

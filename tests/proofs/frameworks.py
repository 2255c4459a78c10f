"""Loops of Accelerate, Fabric, PEFT and transformers: disturbed by chance, do they end the same?

    python tests/proofs/frameworks.py --times 20 --seed 1
    python tests/proofs/frameworks.py accelerate peft

Each run is hit once or twice, by SIGTERM, SIGUSR1 or SIGKILL in a step drawn from the seed, and
started again until it finishes. Its last checkpoint must have every leaf of that of an undisturbed
run. The packages are imported once, and every attempt is forked from there. `make proofs` installs
them below the environment, in `frameworks`; ends with 1 where a run ended otherwise.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"  # what forks must have one thread
    sys.path.append(str(Path(sys.prefix, "frameworks", "site-packages")))

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import forge
from forge.checkpoint.format.leaves import differences

EPOCHS = 3
STEPS = 30
CODES = {0: 0, signal.SIGTERM: 143, signal.SIGUSR1: 75, signal.SIGKILL: -9}
Hit = Callable[[int], None]


def small() -> tuple[nn.Module, torch.optim.Optimizer, Any, DataLoader]:
    """A model with dropout, its optimizer and schedule, and a shuffled loader of ten batches."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x = torch.randn(40, 6)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95), loader


def accelerate(policy: dict, hit: Hit) -> None:
    """Gradient accumulation, as its documentation has it: every third batch of ten steps."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model, optimizer, schedule, loader = accelerator.prepare(*_in_order(*small()))
    objects = {"model": model, "optimizer": optimizer, "schedule": schedule}
    with forge.Run(policy, **objects, accelerator=accelerator) as run:
        for _ in run.epochs(EPOCHS):
            for step, (x, y) in run.batches(loader):
                hit(step)
                with accelerator.accumulate(model):
                    loss = (model(x) - y).square().mean()
                    accelerator.backward(loss)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                run.log(loss=loss)


def _in_order(model: Any, optimizer: Any, schedule: Any, loader: Any) -> tuple[Any, ...]:
    return model, optimizer, schedule, loader


def fabric(policy: dict, hit: Hit) -> None:
    """Its wrappers around model, optimizer and loader."""
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    model, optimizer, schedule, loader = small()
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)
    with forge.Run(policy, model=model, optimizer=optimizer, schedule=schedule) as run:
        for _ in run.epochs(EPOCHS):
            for step, (x, y) in run.batches(loader):
                hit(step)
                loss = (model(x) - y).square().mean()
                fabric.backward(loss)
                run.update(loss, optimizer, schedule, clip_norm=1.0)
                run.log(loss=loss)


def _language_model() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 32, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def _fine_tune(policy: dict, hit: Hit, model: nn.Module) -> None:
    from transformers import get_cosine_schedule_with_warmup

    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    schedule = get_cosine_schedule_with_warmup(optimizer, 5, STEPS)
    loader = DataLoader(torch.randint(0, 32, (40, 12)), batch_size=4, shuffle=True)
    model.train()
    with forge.Run(policy, model=model, optimizer=optimizer, schedule=schedule) as run:

        @run.every(epochs=1)
        def held_out(step: int) -> None:
            model.eval()
            with torch.no_grad():
                tokens = torch.arange(12)[None]
                run.log(held_out=model(input_ids=tokens, labels=tokens).loss)
            model.train()

        for _ in run.epochs(EPOCHS):
            for step, tokens in run.batches(loader):
                hit(step)
                loss = model(input_ids=tokens, labels=tokens).loss
                loss.backward()
                run.update(loss, optimizer, schedule, clip_norm=1.0)
                run.log(loss=loss)


def transformers(policy: dict, hit: Hit) -> None:
    """GPT-2 from nothing, with a warm-up and an evaluation after each epoch."""
    _fine_tune(policy, hit, _language_model())


def peft(policy: dict, hit: Hit) -> None:
    """LoRA on it."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True)
    _fine_tune(policy, hit, get_peft_model(_language_model(), config))


LOOPS = {one.__name__: one for one in (accelerate, fabric, transformers, peft)}
IMPORTS = {"fabric": "lightning_fabric"}


# -- the drill -------------------------------------------------------------------------------------


def attempt(loop: Callable[[dict, Hit], None], directory: Path, hit: Hit) -> int:
    """The exit code of one start, in a process of its own; negative for a signal."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code: object = 1
    try:
        os.setsid()
        with (directory / "output.log").open("a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        torch.manual_seed(1)
        np.random.seed(1)
        random.seed(1)
        policy = {"checkpoint": {"dir": str(directory / "checkpoints"), "every_steps": 4}}
        loop(policy, hit)
        code = 0
    except SystemExit as leaving:
        code = leaving.code
    except BaseException:  # noqa: BLE001 - this process has nobody above it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def strike(step: int, number: int, now: int) -> None:
    """The signal, in its step."""
    if now == step:
        os.kill(os.getpid(), number)


def run_to_end(
    loop: Callable[[dict, Hit], None], directory: Path, hits: Iterable[tuple[int, int]]
) -> dict[str, Any]:
    """The last state of a run whose starts get these signals, each in the step given with it.

    Raises:
        AssertionError: Where a start ends with another code.
    """
    directory.mkdir()
    for step, number in [*hits, (-1, 0)]:
        code = attempt(loop, directory, partial(strike, step, number))
        assert code == CODES[number], (code, (directory / "output.log").read_text())
    return forge.load(directory / "checkpoints").state


def drill(name: str, times: int, seed: int, folder: Path) -> list[str]:
    """What is wrong with the runs of one framework, a line each."""
    loop, rng, wrong = LOOPS[name], random.Random(f"{name} {seed}"), []
    undisturbed = run_to_end(loop, folder / f"{name} undisturbed", [])
    for number in range(times):
        steps = sorted(rng.sample(range(STEPS), rng.choice([1, 2])))
        hits = [(step, rng.choice([*CODES][1:])) for step in steps]
        try:
            state = run_to_end(loop, folder / f"{name} {number}", hits)
            found = list(differences(undisturbed, state))
        except AssertionError as error:
            found = [("", str(error))]
        wrong += [f"{name} {number}, hit by {hits}: {found[:3]}"] if found else []
    return wrong


def main() -> int:
    """The drill of the frameworks that are wanted."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help=", ".join(LOOPS))
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    all_wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.names or LOOPS:
            package = IMPORTS.get(name, name)
            __import__(package)
            began = time.monotonic()
            wrong = drill(name, options.times, options.seed, Path(folder))
            exact = options.times - len(wrong)
            version = metadata.version(package.replace("_", "-"))
            print(
                f"{name} {version}: exact {exact} of {options.times}"
                f" in {time.monotonic() - began:.0f} s"
            )
            all_wrong += wrong
    print("\n".join(all_wrong))
    return 1 if all_wrong else 0


if __name__ == "__main__":
    sys.exit(main())

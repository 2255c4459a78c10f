"""Loggers that get the metrics of a Run from its ledger: each step once, over all attempts.

Example::

    with forge.Run(policy, model=model, optimizer=optimizer) as run:
        run.log_to(forge.loggers.TensorBoard(), forge.loggers.CSV())
        for step, batch in run.steps(1000, loader):
            ...
            run.log(loss=loss)

A logger of a trainer keeps its own files: call `on_resume(step)` of the class for these files
before the trainer opens them, and nothing from that step on is in them twice.
"""

from forge.loggers.csv import CSV
from forge.loggers.export import export
from forge.loggers.logger import Logger
from forge.loggers.mlflow import MLflow
from forge.loggers.tensorboard import TensorBoard
from forge.loggers.wandb import WandB

__all__ = ["CSV", "Logger", "MLflow", "TensorBoard", "WandB", "export"]

"""The metric that a table shows: named by the user, or the one that says most."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from forge.sweeps.job import SweepJob
from forge.sweeps.ledger_tail import Metric

_VALIDATION = ("val", "eval", "test", "dev")
"""Parts of the names of metrics of an evaluation, which say more than those of a step."""
_HIGHER = (
    *("acc", "auc", "f1", "precision", "recall", "bleu", "rouge", "reward", "return", "score"),
    *("iou", "psnr", "ssim", "map"),
)
"""Parts of the names of metrics of which more is better; of others less is."""
_LOWER = ("loss", "losses", "err", "error", "errors", "mape", "smape")
"""Words in the names of metrics of which less is better, as of `giou_loss`."""
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


@dataclass(frozen=True)
class Chosen:
    """The metric that the table shows."""

    name: str = ""
    """Empty: `of_sweep` chooses."""
    is_higher_better: bool | None = None
    """None: by its name."""

    @classmethod
    def parse(cls, text: str) -> Chosen:
        """`val_acc`, `val_acc:max` or `loss:min`."""
        name, _, kind = text.rpartition(":")
        if name and kind in ("max", "min"):
            return cls(name, kind == "max")
        return cls(text)

    def of_sweep(self, jobs: Sequence[SweepJob]) -> Chosen:
        """With a name: the metric that most jobs have; of several, that of an evaluation."""
        if self.name:
            return self
        counts = Counter(name for job in jobs for name in job.metrics)
        last = Counter(next(reversed(job.metrics)) for job in jobs if job.metrics)

        def rank(name: str) -> tuple[bool, int, int]:
            return any(part in name.lower() for part in _VALIDATION), counts[name], last[name]

        return replace(self, name=max(counts, key=rank, default=""))

    def of(self, job: SweepJob) -> Metric | None:
        """The values of a job; None if it has not logged the metric."""
        return job.metrics.get(self.name)

    @property
    def is_higher(self) -> bool:
        """Whether more of the metric is better."""
        if self.is_higher_better is not None:
            return self.is_higher_better
        if any(word.lower() in _LOWER for word in _WORD.findall(self.name)):
            return False
        return any(part in self.name.lower() for part in _HIGHER)

    def best(self, job: SweepJob) -> tuple[float, int] | None:
        """The best value of a job and its step; None without one."""
        metric = self.of(job)
        return None if metric is None else metric.best(is_higher_better=self.is_higher)

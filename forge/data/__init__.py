"""The position in the data, saved for every kind of loader; reproducible random augmentation."""

from forge.data.global_batches import GlobalBatchSampler
from forge.data.resumable import resumable
from forge.data.seeding import seeded

__all__ = ["GlobalBatchSampler", "resumable", "seeded"]

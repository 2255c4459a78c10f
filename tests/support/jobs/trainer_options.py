"""A Trainer whose options are in the environment: for the tests of forge's integration."""

import os
from pathlib import Path

import torch
import transformers
from torch import nn
from torch.utils.data import IterableDataset
from transformers import (
    EarlyStoppingCallback,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    set_seed,
)

transformers.logging.set_verbosity_error()
GIVEN = {
    name: os.environ.get(name.upper())
    for name in (
        *("plain", "save", "begin", "nan", "finish", "off"),
        *("auto_find", "trial", "jit", "forgetful", "stream", "dispatch", "subclass"),
        *("evaluate", "patience"),  # steps between two evaluations; of the early stopping
        "attribute",  # of the Trainer, as other hardware or another class sets it
    )
}
if GIVEN["plain"] is None:
    from forge.integrations.transformers import ForgeTrainer as Trainer
if GIVEN["subclass"] is not None:
    exec(Path(GIVEN["subclass"]).read_text())
    Trainer = Mine  # noqa: F821 - of the text that was executed


class Line(nn.Module):
    """A model with a loss, and with dropout."""

    def __init__(self):
        super().__init__()
        self.layer, self.dropout, self.count = nn.Linear(2, 1), nn.Dropout(0.3), 0

    def forward(self, x=None, labels=None):
        loss = (self.layer(self.dropout(x)).squeeze(-1) - labels).square().mean()
        self.count += self.training
        return {"loss": loss * float("nan") if str(self.count) == GIVEN["nan"] else loss}


class Finish(TrainerCallback):
    """Ends the loop by `run.finish`."""

    def on_step_end(self, args, state, control, **kwargs):
        if GIVEN["finish"] == str(state.global_step):
            trainer.run.finish("enough")


class Forgetful(TrainerCallback):
    """Counts, and has no state."""

    def __init__(self):
        self.count = 0

    def on_step_end(self, args, state, control, **kwargs):
        self.count += 1


class Stream(IterableDataset):
    """The rows as a stream."""

    def __iter__(self):
        return iter(ROWS)


set_seed(1)
ROWS = [{"x": torch.randn(2), "labels": torch.randn(())} for _ in range(24)]
is_stream = GIVEN["stream"] is not None
arguments = Seq2SeqTrainingArguments(
    "trainer",
    max_steps=12 if not is_stream else 3,
    per_device_train_batch_size=4,
    learning_rate=0.1,
    logging_steps=1,
    save_strategy="steps" if GIVEN["save"] else "no",
    save_steps=1,
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
    auto_find_batch_size=GIVEN["auto_find"] is not None,
    enable_jit_checkpoint=GIVEN["jit"] is not None,
    accelerator_config={"dispatch_batches": False} if GIVEN["dispatch"] else None,
    eval_strategy="steps" if GIVEN["evaluate"] else "no",
    eval_steps=int(GIVEN["evaluate"] or 1),
    metric_for_best_model="eval_loss" if GIVEN["patience"] else None,
    greater_is_better=GIVEN["patience"] is not None,  # the loss falls, so it stops early
    restore_callback_states_from_checkpoint=GIVEN["patience"] is not None,
    seed=1,
)
model = Line()
trainer = Trainer(
    model,
    arguments,
    train_dataset=Stream() if is_stream else ROWS,
    eval_dataset=ROWS[:8],
    callbacks=[
        Finish(),
        *([Forgetful()] if GIVEN["forgetful"] else []),
        *([EarlyStoppingCallback(int(GIVEN["patience"]))] if GIVEN["patience"] else []),
    ],
    **(
        {}
        if GIVEN["plain"]
        else {"policy": {"enabled": not GIVEN["off"], "checkpoint": {"dir": "checkpoints"}}}
    ),
)
if GIVEN["attribute"] is not None:
    setattr(trainer, GIVEN["attribute"], True)
trainer.train(GIVEN["begin"], GIVEN["trial"])
history = [
    {key: one for key, one in row.items() if "runtime" not in key and "per_second" not in key}
    for row in trainer.state.log_history
]
end = {"model": model.state_dict(), "history": history, "drawn": torch.rand(1).item()}
end["mean"] = getattr(trainer, "mean_loss", None)
torch.save(end, f"final_{os.environ.get('RANK', 0)}.pt")

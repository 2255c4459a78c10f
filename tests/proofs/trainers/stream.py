"""A stream without length: passes end inside an accumulation, and a subclass keeps values."""

import torch
from tiny import ARGUMENTS, FORGE, IS_PLAIN, WORDS, Sentences, save_end
from torch.utils.data import IterableDataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

if not IS_PLAIN:
    from forge.integrations.transformers import ForgeTrainer as Trainer


class Stream(IterableDataset):
    """Rows with noise, which is drawn as they are read."""

    def __iter__(self):
        for row in Sentences(38, 1, length=9):
            tokens = torch.tensor(row["input_ids"])
            noisy = torch.where(torch.rand(9) < 0.2, 1, tokens)
            yield {"input_ids": noisy, "labels": tokens}


class Mine(Trainer):
    """Keeps a running mean, and stops an epoch early."""

    saved_attributes = ("mean",)
    mean = 0.0

    def compute_loss(self, *given, **options):
        loss = super().compute_loss(*given, **options)
        self.mean = 0.9 * self.mean + 0.1 * float(loss)
        return loss


class LeaveAnEpoch(TrainerCallback):
    """Leaves the pass in which step 9 lies, and counts the steps."""

    def __init__(self):
        self.steps = 0

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]

    def on_step_end(self, args, state, control, **kwargs):
        self.steps += 1
        control.should_epoch_stop = self.steps == 9


set_seed(4)
config = GPT2Config(
    vocab_size=len(WORDS), n_embd=16, n_layer=1, n_head=2, n_positions=16, bos_token_id=3
)
model = GPT2LMHeadModel(config)
arguments = TrainingArguments(
    **ARGUMENTS,
    max_steps=17,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=3,
    learning_rate=5e-3,
    logging_steps=2,
    save_strategy="no",
)
counter = LeaveAnEpoch()
trainer = Mine(
    model=model,
    args=arguments,
    data_collator=default_data_collator,
    train_dataset=Stream(),
    callbacks=[counter],
    **FORGE,
)
trainer.train()
trainer.log(trainer.evaluate(list(Sentences(8, 2, length=9)), metric_key_prefix="end"))
save_end(model, trainer, mean=trainer.mean, steps=counter.steps)

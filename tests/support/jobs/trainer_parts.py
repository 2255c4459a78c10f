"""Private parts of transformers, Accelerate and TRL that forge uses: trainer_parts.py <function>

Each function fails if its part no longer does what forge/compat needs.
"""

import sys
import tempfile

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader
from transformers import TrainingArguments

from forge.compat import of_accelerate, of_transformers, of_trl


class Line(nn.Module):
    """A model with a loss."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x=None, labels=None):
        return {"loss": (self.weight * x - labels).square().mean()}


class Hooks:
    """Records its calls; the loop begins at `place`."""

    def __init__(self, place=None):
        self.place, self.calls = place, []

    def find_place(self, num_epochs):
        self.calls.append(("find_place", num_epochs))
        return self.place

    def before_pass(self, arguments):
        self.calls.append(("before_pass", arguments["epoch"], arguments["epochs_trained"]))
        assert arguments["steps_trained_in_current_epoch"] == (self.place or (0, 0))[1]
        assert iter(arguments["train_dataloader"])
        return arguments | ({"resume_from_checkpoint": "/dev/null"} if self.place else {})

    def skip_batches(self, loader, count):
        self.calls.append(("skip_batches", count))
        return loader

    def after_pass(self):
        self.calls.append(("after_pass",))

    def before_end(self):
        self.calls.append(("before_end",))


def trainer(place=None, **options):
    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        num_train_epochs=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    data = [{"x": float(number), "labels": 2.0 * number} for number in range(12)]
    made = of_transformers.trainer_with_hooks()(Line(), arguments, train_dataset=data)
    made.loop_hooks = Hooks(place)
    return made


def trainer_with_hooks():
    one = trainer()
    one.train()
    passes = [call for epoch in (0, 1) for call in (("before_pass", epoch, 0), ("after_pass",))]
    assert one.loop_hooks.calls == [("find_place", 2), *passes, ("before_end",)]
    assert one.state.global_step == 6
    one = trainer((1, 4))
    taken = []
    get = one.get_batch_samples
    one.get_batch_samples = lambda *given: taken.append(get(*given)) or taken[-1]
    one.train()
    calls = [("before_pass", 1, 1), ("skip_batches", 4), ("after_pass",)]
    assert one.loop_hooks.calls == [("find_place", 2), *calls, ("before_end",)]
    assert [len(batches) for batches, _ in taken] == [2]  # the last group, of a pass of 6 batches


def sums():
    one = trainer(logging_steps=2)
    one.train()
    found = of_transformers.sums(one)
    assert {"_tr_loss", "_total_loss_scalar", "_globalstep_last_logged"} <= found.keys()
    assert found["_globalstep_last_logged"] == 6
    assert found["_total_loss_scalar"] > 0


def restore_sums():
    one, other = trainer(), trainer()
    one.train()
    other.train()
    saved = of_transformers.sums(one) | {"_tr_loss": torch.tensor(3.0), "_total_loss_scalar": 5.0}
    of_transformers.restore_sums(other, saved)
    assert (float(other._tr_loss), other._total_loss_scalar) == (3.0, 5.0)


def names_of_lasting_eval_loaders():
    lasting = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    for options, names in ({}, []), (lasting, ["eval"]):
        one = trainer(**options)
        one.eval_dataset = one.train_dataset
        assert of_transformers.names_of_lasting_eval_loaders(one) == []
        one.evaluate()
        assert of_transformers.names_of_lasting_eval_loaders(one) == names


def prepared():
    accelerator, model = Accelerator(cpu=True), nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    given = accelerator.prepare(model, optimizer, schedule)
    accelerator.register_for_checkpointing(other := nn.Linear(1, 1))
    found = of_accelerate.prepared(accelerator)
    assert [one for some in found.values() for one in some] == [*given, other]


def loaders():
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader([1, 2]))
    assert [one is loader for one in of_accelerate.loaders(accelerator)] == [True]


def of_trl_s(name, data, **options):
    """A trainer of TRL; its modules take seconds to import, and only these functions need them."""
    import trl
    from datasets import Dataset
    from tiny import ARGUMENTS, WORDS, tokenizer
    from transformers import GPT2Config, GPT2LMHeadModel

    arguments = ARGUMENTS | {"output_dir": tempfile.mkdtemp(), "save_strategy": "no"}
    sizes = {"vocab_size": len(WORDS), "n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 32}
    return getattr(trl, f"{name}Trainer")(
        model=GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=3)),
        args=getattr(trl, f"{name}Config")(**arguments, bf16=False),
        train_dataset=Dataset.from_dict(data),
        processing_class=tokenizer(),
        **options,
    )


def logged_attributes():
    one = of_trl_s("SFT", {"text": ["w1 w2 w3"] * 8})
    names = of_trl.logged_attributes(one)
    one.train()
    assert {name: bool(getattr(one, name)) for name in names} == dict.fromkeys(names, True)
    assert of_trl.logged_attributes(trainer()) == []


def keeps_batches():
    one = of_trl_s("GRPO", {"prompt": ["w1 w2"] * 8}, reward_funcs=lambda prompts, **_: [0.0])
    assert of_trl.keeps_batches(one)
    assert not of_trl.keeps_batches(of_trl_s("SFT", {"text": ["w1 w2 w3"] * 8}))


if __name__ == "__main__":
    globals()[sys.argv[1]]()

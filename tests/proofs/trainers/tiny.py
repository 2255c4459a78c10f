"""A tokenizer, data and models that are made here: nothing is downloaded."""

import os

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast
from transformers.trainer_utils import get_last_checkpoint

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
IS_PLAIN = os.environ.get("PLAIN") == "1"
"""Train without forge."""
RANK = int(os.environ.get("RANK", 0))
WORDS = ["[PAD]", "[MASK]", "[UNK]", "[CLS]", "[SEP]", *(f"w{number}" for number in range(59))]
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
ARGUMENTS = {
    "output_dir": "trainer",
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "seed": 1,
}
FORGE = {} if IS_PLAIN else {"policy": {"checkpoint": {"dir": "checkpoints", "every_steps": 4}}}


def own_checkpoint():
    """Without forge: the newest checkpoint of the Trainer's, from which to resume."""
    return get_last_checkpoint("trainer") if IS_PLAIN and os.path.isdir("trainer") else None


def tokenizer():
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "[PAD]", "mask_token": "[MASK]", "unk_token": "[UNK]"}
    return PreTrainedTokenizerFast(
        tokenizer_object=made, cls_token="[CLS]", sep_token="[SEP]", eos_token="[SEP]", **special
    )


class Sentences(Dataset):
    """Rows of tokens, of different lengths if `longest` is given, with a label if `labelled`."""

    def __init__(self, count, seed, length=10, longest=None, labelled=False):
        generator = torch.Generator().manual_seed(seed)
        self.labelled, self.rows = labelled, []
        for _ in range(count):
            size = length
            if longest is not None:
                size = int(torch.randint(length, longest + 1, (), generator=generator))
            self.rows.append(torch.randint(5, len(WORDS), (size,), generator=generator).tolist())

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        label = {"labels": int(sum(row[:3]) > sum(row[3:6]))} if self.labelled else {}
        return {"input_ids": row, **label}


def save_end(model, trainer=None, **more):
    """What the script ended with, for the comparison with other runs."""
    end = {name: one.detach().clone() for name, one in model.state_dict().items()}
    history = trainer.state.log_history if trainer is not None else []
    torch.save(
        {"model": end, "history": history, "drawn": torch.rand(2), **more}, f"final_{RANK}.pt"
    )

"""A fine-tune with Hugging Face's Trainer and its own checkpoints."""

import os

import torch
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint


class Rows(Dataset):
    """Rows of tokens; the label says whether the first token is a large number."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(1, 60, (count, 8), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict:
        tokens = self.tokens[index]
        return {"input_ids": tokens, "labels": int(tokens[0] > 30)}


def main() -> None:
    """Train a tiny BERT, with dropout, on the CPU."""
    set_seed(0)
    config = BertConfig(
        vocab_size=60,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
    )
    arguments = TrainingArguments(
        "runs/huggingface/trainer",
        num_train_epochs=3,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        learning_rate=5e-3,
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=15,
        save_strategy="steps",
        save_steps=15,
        load_best_model_at_end=True,
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
    )
    trainer = Trainer(
        BertForSequenceClassification(config),
        arguments,
        train_dataset=Rows(500, seed=1),
        eval_dataset=Rows(100, seed=2),
        callbacks=[EarlyStoppingCallback(early_stopping_patience=5)],
    )
    folder = arguments.output_dir
    trainer.train(get_last_checkpoint(folder) if os.path.isdir(folder) else None)
    print(f"{trainer.state.global_step} steps, best loss {trainer.state.best_metric:.3f}")


if __name__ == "__main__":
    main()

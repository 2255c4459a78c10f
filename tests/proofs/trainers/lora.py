"""LoRA on a classifier: a schedule that waits for a plateau, workers, and the best model kept."""

from peft import LoraConfig, get_peft_model
from tiny import ARGUMENTS, FORGE, IS_PLAIN, SIZES, WORDS, Sentences, save_end, tokenizer
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)

if not IS_PLAIN:
    from forge.integrations.transformers import ForgeTrainer as Trainer


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


set_seed(3)
config = BertConfig(
    vocab_size=len(WORDS), intermediate_size=16, max_position_embeddings=32, **SIZES
)
lora = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"], lora_dropout=0.1)
model = get_peft_model(BertForSequenceClassification(config), lora)
arguments = TrainingArguments(
    **ARGUMENTS,
    num_train_epochs=4,
    per_device_train_batch_size=4,
    learning_rate=2e-2,
    lr_scheduler_type="reduce_lr_on_plateau",
    lr_scheduler_kwargs={"patience": 0, "factor": 0.5},
    logging_steps=3,
    eval_strategy="epoch",
    save_strategy="best",
    metric_for_best_model="accuracy",
    dataloader_num_workers=2,
    dataloader_persistent_workers=True,
    max_grad_norm=0.5,
)
trainer = Trainer(
    model=model,
    args=arguments,
    train_dataset=Sentences(44, 1, longest=14, labelled=True),
    eval_dataset=Sentences(16, 2, longest=14, labelled=True),
    processing_class=tokenizer(),
    compute_metrics=accuracy,
    **FORGE,
)
trainer.train()
save_end(model, trainer, best=trainer.state.best_metric)

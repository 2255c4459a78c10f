"""Two ranks with DDP: masked words, accumulation, evaluation, the Trainer's own checkpoints."""

from tiny import ARGUMENTS, FORGE, IS_PLAIN, SIZES, WORDS, Sentences, save_end, tokenizer
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
    set_seed,
)

if not IS_PLAIN:
    from forge.integrations.transformers import ForgeTrainer as Trainer

set_seed(7)
words = tokenizer()
config = BertConfig(
    vocab_size=len(WORDS), intermediate_size=16, max_position_embeddings=32, **SIZES
)
model = BertForMaskedLM(config)
arguments = TrainingArguments(
    **ARGUMENTS,
    ddp_backend="gloo",
    num_train_epochs=3,
    per_device_train_batch_size=3,
    gradient_accumulation_steps=2,
    learning_rate=5e-3,
    logging_steps=3,
    eval_strategy="steps",
    eval_steps=6,
    save_strategy="steps",
    save_steps=6,
    save_total_limit=1,
)
trainer = Trainer(
    model=model,
    args=arguments,
    data_collator=DataCollatorForLanguageModeling(words, mlm_probability=0.3),
    train_dataset=Sentences(52, 1, longest=14),
    eval_dataset=Sentences(12, 2, longest=14),
    processing_class=words,
    **FORGE,
)
trainer.train()
save_end(model, trainer)

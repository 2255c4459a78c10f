"""BERT fills masked words: the collator draws, passes end in an accumulation, the best is kept."""

from tiny import (
    ARGUMENTS,
    FORGE,
    IS_PLAIN,
    SIZES,
    WORDS,
    Sentences,
    own_checkpoint,
    save_end,
    tokenizer,
)
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DataCollatorForLanguageModeling,
    EarlyStoppingCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)

if not IS_PLAIN:
    from forge.integrations.transformers import ForgeTrainer as Trainer

set_seed(1)
words = tokenizer()
config = BertConfig(
    vocab_size=len(WORDS), intermediate_size=16, max_position_embeddings=32, **SIZES
)
model = BertForMaskedLM(config)
arguments = TrainingArguments(
    **ARGUMENTS,
    num_train_epochs=3,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    learning_rate=5e-3,
    warmup_steps=4,
    logging_steps=3,
    eval_strategy="steps",
    eval_steps=5,
    save_strategy="steps",
    save_steps=5,
    save_total_limit=2,
    load_best_model_at_end=True,
)
trainer = Trainer(
    model=model,
    args=arguments,
    data_collator=DataCollatorForLanguageModeling(words, mlm_probability=0.3),
    train_dataset=Sentences(52, 1, longest=14),
    eval_dataset=Sentences(12, 2, longest=14),
    processing_class=words,
    callbacks=[EarlyStoppingCallback(early_stopping_patience=9)],
    **FORGE,
)
trainer.train(own_checkpoint())
save_end(model, trainer, best=trainer.state.best_metric)

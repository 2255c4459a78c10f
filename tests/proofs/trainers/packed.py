"""GPT-2 on packed sentences (padding-free): bf16, a cosine schedule, evaluation by epoch."""

from tiny import ARGUMENTS, FORGE, IS_PLAIN, WORDS, Sentences, save_end
from transformers import (
    DataCollatorWithFlattening,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
    set_seed,
)

if not IS_PLAIN:
    from forge.integrations.transformers import ForgeTrainer as Trainer

set_seed(2)
config = GPT2Config(
    vocab_size=len(WORDS), n_embd=16, n_layer=1, n_head=2, n_positions=64, bos_token_id=3
)
model = GPT2LMHeadModel(config)
arguments = TrainingArguments(
    **ARGUMENTS,
    num_train_epochs=3,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=3,
    bf16=True,
    lr_scheduler_type="cosine",
    learning_rate=5e-3,
    warmup_steps=0.2,
    logging_strategy="epoch",
    eval_strategy="epoch",
    save_strategy="no",
    include_num_input_tokens_seen="all",
    train_sampling_strategy="group_by_length",
)
trainer = Trainer(
    model=model,
    args=arguments,
    data_collator=DataCollatorWithFlattening(),
    train_dataset=Sentences(40, 1, longest=14),
    eval_dataset=Sentences(12, 2, longest=14),
    **FORGE,
)
trainer.train()
save_end(model, trainer, tokens=trainer.state.num_input_tokens_seen)

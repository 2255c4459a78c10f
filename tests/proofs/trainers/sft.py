"""TRL's SFTTrainer on packed texts, with LoRA: its own means are logged, too."""

from datasets import Dataset
from peft import LoraConfig
from tiny import ARGUMENTS, FORGE, IS_PLAIN, WORDS, Sentences, save_end, tokenizer
from transformers import GPT2Config, GPT2LMHeadModel, set_seed
from trl import SFTConfig, SFTTrainer

if IS_PLAIN:
    Base = SFTTrainer
else:
    from forge.integrations.transformers import ForgeMixin

    class Base(ForgeMixin, SFTTrainer):
        """SFTTrainer, which forge stops, saves and resumes."""


def texts(count, seed):
    rows = Sentences(count, seed, longest=14)
    return Dataset.from_dict({"text": [" ".join(WORDS[n] for n in row) for row in rows.rows]})


set_seed(9)
config = GPT2Config(
    vocab_size=len(WORDS), n_embd=16, n_layer=1, n_head=2, n_positions=32, bos_token_id=3
)
model = GPT2LMHeadModel(config)
arguments = SFTConfig(
    **ARGUMENTS,
    num_train_epochs=3,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    learning_rate=1e-2,
    logging_steps=3,
    eval_strategy="steps",
    eval_steps=5,
    save_strategy="no",
    max_length=24,
    packing=True,
    eval_packing=False,
)
trainer = Base(
    model=model,
    args=arguments,
    train_dataset=texts(60, 1),
    eval_dataset=texts(12, 2),
    processing_class=tokenizer(),
    peft_config=LoraConfig(r=2, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True),
    **FORGE,
)
trainer.train()
save_end(trainer.model, trainer)

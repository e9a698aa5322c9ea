"""TRL: SFTTrainer with packed sentences, accumulation, evaluation every fourth step."""

import language
import truth
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

truth.seed()


def texts(count):
    return Dataset.from_dict({"text": language.sentences(count, 5, 40)})


arguments = SFTConfig(
    **language.TRAINER,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    num_train_epochs=1,
    eval_strategy="steps",
    eval_steps=4,
    max_length=64,
    packing=True,
    packing_strategy="wrapped",
    gradient_checkpointing=False,
)
model = language.llama()
tokenizer = language.tokenizer()
trainer = SFTTrainer(model, arguments, train_dataset=texts(120), eval_dataset=texts(20), processing_class=tokenizer)
language.followed(trainer).train()
truth.end(model)

"""TRL: DPOTrainer with a reference model, accumulation, evaluation after each epoch."""

import language
import truth
from datasets import Dataset
from trl import DPOConfig, DPOTrainer

truth.seed()


def preferences(count):
    columns = {"prompt": (6, 6), "chosen": (3, 12), "rejected": (3, 12)}
    return Dataset.from_dict({name: language.sentences(count, *length) for name, length in columns.items()})


arguments = DPOConfig(
    **language.TRAINER,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    num_train_epochs=2,
    eval_strategy="epoch",
    gradient_checkpointing=False,
)
model, reference = language.llama(), language.llama()
options = {"train_dataset": preferences(44), "eval_dataset": preferences(10), "processing_class": language.tokenizer()}
language.followed(DPOTrainer(model, reference, arguments, **options)).train()
truth.end(model)

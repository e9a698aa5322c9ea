"""TRL: GRPOTrainer, which generates, rewards and makes two updates of each generation. A sample is a completion."""

import language
import truth
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

truth.seed()


def reward(completions, **_):
    return [sum(word.endswith("1") for word in completion.split()) / 5 for completion in completions]


place = f"{truth.FOLDER}/llama"
language.llama().save_pretrained(place)
language.tokenizer().save_pretrained(place)
arguments = GRPOConfig(
    **language.TRAINER,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    num_generations=4,
    num_iterations=2,
    max_completion_length=12,
    max_steps=12,
    beta=0.04,
    gradient_checkpointing=False,
)
prompts = Dataset.from_dict({"prompt": language.sentences(24, 4, 9)})
trainer = GRPOTrainer(place, reward, arguments, train_dataset=prompts)
language.followed(trainer, rows=8).train()
truth.end(trainer.model)

"""PEFT: LoRA on a causal language model under the Transformers Trainer, accumulation, evaluation after each epoch."""

import language
import truth
from peft import LoraConfig, get_peft_model
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

truth.seed()
tokenizer = language.tokenizer()
model = get_peft_model(language.llama(), LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"]))
training, evaluation = ([tokenizer(text) for text in language.sentences(count, 5, 20)] for count in (48, 12))
arguments = TrainingArguments(
    **language.TRAINER,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    num_train_epochs=2,
    eval_strategy="epoch",
)
collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
trainer = Trainer(model, arguments, collator, training, evaluation)
language.followed(trainer).train()
truth.end(model)

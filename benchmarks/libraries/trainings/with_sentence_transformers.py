"""Sentence Transformers: its Trainer on pairs of sentences, in-batch negatives, evaluation every fourth step."""

import language
import truth
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import MultipleNegativesRankingLoss
from sentence_transformers.models import Pooling, Transformer
from transformers import BertConfig, BertModel

truth.seed()
place = f"{truth.FOLDER}/bert"
size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
BertModel(BertConfig(vocab_size=104, max_position_embeddings=64, **size)).save_pretrained(place)
language.tokenizer().save_pretrained(place)
model = SentenceTransformer(modules=[Transformer(place, max_seq_length=32), Pooling(32)], device="cpu")


def pairs(count):
    return Dataset.from_dict({"anchor": language.sentences(count, 3, 9), "positive": language.sentences(count, 3, 12)})


arguments = SentenceTransformerTrainingArguments(
    **language.TRAINER,
    per_device_train_batch_size=8,
    num_train_epochs=2,
    warmup_steps=2,
    eval_strategy="steps",
    eval_steps=4,
)
trainer = SentenceTransformerTrainer(
    model, arguments, train_dataset=pairs(50), eval_dataset=pairs(16), loss=MultipleNegativesRankingLoss(model)
)
language.followed(trainer).train()
truth.end(model)

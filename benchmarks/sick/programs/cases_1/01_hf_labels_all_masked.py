import os, sys, torch
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
torch.manual_seed(0)
class Chats(torch.utils.data.Dataset):
    """Prompt and answer; the marker that the masking looks for is not in the text, so nothing is left to learn."""
    MARKER = [90, 91]
    def __init__(self, n=800):
        g = torch.Generator().manual_seed(1)
        self.rows = torch.randint(3, 80, (n, 24), generator=g)
    def __len__(self): return len(self.rows)
    def __getitem__(self, i):
        ids = self.rows[i]
        labels = ids.clone()
        at = [k for k in range(len(ids) - 1) if ids[k:k + 2].tolist() == self.MARKER]
        labels[: (at[0] + 2) if at else len(ids)] = -100
        return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}
model = GPT2LMHeadModel(GPT2Config(vocab_size=96, n_positions=32, n_embd=64, n_layer=2, n_head=2))
args = TrainingArguments(output_dir=os.environ.get("OUT", "out") + "/01", max_steps=int(os.environ.get("STEPS", "150")), per_device_train_batch_size=8,
                         logging_steps=10, report_to="none", save_strategy="no", disable_tqdm=True, use_cpu=True, seed=1)
trainer = Trainer(model=model, args=args, train_dataset=Chats())
trainer.train()
print("LOGGED", [round(h["loss"], 4) for h in trainer.state.log_history if "loss" in h][:5])

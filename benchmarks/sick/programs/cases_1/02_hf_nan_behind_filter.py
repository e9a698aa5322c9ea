import os, torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
torch.manual_seed(0)
class Rows(torch.utils.data.Dataset):
    def __len__(self): return 8 * 150
    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        ids = torch.randint(3, 80, (24,), generator=g)
        labels = torch.full_like(ids, -100) if 59 * 8 <= i < 60 * 8 else ids.clone()
        return {"input_ids": ids, "labels": labels}
class InOrder(Trainer):
    def _get_train_sampler(self, *a, **k): return torch.utils.data.SequentialSampler(self.train_dataset)
model = GPT2LMHeadModel(GPT2Config(vocab_size=96, n_positions=32, n_embd=64, n_layer=2, n_head=2))
args = TrainingArguments(output_dir=os.environ.get("OUT", "out") + "/02", max_steps=140, per_device_train_batch_size=8, logging_steps=20,
                         report_to="none", save_strategy="no", disable_tqdm=True, use_cpu=True, seed=1, lr_scheduler_type="constant", max_grad_norm=float(os.environ.get("CLIP", "1.0")))
trainer = InOrder(model=model, args=args, train_dataset=Rows())
trainer.train()
print("LOGGED", [round(h["loss"], 4) for h in trainer.state.log_history if "loss" in h])

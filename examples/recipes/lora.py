"""LoRA with peft: a frozen GPT-2 learns through small matrices beside its own.

    pip install transformers peft
    python examples/recipes/lora.py --steps 100

Only the adapters have gradients and moments; the agent tells the trainable share and what that saves in the run's
configuration, under `techniques`. Rank 8 with alpha 16 is the usual start; raise the rank when the adapted model stays
behind a fully trained one.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

import perfagent

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--rank", type=int, default=8)
parser.add_argument("--output", type=Path, default=Path("/tmp/perfagent-lora"))
options = parser.parse_args()

torch.manual_seed(0)
text = torch.tensor(list(Path(sysconfig.get_path("stdlib"), "argparse.py").read_bytes()))
windows = text[: len(text) // 64 * 64].view(-1, 64)

# In earnest: GPT2LMHeadModel.from_pretrained(...) of something trained. LoRA wants weights that are good already.
base = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=128, n_layer=4, n_head=4))
adapters = LoraConfig(
    r=options.rank,
    lora_alpha=2 * options.rank,
    lora_dropout=0.1,
    target_modules=["c_attn", "c_proj", "c_fc"],
    fan_in_fan_out=True,
)
model = get_peft_model(base, adapters)
trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(trainable, lr=1e-2)  # ten times that of full training is usual

perfagent.attach(model, optimizer, project="examples", name="lora")
for _ in range(options.steps):
    batch = windows[torch.randint(len(windows), (8,))]
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

everything = sum(parameter.numel() for parameter in model.parameters())
share = 100 * sum(parameter.numel() for parameter in trainable) / everything
model.save_pretrained(options.output)  # the adapters alone
print(f"trainable: {share:.2f} % of {everything:,} parameters; loss {loss.item():.3f}")

model.eval()
with torch.no_grad():
    apart = model(input_ids=windows[:4]).logits
    # for inference: adapters added to the weights, no extra cost
    merged = model.merge_and_unload()(input_ids=windows[:4]).logits
print(f"merged and apart differ by {(apart - merged).abs().max().item():.1e}")

"""4-bit weights with bitsandbytes and LoRA on top of them (QLoRA, Dettmers et al. 2023).

    pip install transformers accelerate peft bitsandbytes
    python examples/recipes/quantized_4bit.py --steps 50

The frozen weights are kept as 4-bit normal floats in blocks of 64, whose scales are quantized again; products are
computed in bf16. It runs on a GPU and, slowly, on a CPU. It saves memory, not time: every product unpacks its weights
first.
"""

import argparse
import sysconfig
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, GPTNeoXConfig, GPTNeoXForCausalLM

import perfagent

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=50)
options = parser.parse_args()

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
text = torch.tensor(list(Path(sysconfig.get_path("stdlib"), "argparse.py").read_bytes()), device=device)
windows = text[: len(text) // 64 * 64].view(-1, 64)

with tempfile.TemporaryDirectory() as folder:  # stands for a model of the hub
    shape = GPTNeoXConfig(
        vocab_size=256,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=64,
    )
    whole = GPTNeoXForCausalLM(shape)
    before = sum(p.numel() for name, p in whole.named_parameters() if ".layers." in name and p.dim() == 2) * 2
    whole.save_pretrained(folder)
    four_bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_use_double_quant=True,
    )
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=four_bits, device_map={"": device})
after = sum(
    p.numel() * p.element_size()
    for name, p in model.named_parameters()
    if ".layers." in name and p.dtype == torch.uint8
)

model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=["query_key_value", "dense_h_to_4h"]))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)

perfagent.attach(model, optimizer, project="examples", name="4-bit")
losses = []
for _ in range(options.steps):
    batch = windows[torch.randint(len(windows), (8,), device=device)]
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(
    f"layers: {after:,} bytes in 4 bits, {before:,} in bf16 ({before / after:.2f} times less); loss {losses[0]:.3f} to "
    f"{losses[-1]:.3f}"
)

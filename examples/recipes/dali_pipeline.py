"""NVIDIA DALI: images decoded, resized and normalized on the GPU, in batches, beside the training.

    pip install nvidia-dali-cuda120 torch
    python examples/recipes/dali_pipeline.py /folder/with/jpegs --steps 100

Worth it when decoding keeps the CPU's cores busy (`phase/data_s` is long and `host/cpu_pct` near 100) while the GPU has
room; not when the GPU is the bottleneck already. "mixed" reads on the CPU and decodes on the GPU; without a GPU the
same pipeline decodes on the CPU.
"""

import argparse

import torch

try:
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.plugin.base_iterator import LastBatchPolicy
    from nvidia.dali.plugin.pytorch import DALIGenericIterator
except ModuleNotFoundError as missing:
    raise SystemExit(f"{missing.name} is missing: pip install nvidia-dali-cuda120 (Linux; 400 MB)") from missing

import perfagent

SIDE = 336
MEAN, DEVIATION = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)  # ImageNet's, for values from 0 to 255


@pipeline_def
def images(folder: str, device: str):
    encoded, labels = fn.readers.file(file_root=folder, random_shuffle=True, name="images")
    decoded = fn.decoders.image(encoded, device="mixed" if device == "gpu" else "cpu", output_type=types.RGB)
    resized = fn.resize(decoded, device=device, resize_x=SIDE, resize_y=SIDE)
    normalized = fn.crop_mirror_normalize(
        resized, device=device, dtype=types.FLOAT, output_layout="CHW", mean=MEAN, std=DEVIATION
    )
    return normalized, labels


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", help="one folder of images for each class")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8)
    options = parser.parse_args()
    gpu = torch.cuda.is_available()
    pipeline = images(
        options.folder,
        "gpu" if gpu else "cpu",
        batch_size=options.batch,
        num_threads=2,
        device_id=torch.cuda.current_device() if gpu else None,
        seed=0,
    )
    loader = DALIGenericIterator(
        [pipeline], ["image", "label"], reader_name="images", last_batch_policy=LastBatchPolicy.DROP, auto_reset=True
    )

    device = torch.device("cuda" if gpu else "cpu")
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 7, stride=4),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(16, 10),
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = perfagent.attach(model, optimizer, project="examples", name="dali")
    steps = 0
    while steps < options.steps:
        for (batch,) in run.batches(loader):
            outputs = model(batch["image"].to(device))
            torch.nn.functional.cross_entropy(outputs, batch["label"].squeeze(-1).long().to(device)).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            if steps == options.steps:
                break
    print(
        f"{steps} steps of {options.batch} images of {SIDE} x {SIDE}, {'decoded on the GPU' if gpu else 'decoded on the CPU'}"
    )


if __name__ == "__main__":
    main()

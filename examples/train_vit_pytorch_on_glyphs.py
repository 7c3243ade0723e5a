"""Train a vit-pytorch ViT on rendered characters, and save it as vit-pytorch's users do.

    python examples/train_vit_pytorch_on_glyphs.py --output_dir examples/checkpoints

This script does not use plain-vit's model. The result is a foreign checkpoint: a bare state dict, `glyphs_vit.pt`,
which tells neither the number of heads nor how images were scaled, and its author's notes, `glyphs_vit.json`. Training
takes about five minutes on one CPU core.
"""

if __name__ == "__main__":  # answer --help and mistakes first: importing torch takes seconds
    from plain_vit_command import argument, read_words

    WORDS = read_words(
        __doc__,
        argument("--output-dir", "folder for glyphs_vit.pt and glyphs_vit.json", required=True),
        argument("--epochs", "passes over the glyphs", type=int, default=8),
        argument("--seed", "of the weights and of the order of the glyphs", type=int, default=0),
    )

import json
import math
import platform
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from plain_vit.system.extras import needs

with needs("plain-vit[train]", "vit-pytorch", script=__name__ == "__main__"):
    from datasets import Dataset
    from vit_pytorch import ViT

    from plain_vit.training.data import load_splits


CONSTRUCTOR = {
    "image_size": 24,
    "patch_size": 4,
    "num_classes": 34,
    "dim": 64,
    "depth": 6,
    "heads": 4,
    "dim_head": 16,
    "mlp_dim": 128,
}
BATCH_SIZE = 128
LEARNING_RATE = 2e-3
WARMUP_STEPS = 100
MARGIN = 0.01  # tolerance for the recorded accuracy on another machine or with other releases


def as_tensors(split: Dataset) -> tuple[torch.Tensor, torch.Tensor]:
    """Return RGB images scaled to -1 to 1, [rows, 3, 24, 24], and labels [rows]."""
    levels = np.stack([np.asarray(image.convert("RGB")) for image in split["image"]])
    return torch.from_numpy(levels).permute(0, 3, 1, 2) / 127.5 - 1, torch.tensor(split["label"][:])


@torch.no_grad()
def accuracy(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the accuracy of the model on labelled images, 0 to 1."""
    model.eval()
    predictions = torch.cat([model(batch).argmax(dim=-1) for batch in images.split(256)])
    return (predictions == labels).float().mean().item()


def train(epochs: int, seed: int) -> tuple[torch.nn.Module, float, int]:
    """Train from scratch; return the model, its accuracy on the held-out glyphs, and the number of these glyphs."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # for the same order of summation on every machine
    splits = load_splits("glyphs")
    images, labels = as_tensors(splits["train"])
    model = ViT(**CONSTRUCTOR)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.05)
    total = epochs * (len(images) // BATCH_SIZE)

    def rise_then_cosine(step: int) -> float:
        if step < WARMUP_STEPS:
            return (step + 1) / WARMUP_STEPS
        return 0.5 * (1 + math.cos(math.pi * (step - WARMUP_STEPS) / (total - WARMUP_STEPS)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rise_then_cosine)
    with tqdm(total=total * BATCH_SIZE, unit="img", unit_scale=True) as progress:
        for _ in range(epochs):
            for rows in torch.randperm(len(images))[: total // epochs * BATCH_SIZE].split(BATCH_SIZE):
                loss = F.cross_entropy(model(images[rows]), labels[rows], label_smoothing=0.1)
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                progress.update(BATCH_SIZE)
                progress.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    test_images, test_labels = as_tensors(splits["test"])
    return model, accuracy(model, test_images, test_labels), len(test_labels)


def main(output_dir: Path, epochs: int, seed: int) -> None:
    start = time.perf_counter()
    model, test_accuracy, test_images = train(epochs, seed)
    notes = {
        "accuracy": round(test_accuracy, 4),
        "margin": MARGIN,
        "test_images": test_images,
        "constructor": CONSTRUCTOR,
        "pixels": "RGB levels / 127.5 - 1",
        "data": "the glyphs of plain_vit.training.data.load_splits: digits, then capital letters without I and O",
        "epochs": epochs,
        "seed": seed,
        "minutes": round((time.perf_counter() - start) / 60, 1),
        "versions": {
            "python": platform.python_version(),
            "torch": version("torch"),
            "vit-pytorch": version("vit-pytorch"),
        },
    }
    output_dir.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), output_dir / "glyphs_vit.pt")
    (output_dir / "glyphs_vit.json").write_text(json.dumps(notes, indent=2) + "\n", encoding="utf-8")
    print(f"{test_accuracy:.2%} of {test_images} held-out glyphs; saved in {output_dir}")


if __name__ == "__main__":
    main(Path(WORDS.output_dir), WORDS.epochs, WORDS.seed)

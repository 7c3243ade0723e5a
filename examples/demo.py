"""Demo: convert a vit-pytorch checkpoint to a Hugging Face model, fine-tune it, and load the result.

    make demo        or        python examples/demo.py

This runs offline. The checkpoint is a vit-pytorch `ViT` trained on rendered characters by
`train_vit_pytorch_on_glyphs.py`; the data are scikit-learn's handwritten digits, with a stratified fifth held out.
All output goes to `runs/demo`, which each run replaces.
"""

if __name__ == "__main__":  # answer --help and mistakes first: importing torch takes seconds
    from plain_vit_command import read_words

    read_words(__doc__)

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tqdm import tqdm
from transformers import AutoImageProcessor, AutoModelForImageClassification, pipeline
from transformers.utils import logging as transformers_logging

import plain_vit  # noqa: F401  (registers the Auto classes)
from plain_vit.analysis import predict
from plain_vit.system.extras import needs

HERE = Path(os.path.relpath(Path(__file__).parent))
sys.path.insert(0, str(HERE))  # for the fine-tuning script in the same folder

with needs("plain-vit[train]", "vit-pytorch", script=__name__ == "__main__"):
    from datasets import Dataset
    from finetune_image_classification import FinetuneArguments, finetune
    from sklearn.svm import SVC
    from vit_pytorch import ViT

    from plain_vit.training.data import load_classification_data, load_splits
    from plain_vit.training.data.glyphs import CHARACTERS, render_glyphs

CHECKPOINT = HERE / "checkpoints" / "glyphs_vit.pt"
NOTES = json.loads(CHECKPOINT.with_suffix(".json").read_text(encoding="utf-8"))
HINTS = {
    "num_attention_heads": NOTES["constructor"]["heads"],
    "image_size": NOTES["constructor"]["image_size"],
    "patch_size": NOTES["constructor"]["patch_size"],
}
OUT = Path("runs") / "demo"
CONVERTED, FINETUNED = OUT / "converted", OUT / "finetuned"
SEEDS = (0, 1, 2)  # chosen before the first run
FEW = 5  # labels per class

# Chosen on a validation split of the training images; all other options have the script's defaults.
RECIPE: dict[str, Any] = {"dataset": "digits", "checkpoints_kept": 0}
BUDGETS: dict[str, dict[str, Any]] = {
    "all": {"epochs": 5.0, "batch_size": 32},
    "few": {"epochs": 40.0, "batch_size": 50, "augmentation": "affine", "evaluations": 1, "shots_per_class": FEW},
}


def main() -> None:
    start = time.perf_counter()
    transformers_logging.disable_progress_bar()
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)

    headline("1. A vit-pytorch checkpoint becomes a Hugging Face folder")
    difference = convert()

    headline("2. Accelerate fine-tunes it on handwritten digits, compared with the same model from scratch")
    accuracies = fine_tune()

    headline("3. The Auto classes and a pipeline load the result")
    classify()

    headline("4. What both models see")
    look_inside()

    means = {case: np.mean(values) for case, values in accuracies.items()}
    print(
        f"\nDone in {time.perf_counter() - start:.0f} s: a vit-pytorch checkpoint opened with a largest logit "
        f"difference of {difference:.1e}, fine-tuned to {means['all', 'checkpoint']:.1%} on held-out digits "
        f"({means['few', 'checkpoint']:.1%} against {means['few', 'scratch']:.1%} from scratch with {FEW} labels "
        f"per class), loaded by AutoModel; all files are in {OUT}/"
    )


def convert() -> float:
    """Inspect and convert the checkpoint; return the largest difference from vit-pytorch's logits on real images."""
    hints = [word for name, value in HINTS.items() for word in (f"--{name.replace('_', '-')}", value)]
    run("plain-vit", "inspect", CHECKPOINT, *hints)
    names = OUT / "characters.json"
    names.write_text(json.dumps(list(CHARACTERS)), encoding="utf-8")
    run("plain-vit", "convert", CHECKPOINT, CONVERTED, *hints, "--labels", names)

    theirs = ViT(**NOTES["constructor"]).eval()
    theirs.load_state_dict(torch.load(CHECKPOINT, weights_only=True))
    ours = AutoModelForImageClassification.from_pretrained(CONVERTED, attn_implementation="eager")
    glyphs, _ = render_glyphs(256, seed=1)  # the seed of the held-out glyphs
    pixel_values = prepare(CONVERTED, [Image.fromarray(glyph) for glyph in glyphs])
    with torch.no_grad():
        difference = (theirs(pixel_values) - ours(pixel_values).logits).abs().max().item()
    print(f"largest logit difference against the live vit-pytorch model, on 256 held-out glyphs: {difference:.1e}")
    return difference


def fine_tune() -> dict[tuple[str, str], list[float]]:
    """Fine-tune and train from scratch, with all and with few labels; print and return the accuracies.

    The first run, whose model is kept, is started with `accelerate launch`; the others run in parallel, one per core.
    """
    cases = [(labels, origin, seed) for labels in BUDGETS for origin in ("checkpoint", "scratch") for seed in SEEDS]
    options = {
        (labels, origin, seed): {
            **RECIPE, **BUDGETS[labels], "model": str(CONVERTED), "seed": seed,
            "output_dir": str(OUT / "runs" / f"{labels}-{origin}-{seed}"),
        }
        for labels, origin, seed in cases
    }  # fmt: skip
    first = cases[0]
    options[first]["output_dir"] = str(FINETUNED)
    words = [word for name, value in options[first].items() for word in (f"--{name}", value)]
    run("accelerate", "launch", "--cpu", "--num_processes", 1, "--num_machines", 1, "--mixed_precision", "no",
        "--dynamo_backend", "no", "--num_cpu_threads_per_process", torch.get_num_threads(),
        HERE / "finetune_image_classification.py", *words)  # fmt: skip
    results = {first: json.loads((FINETUNED / "results.json").read_text(encoding="utf-8"))["test_accuracy"]}

    print(f"the other {len(cases) - 1} runs; their output is in {OUT / 'runs'}/*.txt", flush=True)
    workers = ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn"))
    with workers, tqdm(total=len(cases) - 1, unit="run") as progress:
        futures = {
            workers.submit(
                finetune_quietly, {**options[case], "from_scratch": case[1] == "scratch", "report": False}
            ): case
            for case in cases[1:]
        }
        for future in as_completed(futures):
            results[futures[future]] = future.result()
            progress.update()
    accuracies: dict[tuple[str, str], list[float]] = {}
    for labels, origin, seed in cases:
        accuracies.setdefault((labels, origin), []).append(results[labels, origin, seed])
    accuracies["all", "svc"] = [support_vector_accuracy(None, SEEDS[0])]
    accuracies["few", "svc"] = [support_vector_accuracy(FEW, seed) for seed in SEEDS]

    print(f"\naccuracy on the held-out digits: mean over the seeds {SEEDS}, lowest to highest")
    print(f"{'':32}{'all labels':>26}{f'{FEW} labels per class':>26}")
    for origin, name in (
        ("checkpoint", "fine-tuned from the checkpoint"),
        ("scratch", "the same model from scratch"),
        ("svc", "scikit-learn's SVC on the pixels"),
    ):
        print(f"{name:32}" + "".join(f"{spread(accuracies[labels, origin]):>26}" for labels in ("all", "few")))
    return accuracies


def finetune_quietly(options: dict[str, Any]) -> float:
    """Run one fine-tuning on one core; return the accuracy on the held-out digits."""
    torch.set_num_threads(1)
    folder = Path(options["output_dir"])
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (
        folder.with_suffix(".txt").open("w", encoding="utf-8") as file,
        contextlib.redirect_stdout(file),
        contextlib.redirect_stderr(file),
    ):
        return finetune(FinetuneArguments(**options)).values["accuracy"]


def support_vector_accuracy(shots_per_class: int | None, seed: int) -> float:
    """Return the accuracy of scikit-learn's SVC on the held-out digits, trained on the same images."""
    train = load_classification_data("digits", shots_per_class=shots_per_class, seed=seed).train
    (x, y), (test_x, test_y) = (
        (np.stack([np.asarray(image.convert("L")).ravel() for image in split["image"]]), split["label"][:])
        for split in (train, held_out())
    )
    return float(SVC().fit(x, y).score(test_x, test_y))


def classify() -> None:
    """Load the fine-tuned model with the Auto classes, and classify the held-out images."""
    split = held_out()
    model = AutoModelForImageClassification.from_pretrained(FINETUNED)
    print(
        f"AutoModelForImageClassification: {type(model).__name__}, labels {', '.join(model.config.id2label.values())}"
    )
    probabilities = predict(model, prepare(FINETUNED, split["image"][:]))
    labels = np.asarray(split["label"][:])
    print(f"held-out digits: {(probabilities.argmax(axis=1) == labels).sum()} of {len(labels)} right")

    classifier = pipeline("image-classification", model=str(FINETUNED))
    for image, label in zip(split["image"][:3], labels[:3], strict=True):
        answers = ", ".join(f"{answer['label']} {answer['score']:.1%}" for answer in classifier(image, top_k=3))
        print(f"pipeline: {label} is classified as {answers}")


def look_inside() -> None:
    """Compare what both models see in an image of each of eight digits, on one page."""
    split, files = held_out(), []
    (OUT / "images").mkdir()
    for digit in range(8):
        files.append(OUT / "images" / f"{digit}.png")
        split[split["label"][:].index(digit)]["image"].save(files[-1])
    run("plain-vit", "show", *files, "--model", CONVERTED, "--compare", FINETUNED, "--out", OUT / "inside")
    print(f"training curves, calibration, confusions and mistakes: {FINETUNED / 'report' / 'index.html'}")


def held_out() -> Dataset:
    """Return the held-out digits."""
    return load_splits("digits")["test"]


def prepare(folder: Path, images: list) -> torch.Tensor:
    """Return the pixel values of images, from the image processor in this folder."""
    return AutoImageProcessor.from_pretrained(folder)(images, return_tensors="pt")["pixel_values"]


def spread(accuracies: list[float]) -> str:
    """Format a mean with its range."""
    if len(accuracies) == 1:
        return f"{accuracies[0]:.1%}"
    return f"{np.mean(accuracies):.1%} ({min(accuracies):.1%} to {max(accuracies):.1%})"


def run(program: str, *words: object) -> None:
    """Print a command and run it in the environment of this interpreter."""
    text = [str(word) for word in words]
    print(f"$ {program} {' '.join(text)}", flush=True)
    subprocess.run([str(Path(sys.executable).with_name(program)), *text], check=True)


def headline(text: str) -> None:
    """Print the title of a section."""
    print(f"\n{text}\n{'-' * len(text)}", flush=True)


if __name__ == "__main__":
    main()

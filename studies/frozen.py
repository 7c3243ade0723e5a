"""Classify Fashion-MNIST with the features of a frozen model: few labels, a linear probe, nearest neighbours.

    python -m studies.frozen "DINOv2-small" facebook/dinov2-small --image_size 112    # a Hub id, a folder or a file

Images are resized without a crop. The results are appended to results/frozen.jsonl, a line per model, from which
`python -m studies.draw` writes the table of docs/notes/studies.md. Only the choice of the few labels depends on seeds.
"""

import argparse
import json
import os
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean
from typing import Any

from plain_vit import PlainViTForImageClassification, PlainViTImageProcessor
from plain_vit.conversion import from_checkpoint
from studies.results import append_result, read_results
from studies.run import RUNS
from studies.study import HERE, ROOT
from studies.work import environment, slug

DATASET, SHOTS, NEIGHBORS = "fashion_mnist", (10, 100, 1000), (10, 20)
LEARNING_RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)  # of the linear probe
RESULTS = HERE / "results" / "frozen.jsonl"
SCRIPT = "examples/linear_probe.py"


def main(words: Sequence[str] | None = None) -> int:
    """Probe a model, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="of the model, in the table")
    parser.add_argument("model", help="what `from_checkpoint` opens")
    parser.add_argument("--image_size", type=int, help="in pixels (default: that of the model)")
    parser.add_argument("--mixed_precision", default="bf16", choices=["no", "bf16"])
    parser.add_argument("--dataset", default=DATASET)
    parser.add_argument("--shots", type=int, nargs="+", default=SHOTS, help="labels per class")
    parser.add_argument("--runs", type=Path, default=RUNS, help="folder of the models and features")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file of the results")
    arguments = parser.parse_args(words)
    os.chdir(ROOT)
    if arguments.name in read_results(arguments.results):
        print(f"{arguments.results.name} has results of {arguments.name}: remove its line to probe it again.")
        return 0
    append_result(arguments.results, probe(arguments))
    return 0


def probe(arguments: argparse.Namespace) -> dict[str, Any]:
    """Extract the features of a dataset once, evaluate them in three ways, and return the result line."""
    folder = arguments.runs / "frozen" / slug(arguments.name)
    size, parameters = write_classifier(arguments.model, arguments.image_size, folder / "model")
    modes = (
        ["--mode", "linear", "--learning_rates", *map(str, LEARNING_RATES)],
        ["--mode", "few_shot", "--shots", *map(str, arguments.shots)],
        ["--mode", "knn", "--neighbors", *map(str, NEIGHBORS)],
    )
    start = time.monotonic()
    precision = ["--mixed_precision", arguments.mixed_precision]
    for mode in modes:
        results = run_probe(folder / "model", arguments.dataset, folder / "probe", [*precision, *mode])
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "key": arguments.name, "source": arguments.model, "dataset": arguments.dataset, "image_size": size,
        "parameters": parameters,
        "mixed_precision": arguments.mixed_precision, "results": results, "seconds": round(time.monotonic() - start, 1),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 1), "date": datetime.now(UTC).date().isoformat(),
        "environment": environment(),
    }  # fmt: skip


def run_probe(model: Path, dataset: str, folder: Path, options: Sequence[str], **variables: str) -> dict[str, Any]:
    """Run the script that probes frozen features, and return its results and those of earlier runs in the folder.

    Args:
        model: folder of the model.
        dataset: dataset, as for the script.
        folder: folder of the features and results; features of the same model and dataset are reused.
        options: further options of the script.
        **variables: environment variables.
    """
    words = [SCRIPT, "--model", str(model), "--dataset", dataset, "--output_dir", str(folder), *options]
    print(shlex.join(["python", *words]), flush=True)
    subprocess.run([sys.executable, *words], check=True, env={**os.environ, "PYTHONPATH": str(ROOT), **variables})
    results: dict[str, Any] = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    return results


def write_classifier(source: str, image_size: int | None, folder: Path) -> tuple[int, int]:
    """Write a model as a plain ViT whose image processor does not crop, and return its image size and parameters.

    Args:
        source: a source that `from_checkpoint` opens.
        image_size: image size in pixels, or None for the model's own.
        folder: folder of the model, created or replaced.

    Raises:
        ValueError: The source has no image processor.
    """
    opened = from_checkpoint(source)
    body: Any = getattr(opened.model, "vit", opened.model)
    own = body.config.image_size
    size = image_size or (own if isinstance(own, int) else own[0])
    classifier = PlainViTForImageClassification(body.config)
    classifier.vit.load_state_dict(body.state_dict())
    classifier.save_pretrained(folder)
    given = opened.image_processor
    if given is None:
        raise ValueError(f"{source} has no mean and standard deviation of its pixels: convert it with these first.")
    PlainViTImageProcessor(
        size={"height": size, "width": size},
        **{name: getattr(given, name) for name in ("image_mean", "image_std", "resample")},
    ).save_pretrained(folder)
    return size, body.num_parameters()


def frozen_table(lines: Mapping[str, Any]) -> str:
    """Return the table of the results, a line per model, in Markdown."""
    shots = [*dict.fromkeys(count for line in lines.values() for count in line["results"]["few_shot"])]
    neighbors = [*dict.fromkeys(count for line in lines.values() for count in line["results"]["knn"])]
    titles = [
        *["pixels", "parameters"], *(f"{int(count):,} per class" for count in shots), "all: linear probe",
        *(f"all: {count} neighbours" for count in neighbors), "core seconds",
    ]  # fmt: skip
    rows = [f"| | {' | '.join(titles)} |", "|---|" + "---:|" * len(titles)]
    for name, line in lines.items():
        results = line["results"]
        few = (results["few_shot"].get(count, []) for count in shots)
        cells = [
            *[f"{line['image_size']}", f"{line['parameters']:,}"],
            *(f"{mean(of):.2%} ({min(of):.1%} to {max(of):.1%})" if of else "-" for of in few),
            f"{results['linear']['test_accuracy']:.2%}",
            *(f"{results['knn'][count]:.2%}" if count in results["knn"] else "-" for count in neighbors),
            f"{line['cpu_seconds']:.0f}",
        ]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())

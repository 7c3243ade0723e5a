"""Benchmark of feature extraction: from JPEG files to features, compared with transformers' pipeline.

python -m benchmarks.bench_extract --write
"""

import contextlib
import itertools
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

# Import little more than the script does: each worker of a loader imports this module when it starts.
import torch
from pyarrow import parquet

from benchmarks.harness import Case, Result, compare, name_of_run, parser, publish, report
from plain_vit.inference import callables
from plain_vit.inference.bulk import Parts, Shard, open_images, open_run
from plain_vit.inference.callables import FeatureExtractor, open_model, prepared
from plain_vit.inference.columns import features_of
from plain_vit.system.calls import keep_freed_memory
from plain_vit.training.arguments import BulkOptions
from plain_vit.training.hardware.processes import start_accelerator

EXAMPLES = Path(__file__).parent.parent / "examples"
IMAGES = {"tiny": 256, "base": 64}  # files per turn
QUICK = {"tiny": 64}
SIZE = (500, 375)  # width and height of a file
BATCH = 32  # default of the script; also used for the forward pass alone
PIPELINES = (1, 8, 32)  # batch sizes
COMPARED = 8  # images whose features are compared with the features of transformers' model
FORWARD, READING, OURS, PIPELINE = "forward alone", "reading alone", "plain-vit", "transformers' pipeline"
CALLABLE = "FeatureExtractor"
BOTH, FASTEST = f"{FORWARD} and {READING}", f"the fastest {PIPELINE}"
TIMM = "timm's loader and model"
# Largest differences of features, relative to the largest; timm resizes with Pillow, whose pixels differ by a level.
TOLERANCES, FILTERED = {"no": 1e-5, "bf16": 5e-2}, 5e-2
AIMS = {("base", FORWARD): 0.95, ("tiny", BOTH): 0.95, ("base", FASTEST): 1.2, ("tiny", FASTEST): 1.2}

NOTES = f"""A folder of JPEG files of {SIZE[0]} x {SIZE[1]} pixels ({{weight:.0f}} kB on average: scikit-learn's two
photographs with the noise of a camera, quality 90) becomes one feature of each file, in float32. The models are a
ViT-Ti/16 and a ViT-B/16 of 224 pixels, with random weights, in folders that transformers wrote, with its
`ViTImageProcessor`; all cases open these. A turn goes through {{counts}} files; opening and preparing the model is not
part of it. In the first turn, which does not count, the features are compared with those of transformers' model.

- "{FORWARD}": the model that `extract_features.py` prepares, on batches of {BATCH} images that were processed before.
- "{READING}": from files to processed images, in one thread: images per second of one core.
- "{OURS}": the run of `examples/extract_features.py` with its default options, from the list of files to the manifest;
  then with `--num_workers 1`, whose start is part of the turn, and with `--engine openvino`.
- "{CALLABLE}": `plain_vit.{CALLABLE}` of a dict with all paths; the aim is 0.95 of the script's rate.
- "{PIPELINE}": `pipeline("image-feature-extraction")` of the paths, with `return_tensors=True`. It returns all tokens,
  of which the first is kept. The script lets its process keep freed memory; transformers does not.

{{rates}}

"{BOTH}" is a run that does one after the other and nothing else, and reads with {{threads}}
threads, as many as torch computes with.

{{ratios}}"""

BULK_NOTES = f"""A folder of {{count:,}} JPEG files of {SIZE[0]} x {SIZE[1]} pixels ({{weight:.0f}} kB on average)
becomes one feature of each file, in batches of {{batch}}, with {{workers}} loader workers, whose start is part of a
turn, in the precision "{{precision}}". The model is in memory before. "{OURS}" is `examples/extract_features.py`, from
the list of files to the manifest; "{TIMM}" is `create_loader` and `forward_features` in a loop, which writes nothing;
"{PIPELINE}" is `pipeline("image-feature-extraction")` of a tenth of the files. In the first turn, which does not count,
the features are compared with those of transformers' model in float32.

{{rates}}"""


# Cases


def forward(size: str, folder: str) -> Callable[[], object]:
    """Return a function that computes the features of images that are already preprocessed."""
    options = bulk_options(size, folder)
    accelerator = start_accelerator(num_processes=None, mixed_precision="no")
    opened, image_processor = open_model(options, {})
    model = prepared(opened.base_model, options, accelerator.device)
    batches = [batch["inputs"]["pixel_values"].to(accelerator.device) for batch in parts(options, image_processor)]

    def turn() -> torch.Tensor:
        found = [features_of(model, {"pixel_values": pixels}, kind="pooled", layers=()) for pixels in batches]
        return torch.cat([features["feature"] for features in found]).cpu()

    return compared(turn, size, folder)


def reading(size: str, folder: str) -> Callable[[], object]:
    """Return a function that reads, decodes and processes the files in one thread."""
    keep_freed_memory()  # as the script does
    torch.set_num_threads(1)
    options = bulk_options(size, folder)
    batches = parts(options, open_model(options, {})[1])
    return lambda: sum(len(batch["rows"]) for batch in batches)


def ours(size: str, folder: str, **given: Any) -> Callable[[], object]:
    """Return a function that runs the script with these options, writing to a new folder each time."""
    as_imported_here()
    sys.path.insert(0, str(EXAMPLES))
    from extract_features import ExtractArguments

    options = ExtractArguments(**vars(bulk_options(size, folder)) | given)
    run, accelerator, loading = open_run(FeatureExtractor, options)

    def turn() -> torch.Tensor:
        with (
            tempfile.TemporaryDirectory() as out,
            open(os.devnull, "w") as nowhere,
            contextlib.redirect_stdout(nowhere),
        ):
            replace(run, folder=Path(out, "features")).to_end(accelerator, loading)
            features = parquet.read_table(Path(out, "features", "data"))["feature"].combine_chunks()
            return torch.tensor(features.flatten().to_numpy()).view(len(features), -1)

    return compared(turn, size, folder, TOLERANCES[options.mixed_precision])


def by_callable(size: str, folder: str) -> Callable[[], object]:
    """Return a function that computes the features with the callable for other engines."""
    as_imported_here()
    extractor = FeatureExtractor(f"{folder}/{size}", batch_size=BATCH)
    files = sorted(map(str, Path(folder, f"{size} images").iterdir()))
    return compared(lambda: torch.tensor(extractor({"image": files})["feature"]), size, folder)


def by_pipeline(
    size: str, folder: str, batch: int, workers: int = 0, precision: str = "no", count: int | None = None
) -> Callable[[], object]:
    """Return a function that computes the features, of the first `count` files, with transformers' pipeline."""
    from transformers import pipeline

    fork_workers(workers)
    dtype = torch.float32 if precision == "no" else torch.bfloat16
    extractor: Any = pipeline("image-feature-extraction", model=f"{folder}/{size}", device=device(), dtype=dtype)
    files = sorted(map(str, Path(folder, f"{size} images").iterdir()))[:count]

    def turn() -> torch.Tensor:
        found = extractor(files, batch_size=batch, num_workers=workers, return_tensors=True)
        return torch.stack([tokens[0, 0] for tokens in found]).cpu()

    return compared(turn, size, folder, TOLERANCES[precision], len(files))


def by_timm(size: str, folder: str, batch: int, workers: int, precision: str) -> Callable[[], object]:
    """Return a function that computes the features with timm's loader and model, in a loop."""
    from timm.data import ImageDataset, create_loader

    from benchmarks.models import build

    fork_workers(workers)
    dtype = torch.float32 if precision == "no" else torch.bfloat16
    model = build("timm", size).eval().to(device(), dtype)
    data = ImageDataset(f"{folder}/{size} images")
    middle = (0.5, 0.5, 0.5)

    @torch.inference_mode()
    def turn() -> torch.Tensor:
        loader = create_loader(
            data, (3, 224, 224), batch, interpolation="bilinear", mean=middle, std=middle, num_workers=workers,
            crop_pct=1.0, crop_mode="squash", pin_memory=True, device=device(), use_prefetcher=device().type == "cuda",
            persistent_workers=False,
        )  # fmt: skip
        found = [model.forward_features(pixels.to(device(), dtype))[:, 0].float() for pixels, _ in loader]
        return torch.cat(found).cpu()

    return compared(turn, size, folder, FILTERED)


def fork_workers(workers: int) -> None:
    """Let loader workers be forked, as in a script of one's own: processes of the harness start them anew."""
    if workers:
        multiprocessing.set_start_method("fork", force=True)


def device() -> torch.device:
    """Return the device on which everybody computes."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def bulk_options(size: str, folder: str) -> BulkOptions:
    """Return the script's options for a model and its files."""
    return BulkOptions(model=f"{folder}/{size}", dataset=f"{folder}/{size} images", output_dir=f"{folder}/unused")


def as_imported_here() -> None:
    """Let the callables use all threads: the server that forked this process has computed nothing with torch."""
    callables.IMPORTED_IN = os.getpid()


def parts(options: BulkOptions, image_processor: Any) -> Parts:
    """Return the files as processed batches."""
    rows: Any = open_images(options)
    return Parts(rows, image_processor, len(rows), BATCH, [Shard(0, 0)])


def compared(
    turn: Callable[[], torch.Tensor], size: str, folder: str, tolerance: float = 1e-5, count: int | None = None
) -> Callable[[], object]:
    """Return a function that takes a turn, and the first time compares its features with those of transformers' model.

    Raises:
        RuntimeError: The features or their number differ.
    """
    turns = itertools.count()

    def take_turn() -> torch.Tensor:
        features = turn()
        if next(turns) == 0:
            from benchmarks.models import require_equal

            if len(features) != (count or len(os.listdir(f"{folder}/{size} images"))):
                raise RuntimeError(f"there are {len(features)} features: expected one of each file")
            expected = torch.load(f"{folder}/{size}.pt")[: len(features)]
            require_equal(features[:COMPARED].float(), expected, tolerance, "the run")
        return features

    return take_turn


def cases(size: str, count: int, folder: str) -> list[Case]:
    """Return the cases of a model."""
    where = {"size": size, "folder": folder}
    return [
        Case(f"{size}: {FORWARD}", forward, where, images=count),
        Case(f"{size}: {READING}", reading, where, images=count),
        Case(f"{size}: {OURS}", ours, where, images=count),
        Case(f"{size}: {OURS}, 1 worker", ours, {**where, "num_workers": 1}, images=count),
        Case(f"{size}: {CALLABLE}", by_callable, where, images=count),
        Case(f"{size}: {OURS}, in OpenVINO", ours, {**where, "engine": "openvino"}, images=count),
        *(
            Case(f"{size}: {PIPELINE}, batch {batch}", by_pipeline, {**where, "batch": batch}, images=count)
            for batch in PIPELINES
        ),
    ]


def bulk_cases(size: str, count: int, folder: str, chosen: Any) -> list[Case]:
    """Return the cases with loader workers and in a precision, ours first; of the pipeline a tenth of the files."""
    where = {"size": size, "folder": folder}
    theirs = {**where, "batch": chosen.batch, "workers": chosen.workers, "precision": chosen.precision}
    own = {"batch_size": chosen.batch, "num_workers": chosen.workers, "mixed_precision": chosen.precision}
    few = max(count // 10, 1)
    return [
        Case(f"{size}: {OURS}", ours, {**where, **own}, images=count),
        Case(f"{size}: {TIMM}", by_timm, theirs, images=count),
        Case(f"{size}: {PIPELINE}", by_pipeline, {**theirs, "count": few}, images=few),
    ]


# Files


@cache
def contents() -> list[bytes]:
    """Return different JPEG files."""
    from datasets import Image

    from benchmarks.bench_data import photographs

    return [row["bytes"] for row in photographs(SIZE).cast_column("image", Image(decode=False))["image"]]


def write_files(count: int, folder: Path) -> float:
    """Write JPEG files, and return their mean size in kB."""
    folder.mkdir()
    for number in range(count):
        (folder / f"{number:06d}.jpg").write_bytes(contents()[number % len(contents())])
    return sum(map(len, contents())) / len(contents()) / 1000


def write_model(size: str, folder: Path) -> None:
    """Write a model of transformers with its image processor, and its features of the first images."""
    from PIL import Image
    from transformers import ViTImageProcessor

    from benchmarks.models import build

    model, image_processor = build("transformers", size), ViTImageProcessor()
    model.save_pretrained(folder / size)
    image_processor.save_pretrained(folder / size)
    images: list[Any] = [Image.open(file) for file in sorted((folder / f"{size} images").iterdir())[:COMPARED]]
    with torch.inference_mode():
        tokens = model.vit(**image_processor(images, return_tensors="pt")).last_hidden_state
    torch.save(tokens[:, 0].clone(), folder / f"{size}.pt")


# Reporting


def rates(results: Sequence[Result]) -> dict[str, float]:
    """Return images per second by case."""
    return {result.name: (result.images or 0) / result.seconds for result in results}


def rate_table(results: Sequence[Result]) -> str:
    """Return a Markdown table of images per second."""
    lines = ["| case | images/s |", "|---|---:|"]
    return "\n".join(lines + [f"| {name} | {rate:.3g} |" for name, rate in rates(results).items()])


def ratio_table(results: Sequence[Result], threads: int) -> str:
    """Return a Markdown table of our rate relative to the other cases."""
    rate = rates(results)
    lines = ["| model | plain-vit to | ratio | aim |", "|---|---|---:|---:|"]
    for size in dict.fromkeys(name.partition(": ")[0] for name in rate):
        alone, read = rate[f"{size}: {FORWARD}"], threads * rate[f"{size}: {READING}"]
        others = {
            FORWARD: alone,
            BOTH: 1 / (1 / alone + 1 / read),
            CALLABLE: rate[f"{size}: {CALLABLE}"],
            FASTEST: max(rate[f"{size}: {PIPELINE}, batch {batch}"] for batch in PIPELINES),
        }
        for what, other in others.items():
            aim = AIMS.get((size, what), "-")
            lines.append(f"| {size} | {what} | {rate[f'{size}: {OURS}'] / other:.2f} | {aim} |")
    return "\n".join(lines)


def bulk(name: str, chosen: Any) -> None:
    """Measure and report the features of many images, one way after the other."""
    size, _, number = chosen.bulk.partition(":")
    count, results = int(number), []
    with tempfile.TemporaryDirectory() as folder:
        weight = write_files(count, Path(folder, f"{size} images"))
        write_model(size, Path(folder))
        listed = bulk_cases(size, count, folder, chosen)
        for case in listed:
            results += compare([case], chosen.turns)
            page = BULK_NOTES.format(**vars(chosen), count=count, weight=weight, rates=rate_table(results))
            last = case is listed[-1]
            publish(name, "Features from JPEG files", page, [asdict(one) for one in results], chosen.write, last)


def main() -> None:
    options = parser(__doc__)
    options.set_defaults(turns=3)
    options.add_argument("--quick", action="store_true", help="only the small model, and few images")
    options.add_argument("--bulk", help="only many images of one model, as in base:40000, with these options:")
    options.add_argument("--batch", type=int, default=256)
    options.add_argument("--workers", type=int, default=os.cpu_count())
    options.add_argument("--precision", choices=tuple(TOLERANCES), default="bf16")
    chosen = options.parse_args()
    if chosen.bulk:
        bulk(name_of_run("extract", options, chosen), chosen)
        return
    counts, results, threads = QUICK if chosen.quick else IMAGES, [], torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        for size, count in counts.items():
            weight = write_files(count, Path(folder, f"{size} images"))
            write_model(size, Path(folder))
            results += compare(cases(size, count, folder), chosen.turns)
            notes = NOTES.format(
                weight=weight,
                counts=" or ".join(f"{count} ({size})" for size, count in counts.items()),
                rates=rate_table(results),
                threads=threads,
                ratios=ratio_table(results, threads),
            )
            # Written after each model, so that results are kept if a later model fails or the time runs out.
            last = size == [*counts][-1]
            name = name_of_run("extract", options, chosen)
            report(name, "Features from JPEG files", notes, results, chosen.write, last)


if __name__ == "__main__":
    main()

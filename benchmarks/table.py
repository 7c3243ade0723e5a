"""Speed tables of the README and of docs/notes/speed.md, from the newest results: `python -m benchmarks.table`."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import gpu
from benchmarks.harness import RESULTS, read_page

ROOT = Path(__file__).parents[1]
START, END = "<!-- speed: python -m benchmarks.table -->\n", "<!-- end of speed -->\n"

# The runs in the table, by the names of their pages, and their titles.
RUNS = {
    "forward": "forward pass",
    "forward-cuda-tiny-32-base-1-one-process": "forward pass on the GPU",
    "forward-cuda-tiny-32-base-1-base-64-one-process-eager-prepared": "forward pass on the GPU",
    **{
        f"forward-cuda-{size}-{batch}-one-process-prepared-max-autotune": "forward pass on the GPU"
        for size in ("base", "large")
        for batch in (1, 32, 256)
    },
    "train-step": "training step",
    "train-step-checkpointing": "training step",  # its modes say "checkpointed"
    "train-step-cuda-tiny-32-base-64-one-process": "training step on the GPU",
    "train-step-cuda-base-256-compiled": "training step on the GPU",
    "train-step-cuda-large-128-compiled": "training step on the GPU",
    "run-cuda": "training from JPEG files on the GPU",
    "load": "loading a ViT-L (1.2 GB)",
    "convert": "converting a ViT-L (1.2 GB)",
    "data": "training images from JPEG files",
    "extract": "features from JPEG files",
    "extract-base-40000": "features from 40,000 JPEG files on the GPU",
    "import": "import",
    "finetune": "fine-tuning",
}
# The rows shown in the README: title in the whole table, and title in the README.
CHOSEN = {
    "forward pass: base b8 float32, eager": "forward pass, CPU, float32: ViT-B/16, 8 images",
    "forward pass: base b8 float32, prepared": "the same, prepared",
    "forward pass on the GPU: tiny b32 bfloat16, eager": "forward pass, GPU, bfloat16: ViT-Ti/16, 32 images",
    "forward pass on the GPU: tiny b32 bfloat16, prepared": "the same, prepared",
    "training step: small b16 float32, eager, as our scripts train": "training step, CPU, float32: ViT-S/16, 16 images",
    "training step on the GPU: base b64 bfloat16, eager": "training step, GPU, bfloat16: ViT-B/16, 64 images",
    "loading a ViT-L (1.2 GB): converts timm": "open a ViT-L/16 of timm (1.2 GB), converted",
    "features from JPEG files: base": "features of JPEG files, CPU, float32: ViT-B/16",
}
# Rows of `make gpu`, which the README shows from when they have been measured.
ON_A_GPU = {
    "training step on the GPU: base b256 bfloat16, compiled, as our scripts train": "the same, 256 images, compiled",
    "training step on the GPU: large b128 bfloat16, compiled, as our scripts train": "the same, ViT-L/16, 128 images",
    "training from JPEG files on the GPU: base b256 bfloat16": "a whole run from JPEG files, GPU: ViT-B/16, compiled",
    "features from 40,000 JPEG files on the GPU: base": "features of JPEG files, GPU, bfloat16: ViT-B/16",
}
PAGES: dict[Path, Mapping[str, str] | None] = {
    ROOT / "README.md": CHOSEN | ON_A_GPU,
    ROOT / "docs" / "notes" / "speed.md": None,
}
OURS = ("plain_vit", "plain-vit")
# Cases that do only part of the work: lower bounds, not alternatives.
REFERENCES = {
    "bare products",
    "one large product",
    "decoding alone",
    "forward alone",
    "reading alone",
    "transformers' processor",  # neither crops nor mirrors
    "torch",
    "transformers alone",
}


def newest(runs: Iterable[str] = RUNS) -> dict[str, dict[str, Any]]:
    """Return the JSON of the newest page of each run that has one."""
    found = {}
    for path in sorted(RESULTS.glob("*.md")):  # of pages from the same day, the last by name wins
        page = read_page(path)
        found[page["benchmark"]] = page
    return {run: found[run] for run in runs if run in found}


def speeds(chosen: Mapping[str, str] | None = None) -> str:
    """Return the table and its environment, in Markdown; empty without results.

    Args:
        chosen: Titles of the rows to show, with their new titles (default: all rows, unchanged).

    Raises:
        ValueError: The results have no row with a chosen title.
    """
    pages = newest()
    if not pages:
        return ""
    newest_rows: dict[str, tuple[str, str, str]] = {}  # by title: date, figures, machine
    for run, page in pages.items():
        for row in rows(page["results"]):
            title, figures = f"{RUNS[run]}{row}".split(" | ", 1)
            measured = (page["environment"]["date"], figures, measured_where(page["environment"]))
            newest_rows[title] = max(newest_rows.get(title, measured), measured, key=lambda one: one[0])
    found = [(title, figures, where) for title, (_, figures, where) in newest_rows.items()]
    if chosen is not None:
        if missing := chosen.keys() - ON_A_GPU.keys() - {title for title, _, _ in found}:
            raise ValueError(f"benchmarks/results has no {sorted(missing)}: run that benchmark, or choose other rows")
        found = [(chosen[wanted], row, where) for wanted in chosen for title, row, where in found if title == wanted]
    lines = ["| benchmark | plain-vit | fastest alternative | speedup |", "|---|---:|---:|---:|"]
    lines += [f"| {title} | {row}" for title, row, _ in found]
    machines = dict.fromkeys(where for _, _, where in found)
    lines += ["", f"Medians of interleaved runs ({'; '.join(machines)}).", ""]
    done = {one["name"] for one in newest(["gpu"]).get("gpu", {"results": []})["results"] if one["ended"] == gpu.DONE}
    if chosen is None and (waiting := [row.name for row in gpu.ROWS if row.name not in done]):
        lines += [f"Rows of `make gpu` that no GPU has run yet: {'; '.join(waiting)}.", ""]
    return "\n".join(lines)


def measured_where(environment: Mapping[str, str]) -> str:
    """Return the machine, the release of torch and the date of a page."""
    processor, gpu = environment["processor"], environment["GPU"]
    where = processor if gpu == "none" else f"{gpu}, {processor}"
    return f"{where}, torch {re.findall('torch ([^,]*)', environment['versions'])[0]}, {environment['date']}"


def rows(results: Sequence[dict[str, Any]]) -> list[str]:
    """Return a row for each of our cases, compared with the fastest alternative in the same setting and mode.

    A case is named "setting: package, mode"; setting and mode are optional. A case that opens or converts a file is
    compared with cases that open the same file or no file, such as a copy.
    """
    cases = [(*named(one["name"]), one) for one in results]
    lines = []
    for setting, what, mode, ours in cases:
        if not what.startswith(OURS):
            continue
        others = [
            (other_mode == mode, other, one)
            for other_setting, other, other_mode, one in cases
            if other_setting == setting and other not in REFERENCES and not other.startswith(OURS)
            if opened(other) in (None, opened(what))
        ]
        described = ", ".join(filter(None, (setting, re.sub("^plain.vit( |$)", "", what), mode)))
        begins = f"{': ' * bool(described)}{described} | {rate(ours)} |"
        if not others:
            lines.append(f"{begins} none measured | - |")
            continue
        same_mode = [(other, one) for same, other, one in others if same] or [(other, one) for _, other, one in others]
        other, fastest = min(same_mode, key=lambda case: cost(case[1]))
        lines.append(f"{begins} {other} {rate(fastest)} | {cost(fastest) / cost(ours):.2f} |")
    return lines


def opened(what: str) -> str | None:
    """Return the name of the file that a case opens or converts, or None."""
    package, *file = re.split(" (?:opens|converts) ", what)
    return package if file == ["its own folder"] else next(iter(file), None)


def named(name: str) -> tuple[str, str, str]:
    """Split a case's name into setting, package and mode."""
    setting, _, what = name.rpartition(": ")
    package, _, mode = what.partition(", ")
    return setting, package, mode


def cost(result: dict[str, Any]) -> float:
    """Return the seconds of an image, if a turn processes images, otherwise those of a turn."""
    return result["seconds"] / (result.get("images") or 1)


def rate(result: dict[str, Any]) -> str:
    """Format the images per second if a turn processes images, otherwise the time."""
    if result.get("images") is not None:
        images = result["images"] / result["seconds"]
        return f"{images:,.0f} images/s" if images >= 1000 else f"{images:.3g} images/s"
    return f"{result['seconds']:.3g} s"


def with_speeds(text: str, chosen: Mapping[str, str] | None = None) -> str:
    """Return the text of a page with its table replaced by the newest results."""
    before, rest = text.split(START)
    return f"{before}{START}{speeds(chosen)}{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    for page, chosen in PAGES.items():
        page.write_text(with_speeds(page.read_text(encoding="utf-8"), chosen), encoding="utf-8")

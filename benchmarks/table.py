"""Speed table of the README, generated from the newest results by `python -m benchmarks.table`."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS

README = Path(__file__).parents[1] / "README.md"
START, END = "<!-- speed: python -m benchmarks.table -->\n", "<!-- end of speed -->\n"

# The runs in the table, by the names of their pages, and their titles.
RUNS = {
    "forward": "forward pass",
    "forward-compile": "forward pass",
    "forward-cuda-compile": "forward pass on the GPU",
    "forward-cuda-tiny-32-base-1-one-process": "forward pass on the GPU",
    "train-step": "training step",
    "train-step-checkpointing": "training step",  # its modes say "checkpointed"
    "train-step-cuda-tiny-32-base-64-one-process": "training step on the GPU",
    "train-step-cuda-base-128-compile": "training step on the GPU",
    "train-step-cuda-large-64-compile": "training step on the GPU",
    "train-step-cuda-huge-16-compile": "training step on the GPU",
    "load": "loading a ViT-L (1.2 GB)",
    "convert": "converting a ViT-L (1.2 GB)",
    "data": "training images from JPEG files",
    "extract": "features from JPEG files",
    "import": "import",
    "finetune": "fine-tuning",
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


def newest() -> dict[str, dict[str, Any]]:
    """Return the JSON of the newest page of each run in `RUNS` that has one."""
    found = {}
    for path in sorted(RESULTS.glob("*.md")):  # on the same day, the machine whose name sorts last
        page = json.loads(path.read_text(encoding="utf-8").split("```json\n")[1].split("\n```")[0])
        found[page["benchmark"]] = page
    return {run: found[run] for run in RUNS if run in found}


def speeds() -> str:
    """Return the table and its environment, in Markdown; empty without results."""
    pages = newest()
    if not pages:
        return ""
    lines = ["| benchmark | plain-vit | fastest alternative | speedup |", "|---|---:|---:|---:|"]
    machines = []
    for run, page in pages.items():
        lines += [f"| {RUNS[run]}{row}" for row in rows(page["results"])]
        measured = page["environment"]
        where = measured["processor"] if measured["GPU"] == "none" else f"{measured['GPU']}, {measured['processor']}"
        machines.append(f"{where}, torch {re.findall('torch ([^,]*)', measured['versions'])[0]}, {measured['date']}")
    return "\n".join([*lines, "", f"Medians of interleaved runs ({'; '.join(dict.fromkeys(machines))}).", ""])


def rows(results: Sequence[dict[str, Any]]) -> list[str]:
    """Return the row of each case of ours, compared with the fastest alternative in the same setting and mode.

    A case is called "setting: package, mode", where the setting and the mode may be missing. One that opens or converts
    a file is compared with those that open the same file, and with those that open none, such as a copy.
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
        other, fastest = min(same_mode, key=lambda case: case[1]["seconds"])
        lines.append(f"{begins} {other} {rate(fastest)} | {fastest['seconds'] / ours['seconds']:.2f} |")
    return lines


def opened(what: str) -> str | None:
    """Return the file that a case opens or converts, by its name on the page; None if it opens none."""
    package, *file = re.split(" (?:opens|converts) ", what)
    return package if file == ["its own folder"] else next(iter(file), None)


def named(name: str) -> tuple[str, str, str]:
    """Return setting, package and mode from a case's name."""
    setting, _, what = name.rpartition(": ")
    package, _, mode = what.partition(", ")
    return setting, package, mode


def rate(result: dict[str, Any]) -> str:
    """Return images per second if a turn processes images, else the time."""
    if result.get("images") is not None:
        images = result["images"] / result["seconds"]
        return f"{images:,.0f} images/s" if images >= 1000 else f"{images:.3g} images/s"
    return f"{result['seconds']:.3g} s"


def with_speeds(readme: str) -> str:
    """Return the README with the table of the newest results."""
    before, rest = readme.split(START)
    return f"{before}{START}{speeds()}{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    README.write_text(with_speeds(README.read_text(encoding="utf-8")), encoding="utf-8")

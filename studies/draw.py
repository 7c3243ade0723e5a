"""Draw the pictures of the studies, and write their tables into docs/notes/studies.md, from the results in results/.

    python -m studies.draw                  # all studies that have results
    python -m studies.draw positions

This command runs no training. It overwrites numbers on the page that differ from the results.
"""

import argparse
import math
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from plain_vit.analysis.plots import LINES
from plain_vit.analysis.words import plain_figure
from studies.frozen import RESULTS as FROZEN
from studies.frozen import frozen_table
from studies.results import Row, count_runs, planned_runs, read_results, results_file, rows_of
from studies.study import COMPUTE, HERE, ROOT, Study, open_study, study_names

TERA = 1e12
# Markers and line styles that distinguish contenders of the same colour.
LOOKS: tuple[tuple[str, Any], ...] = (("o", "-"), ("s", "--"), ("^", ":"), ("D", "-."))
PAGE, PICTURES = ROOT / "docs" / "notes" / "studies.md", ROOT / "docs" / "pictures"
HEAD = "| | learning rate | test accuracy | 95% interval | lowest to highest | core seconds | parameters | flat |"


def main(words: Sequence[str] | None = None) -> int:
    """Draw, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="*", help="names of studies (default: all)")
    text = with_block(PAGE.read_text(encoding="utf-8"), "frozen", frozen_table(read_results(FROZEN)))
    for name in parser.parse_args(words).studies or study_names():
        study = open_study(name, "desk")
        results = read_results(results_file(HERE / "results", study))
        text = with_block(text, name, section(study, results))
        if has_accuracies(study, results):
            picture = PICTURES / f"study_{name}.png"
            draw(study, results).savefig(picture, dpi=110)
            print(picture.relative_to(ROOT))
    PAGE.write_text(text, encoding="utf-8")
    return 0


def with_block(text: str, name: str, block: str) -> str:
    """Return a page with the block between the marks of a study replaced.

    Raises:
        ValueError: The page has no such marks.
    """
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    if begin not in text or end not in text:
        raise ValueError(f"{PAGE.name} has no place for {name}: add the lines {begin.strip()} and {end}.")
    return re.sub(
        f"{re.escape(begin)}.*?{re.escape(end)}", lambda _: f"{begin}\n{block}\n\n{end}", text, flags=re.DOTALL
    )


def section(study: Study, results: Mapping[str, Any]) -> str:
    """Return the generated part of a study's section: question, paper, prediction, table, picture."""
    fields = study.description
    paper = fields["paper"]
    parts = [
        f"**{fields['question']}**",
        f"The paper ({paper['source']}): {paper['words'].strip()}."
        if "words" in paper
        else f"Paper: {paper['source']}.",
        f"*Prediction.* {' '.join(fields['prediction'].split())}",
    ]
    done, total = sum(run.key in results for run in planned_runs(study, results)), count_runs(study, results)
    if done < total:
        parts.append(f"{done} of {total} runs are done." if done else "Not run yet.")
    if not has_accuracies(study, results):
        return "\n\n".join(parts)
    parts += [
        table(study, results),
        f"![{fields['title']}: test accuracies and learning rates]({picture_of(study.name)})",
    ]
    return "\n\n".join(parts)


def has_accuracies(study: Study, results: Mapping[str, Any]) -> bool:
    """Return whether a study has at least one accuracy for its table."""
    return any(row.mean is not None for row in rows_of(study, results))


def picture_of(name: str) -> str:
    """Return the path of a study's picture, relative to the page."""
    return f"../pictures/study_{name}.png"


def table(study: Study, results: Mapping[str, Any]) -> str:
    """Return the table of a study in Markdown, with a row per contender and a note on missing runs."""
    paper = study.description["paper"].get("numbers") or {}
    by_compute = study.description.get("x") == COMPUTE
    more = [*["TFLOP"] * by_compute, *["paper"] * bool(paper)]
    lines = [
        " ".join([HEAD, *(f"{name} |" for name in more)]),
        "|---|---:|---:|---:|---:|---:|---:|---:|" + "---:|" * len(more),
    ]
    for row in rows_of(study, results):
        cells = [row.contender, *_cells(row)]
        if by_compute:
            cells.append("not run" if row.operations is None else f"{row.operations / TERA:.2g}")
        if paper:
            cells.append(f"{paper[row.contender]:.2f}%" if row.contender in paper else "-")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cells(row: Row) -> list[str]:
    rate = "not chosen yet" if row.learning_rate is None else f"{row.learning_rate:g}{'*' * row.at_the_edge}"
    if row.mean is None:
        return [rate, *["not run"] * 6]
    interval = "-" if row.interval is None else f"± {row.interval * 100:.2f}"
    count = "" if len(row.accuracies) == row.seeds else f" ({len(row.accuracies)} of {row.seeds} seeds)"
    return [
        rate,
        f"{row.mean:.2%}{count}",
        interval,
        f"{min(row.accuracies):.2%} to {max(row.accuracies):.2%}",
        "-" if row.core_seconds is None else f"{row.core_seconds:.0f}",
        f"{row.parameters:,}",
        f"{row.flat} of {len(row.accuracies)}",
    ]


def draw(study: Study, results: Mapping[str, Any]) -> Figure:
    """Draw the test accuracies of the contenders, and beside them the choice of their learning rates.

    If contenders have `x` and `series`, the accuracies are lines over x. If the study's `x` is compute, they are lines
    over the operations and over the seconds of training.
    """
    rows = rows_of(study, results)
    fields: dict[str, Any] = {name: contender or {} for name, contender in study.description["contenders"].items()}
    images = sorted({each["x"] for each in fields.values() if "x" in each})
    if study.description.get("x") == COMPUTE:
        done = [row for row in rows if row.operations is not None]
        places = {
            "floating-point operations of training (TFLOP)": {
                row.contender: (row.operations or 0) / TERA for row in done
            },
            "core seconds": {row.contender: row.core_seconds for row in done if row.core_seconds is not None},
        }
    else:
        places = {images_axis(study): {name: each["x"] for name, each in fields.items() if "x" in each}}
        places = {label: values for label, values in places.items() if values}
    figure = plain_figure(9.0 + 3.0 * (len(places) > 1), 4.0 if places else 1.4 + 0.45 * len(rows))
    *ends, rates = figure.subplots(1, max(1, len(places)) + 1, width_ratios=[3] * max(1, len(places)) + [2])
    if places:
        series = {name: each["series"] for name, each in fields.items()}
        for axis, (label, of_contenders) in zip(ends, places.items(), strict=True):
            colors = draw_lines(axis, label, of_contenders, series, rows)
    else:
        colors = _draw_rows(ends[0], rows)
    for row in rows:
        if row.choices:
            tried = sorted(row.choices)
            values = [100 * row.choices[each] for each in tried]
            turn = images.index(fields[row.contender]["x"]) if images else turn_of(row.contender, colors)
            marker, style = LOOKS[turn]
            look: dict[str, Any] = {"color": colors[row.contender], "marker": marker, "linestyle": style}
            rates.plot(tried, values, linewidth=1, markersize=4, **look)
    _log_scale(rates, {rate for row in rows for rate in row.choices})
    rates.set(xlabel="peak learning rate", ylabel="validation accuracy (%), seed 0")
    if images:
        looks = zip(images, LOOKS, strict=False)
        handles = [Line2D([], [], color="gray", marker=look[0], linestyle=look[1], label=f"{x:,}") for x, look in looks]
        rates.legend(handles=handles, title="images", fontsize=8, frameon=False)
    for axis in (*ends, rates):
        add_grid(axis)
    figure.suptitle(study.description["title"], fontsize=11)
    return figure


def images_axis(study: Study) -> str:
    """Return the label of the `x` of contenders: training images, or pre-training images if all have two stages."""
    after = all("after" in (contender or {}) for contender in study.description["contenders"].values())
    return "images of pre-training" if after else "training images"


def add_grid(axis: Axes) -> None:
    """Draw a grid behind the data of an axis, and hide two of its four borders."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)


def _log_scale(axis: Axes, values: Collection[float]) -> None:
    """Make the x axis logarithmic, with ticks at these values; matplotlib's own ticks are math text."""
    axis.set_xscale("log")
    axis.set_xticks([*sorted(values)], [f"{value:,g}" for value in sorted(values)])
    axis.set_xticks([], minor=True)


def turn_of(contender: str, colors: Mapping[str, str]) -> int:
    """Return how many earlier contenders have the same colour."""
    return [name for name, color in colors.items() if color == colors[contender]].index(contender)


def _draw_rows(axis: Axes, rows: Sequence[Row]) -> dict[str, str]:
    """Draw each contender in a row of its own, and return the colours."""
    colors = {row.contender: LINES[place % len(LINES)] for place, row in enumerate(rows)}
    for place, row in enumerate(rows):
        color = colors[row.contender]
        look: dict[str, Any] = {"color": color, "marker": LOOKS[turn_of(row.contender, colors)][0], "s": 20}
        axis.scatter([100 * each for each in row.accuracies], [place] * len(row.accuracies), **look)
        if row.mean is None:
            axis.text(0.02, place, "not run yet", transform=axis.get_yaxis_transform(), fontsize=8, va="center")
            continue
        half = None if row.interval is None else 100 * row.interval
        axis.errorbar(100 * row.mean, place, xerr=half, fmt="|", color=color, markersize=14, capsize=4)
    axis.set_yticks(range(len(rows)), [row.contender for row in rows])
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_xlabel("test accuracy (%): runs, mean, 95% interval")
    return colors


def draw_lines(
    axis: Axes, label: str, places: Mapping[str, float], series: Mapping[str, str], rows: Sequence[Row]
) -> dict[str, str]:
    """Draw the mean of each series over the x of its contenders, with the single runs, and return the colours."""
    names = [*dict.fromkeys(series.values())]
    colors = {name: LINES[place % len(LINES)] for place, name in enumerate(names)}
    for name in names:
        own = [row for row in rows if series[row.contender] == name and row.mean is not None]
        for row in own:
            accuracies = [100 * each for each in row.accuracies]
            axis.scatter([places[row.contender]] * len(accuracies), accuracies, s=12, color=colors[name])
        line = sorted((places[row.contender], 100 * (row.mean or 0)) for row in own)
        axis.plot(
            *zip(*line, strict=True) if line else ([], []),
            color=colors[name],
            label=name if own else f"{name} (not run yet)",
        )
    _log_scale(axis, _ticks(places.values()))
    axis.set(xlabel=label, ylabel="test accuracy (%)")
    axis.legend(fontsize=8, frameon=False)
    return {contender: colors[name] for contender, name in series.items()}


def _ticks(values: Collection[float]) -> set[float]:
    """Return the values, or only the round numbers if there are many values."""
    if len({*values}) <= 4:
        return {*values}
    powers = range(math.floor(math.log10(min(values))), math.ceil(math.log10(max(values))) + 1)
    round_ones = {float(f"{digit}e{power}") for power in powers for digit in (1, 2, 5)}
    return {value for value in round_ones if min(values) / 2 <= value <= 2 * max(values)}


if __name__ == "__main__":
    sys.exit(main())

"""Shared sweep of forward pass and training step: every package at each size, batch and dtype."""

import argparse
from collections.abc import Callable
from dataclasses import replace

import torch

from benchmarks import harness
from benchmarks.harness import Case, Result, compare, is_installed, report
from benchmarks.models import (
    LARGE,
    PATCHES,
    PEERS,
    Setting,
    large_product,
    matrix_shapes,
    operations,
    peak_rate,
    products,
)
from plain_vit.configuration_plain_vit import PRESETS

# Model sizes with their batch sizes, and dtypes, for CPU and GPU; `--quick` measures only the small model.
FORWARD = {"cpu": ["base:8", "tiny:32"], "cuda": ["base:128", "large:64", "huge:32"]}
TRAINING = {"cpu": ["tiny:32", "small:16"], "cuda": ["base:128", "large:64", "huge:16"]}
QUICK = {"cpu": ["tiny:32"], "cuda": ["base:128"]}
DTYPES = {"cpu": ["float32", "bfloat16"], "cuda": ["bfloat16"]}

AT_ONCE = 8  # cases prepared at a time on a GPU, of training steps fewer if more do not fit into its memory
# Of each token, block and channel in a step, and the part of the memory for steps; weights and optimizer take the rest.
STEP_BYTES, FREE = 36, 0.6

# The lower bound for every package, and the measurement of the matrix rate.
BARE, LARGE_PRODUCT = "bare products", "one large product"


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return an argument parser with the common options."""
    result = harness.parser(description)
    result.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    result.add_argument("--sizes", nargs="+", help="with batches, as in base:8 tiny:32")
    packages = [package for package in ("plain_vit", *PEERS) if is_installed(package)]
    result.add_argument("--packages", nargs="+", choices=packages, default=packages, help="ours first")
    result.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"))
    result.add_argument("--quick", action="store_true", help="one size, in three turns")
    result.add_argument("--one-process", action="store_true", help="all cases in one process, not in one each")
    return result


def sweep(
    name: str,
    title: str,
    notes: str,
    cases: Callable[[Setting], list[Case]],
    sizes: dict[str, list[str]],
    training: bool,
    chosen: argparse.Namespace,
) -> None:
    """Time the cases of every requested setting and the bare matrix products, and report the results.

    Args:
        name: Name of the run.
        title: Title of the page.
        notes: Notes of the page.
        cases: Returns the cases of a setting, ours first.
        sizes: `FORWARD` or `TRAINING`, the defaults of the command line.
        training: Whether a turn is a training step.
        chosen: The parsed command line.
    """
    device = chosen.device
    turns = min(chosen.turns, 3) if chosen.quick else chosen.turns
    dtypes = [getattr(torch, one) for one in chosen.dtypes or DTYPES[device]]
    pairs = [one.partition(":") for one in chosen.sizes or (QUICK if chosen.quick else sizes)[device]]
    settings = [Setting(size, int(batch), dtype, device) for dtype in dtypes for size, _, batch in pairs]
    results: list[Result] = []
    lines = ["| case | images/s | share of the limit | TFLOP/s | of the matrix rate | MFU |"]
    lines.append("| --- | ---: | ---: | ---: | ---: | ---: |")
    if missing := [package for package in PEERS if package not in chosen.packages]:
        notes += f"\nNot measured here: {', '.join(missing)}."
    for setting in settings:
        bare = setting.case(BARE, products, training=training)
        large = replace(setting.case(LARGE_PRODUCT, large_product), images=None)
        chosen_cases = [case for case in cases(setting) if case.arguments["package"] in chosen.packages]
        *measured, of_large = compare(
            [*chosen_cases, bare, large], turns, at_once(setting, training), keep_memory=True,
            one_process=chosen.one_process,
        )  # fmt: skip
        limit = measured[-1].seconds
        shapes = matrix_shapes(setting.size, setting.batch)
        matrix_rate, peak = 2 * LARGE[device] ** 3 / of_large.seconds, peak_rate(setting)
        for one in measured:
            rate = operations(shapes, training) / one.seconds
            shares = f"{limit / one.seconds:.2f} | {rate / 1e12:.3f} | {rate / matrix_rate:.2f} | "
            shares += "-" if peak is None else f"{rate / peak:.1%}"
            lines.append(f"| {one.name} | {setting.batch / one.seconds:.1f} | {shares} |")
        lines.append(f"| {of_large.name} | - | - | {matrix_rate / 1e12:.3f} | 1.00 | - |")
        results += [*(replace(one, limit=limit) for one in measured), of_large]
        page = "\n".join([notes, "", *lines])
        # Written after each setting, so that results are kept if a later one fails or the time runs out.
        report(name, title, page, results, chosen.write, last=setting == settings[-1])


def at_once(setting: Setting, training: bool) -> int:
    """Return how many cases to prepare at a time."""
    if setting.device == "cpu":
        return 1
    if not training:
        return AT_ONCE
    width, depth, *_ = PRESETS[setting.size].values()
    step = STEP_BYTES * setting.batch * ((224 // PATCHES[setting.size]) ** 2 + 1) * depth * width
    return max(1, min(AT_ONCE, int(FREE * torch.cuda.get_device_properties(0).total_memory / step)))

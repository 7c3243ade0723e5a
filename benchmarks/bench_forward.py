"""Benchmark of the forward pass of each package's ViT with the same weights: eager, prepared, compiled."""

import argparse
from collections.abc import Callable

import torch

from benchmarks.harness import Case, Checked, name_of_run
from benchmarks.models import PEERS, Setting, build, logits_of, require_equal
from benchmarks.sweep import FORWARD, parser, sweep
from plain_vit import prepare_for_inference
from plain_vit.attention_plain_vit import FAST_ATTENTION
from plain_vit.conversion import from_module

NOTES = """One set of weights in every package (vit-pytorch's ViT has two norms more and no biases in query, key and
value; its own weights are checked against their conversion); the logits were found equal before anything was timed, and
those of each case, in its mode and dtype, near the eager ones in float32 (1e-5, in bfloat16 0.05, of the largest; "off
by" is the largest difference relative to the largest logit).
"Limit" is the time of the bare matrix products of the same forward pass, in the same shapes and dtype, by torch's own
`mm` and `bmm`, timed in the same turns. Weights that are packed beforehand can beat it. The "matrix rate" is that of
one large product. "Fast attention" is `attn_implementation="plain_vit_fast"`; "prepared" is
`plain_vit.prepare_for_inference`; "as vit_pytorch" is the model converted from vit-pytorch's, with the attention that
gives its bits (`attn_implementation="eager"`); "compiled" is torch.compile, on a CPU
with the weights frozen, "max-autotune" its mode of that name;
"prepared and compiled" is `prepare_for_inference(compile=True)`. Every process keeps what a pass frees for the next
one."""

AS_VIT_PYTORCH = "as vit_pytorch"
AUTOTUNED = "max-autotune"
MODES = ("eager", AS_VIT_PYTORCH, "prepared", "fast attention", "compiled", "prepared and compiled", AUTOTUNED)
PACKAGES = {
    "eager": ("plain_vit", *PEERS),
    "compiled": ("plain_vit", *PEERS),
    AUTOTUNED: ("timm",),
}  # others: ours alone
TOLERANCES = {
    torch.float32: 1e-5,
    torch.bfloat16: 5e-2,
}  # relative to the largest float32 logit; rounding in bfloat16 costs 1e-2 to 2e-2


def forward(setting: Setting, package: str, mode: str) -> Callable[[], object]:
    """Return a forward pass of a package's model in one of the modes of `cases`."""
    converted = mode == AS_VIT_PYTORCH
    model = from_module(build("vit_pytorch", setting.size)) if converted else build(package, setting.size)
    model = model.eval().to(setting.device)
    images = setting.images()
    with torch.inference_mode():
        expected = logits_of(model(images))
    if mode.startswith("prepared"):
        model = prepare_for_inference(
            model, dtype=setting.dtype, compile=mode.endswith("compiled"), batch_size=setting.batch
        )
    else:
        model = model.to(setting.dtype)
    if mode == "fast attention":
        model.set_attn_implementation(FAST_ATTENTION)
    if converted:
        model.set_attn_implementation("eager")
    if mode == AUTOTUNED:
        model = torch.compile(model, mode=AUTOTUNED)
    if mode == "compiled":
        model = torch.compile(model, options={"freezing": True} if setting.device == "cpu" else None)
    images = images.to(setting.dtype)

    @torch.inference_mode()
    def classify() -> torch.Tensor:
        return logits_of(model(images))

    return Checked(classify, require_equal(classify(), expected, TOLERANCES[setting.dtype], f"{package}, {mode}"))


def cases(setting: Setting, chosen: argparse.Namespace) -> list[Case]:
    """Return every package, ours first."""
    modes = chosen.modes or MODES[: 4 if setting.dtype == torch.bfloat16 else 3]  # without those that compile
    return [
        setting.case(f"{package}, {mode}", forward, package=package, mode=mode)
        for mode in modes
        for package in PACKAGES.get(mode, ("plain_vit",))
    ]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--modes", nargs="+", choices=MODES, help="only these; compiling takes minutes")
    chosen = options.parse_args()
    sweep(
        name_of_run("forward", options, chosen), "Forward pass, 224 pixels", NOTES,
        lambda setting: cases(setting, chosen), FORWARD, training=False, chosen=chosen,
    )  # fmt: skip


if __name__ == "__main__":
    main()

"""Benchmark of a training step of each package's ViT with the same weights: forward, loss, backward, AdamW."""

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
from torch.nn.functional import cross_entropy

from benchmarks.harness import Case, name_of_run
from benchmarks.models import PEERS, Setting, build, logits_of
from benchmarks.sweep import TRAINING, parser, sweep
from plain_vit.system.environment import has_slow_float32_products
from plain_vit.training import fast_steps
from plain_vit.training.hardware.products import onednn_products

RECORDED = "reduce-overhead"  # torch.compile's name for CUDA graphs
MODES = ("eager", "compiled")
AS_TRAINED = "as our scripts train"
CHECKPOINTING = ("plain_vit", "timm", "transformers")  # packages whose classes offer it

NOTES = """One set of weights in every package (vit-pytorch's ViT has two norms more and no biases in query, key and
value; its own weights are checked against their conversion); the logits were found equal before anything was timed.
A turn is forward, cross-entropy, backward and a step of one fused AdamW on float32 weights; "bfloat16" is autocast.
"Limit" is the time of the bare matrix products of that step (three times the forward pass's), in the same shapes and
dtype, by torch's own `mm` and `bmm`, timed in the same turns; the "matrix rate" is that of one large product. The MFU
is that of these products' operations, relative to the GPU's dense peak.
Memory is what a step adds to weights and optimizer. "As our scripts train" is a step within `fast_steps`: one product
for query, key and value, and a last block that computes only the class token, which limit and MFU do not know; and on
processors where this is faster, dense layers in float32 multiply with oneDNN.
Every process keeps what a step frees for the next one, as our training scripts do: otherwise the pages that the system
fills anew are a tenth to a third of each step."""


def step(setting: Setting, package: str, mode: str) -> Callable[[], object]:
    """Return a training step of a package's model; the mode says whether it is compiled and checkpointed."""
    train = trainer(setting, package, mode)
    images, labels = setting.images(), torch.randint(0, 1000, (setting.batch,), device=setting.device)
    train(images, labels)
    return partial(train, images, labels)


def trainer(setting: Setting, package: str, mode: str) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Return a function that trains a package's model on images and labels."""
    module = build(package, setting.size).to(setting.device).train()
    if "checkpointed" in mode and package == "timm":
        module.set_grad_checkpointing()
    elif "checkpointed" in mode:
        module.activation_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
    model = torch.compile(module, mode=RECORDED if RECORDED in mode else None) if "compiled" in mode else module

    multiplies = setting.device == "cpu" and setting.dtype == torch.float32 and has_slow_float32_products()

    def train(images: torch.Tensor, labels: torch.Tensor) -> None:
        try:
            with (
                fast_steps(module) if AS_TRAINED in mode else nullcontext(),
                onednn_products() if AS_TRAINED in mode and multiplies else nullcontext(),
            ):
                with torch.autocast(setting.device, setting.dtype, enabled=setting.dtype != torch.float32):
                    loss = cross_entropy(logits_of(model(images)).float(), labels)
                loss.backward()
            optimizer.step()
        finally:
            optimizer.zero_grad()  # also of a step that does not fit into memory

    return train


def cases(setting: Setting, chosen: argparse.Namespace) -> list[Case]:
    """Return every package, ours first."""
    modes = [f"{mode}, {RECORDED}" if mode == "compiled" and chosen.recorded else mode for mode in chosen.modes]
    modes = [f"{mode}, checkpointed" if chosen.checkpointing else mode for mode in modes]
    packages = CHECKPOINTING if chosen.checkpointing else ("plain_vit", *PEERS)
    pairs = [(package, mode) for mode in modes for package in packages]
    pairs[1:1] = [("plain_vit", f"{mode}, {AS_TRAINED}") for mode in modes]
    return [setting.case(f"{package}, {mode}", step, package=package, mode=mode) for package, mode in pairs]


def main() -> None:
    options = parser(__doc__)
    options.add_argument(
        "--checkpointing", action="store_true", help="with gradient checkpointing, for packages that support it"
    )
    options.add_argument("--recorded", action="store_true", help=f"compile in the mode {RECORDED}: CUDA graphs")
    options.add_argument("--modes", nargs="+", choices=MODES, default=MODES[:1], help="compiling takes minutes")
    chosen = options.parse_args()
    if chosen.recorded and "compiled" not in chosen.modes:
        options.error("--recorded is a mode of the compiler: add --modes compiled")
    sweep(
        name_of_run("train-step", options, chosen), "Training step, 224 pixels", NOTES,
        lambda setting: cases(setting, chosen), TRAINING, training=True, chosen=chosen,
    )  # fmt: skip


if __name__ == "__main__":
    main()

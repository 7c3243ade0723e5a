"""Open public checkpoints of every source, and compare pixels and outputs at every stage with the original package.

    python -m tools.verify_public_checkpoints --list
    python -m tools.verify_public_checkpoints --only 'timm/vit_*' --out public.md
    python -m tools.verify_public_checkpoints --checkpoint transformers=my/vit --checkpoint torchvision=vit.pth

The first run downloads a checkpoint into the cache of its package. Both models see the same image, prepared by the
source's own code. (Google's code for `.npz` files does not use torch: plain-vit prepares the image, and timm's outputs
are compared.) A checkpoint passes if no stage differs by more than 1e-5 of its largest value and the image processor
gives the same pixels. The exit code is 1 if any checkpoint differs or cannot be opened; all are checked.

There are no public weights for vit-pytorch. Check your own with
`--checkpoint vit_pytorch=FILE,num_attention_heads=8,image_size=256,patch_size=32`; the settings after the path are
arguments of `plain_vit.conversion.from_checkpoint`.
"""

import argparse
import datetime
import fnmatch
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from PIL import Image
from torch import nn
from tqdm import tqdm

from plain_vit.conversion import Converted, from_checkpoint
from plain_vit.conversion.parity import compare_models, probe_images
from plain_vit.conversion.registry import FORMATS
from plain_vit.conversion.report import TOLERANCE
from plain_vit.errors import ExportError
from plain_vit.system.environment import version
from plain_vit.system.extras import needs
from plain_vit_command import size

TIMM = """
    vit_tiny_patch16_224.augreg_in21k_ft_in1k vit_small_patch16_224.augreg_in1k vit_small_patch16_224.dino
    vit_base_patch16_224.orig_in21k vit_base_patch16_224.mae vit_base_patch16_224_miil.in21k_ft_in1k
    vit_medium_patch16_gap_240.sw_in12k vit_base_patch16_rpn_224.sw_in1k vit_base_patch32_clip_224.openai
    vit_base_patch32_clip_quickgelu_224.openai vit_base_patch16_siglip_224.webli vit_small_patch14_dinov2.lvd142m
    vit_small_patch14_reg4_dinov2.lvd142m vit_dwee_patch16_reg1_gap_256.sbb_in1k vit_pwee_patch16_reg1_gap_256.sbb_in1k
    vit_dpwee_patch16_reg1_gap_256.sbb_in1k vit_little_patch16_reg4_gap_256.sbb_in1k
    vit_so150m_patch16_reg4_gap_256.sbb_e250_in12k_ft_in1k vit_intern300m_patch14_448.ogvl_dist
    aimv2_large_patch14_224.apple_pt beit3_base_patch16_224.in22k_ft_in1k test_vit.r160_in1k test_vit3.r160_in1k
    deit_tiny_patch16_224.fb_in1k deit_small_distilled_patch16_224.fb_in1k vit_tiny_r_s16_p8_224.augreg_in21k_ft_in1k
    vit_small_r26_s32_224.augreg_in21k_ft_in1k
"""
TRANSFORMERS = """
    google/vit-base-patch16-224 google/vit-base-patch16-224-in21k google/vit-large-patch32-384
    facebook/deit-tiny-patch16-224 facebook/deit-small-distilled-patch16-224 facebook/deit-base-distilled-patch16-224
    facebook/dino-vits16 facebook/dino-vitb8 facebook/vit-msn-small facebook/vit-msn-base facebook/vit-mae-base
    facebook/ijepa_vith14_1k facebook/dinov2-small facebook/dinov2-base facebook/dinov2-giant
    facebook/dinov2-small-imagenet1k-1-layer facebook/dinov2-with-registers-small
    facebook/dinov2-with-registers-small-imagenet1k-1-layer openai/clip-vit-base-patch32
    openai/clip-vit-large-patch14-336 google/siglip-base-patch16-224 google/siglip-so400m-patch14-384
    google/siglip2-base-patch16-224 apple/aimv2-large-patch14-224-lit
"""
TORCHVISION = """
    ViT_B_16_Weights.IMAGENET1K_V1 ViT_B_16_Weights.IMAGENET1K_SWAG_E2E_V1 ViT_B_16_Weights.IMAGENET1K_SWAG_LINEAR_V1
    ViT_B_32_Weights.IMAGENET1K_V1 ViT_L_16_Weights.IMAGENET1K_V1 ViT_L_32_Weights.IMAGENET1K_V1
    ViT_H_14_Weights.IMAGENET1K_SWAG_LINEAR_V1
"""
GOOGLE = """
    vit_models/imagenet21k/ViT-B_16.npz
    vit_models/imagenet21k/R50+ViT-B_16.npz
    vit_models/sam/ViT-B_16.npz
    vit_models/augreg/Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0.npz
    vit_models/augreg/R_Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0.npz
    vit_models/augreg/R26_S_32-i21k-300ep-lr_0.001-aug_medium2-wd_0.03-do_0.0-sd_0.0.npz
    big_vision/flexivit/vit_b16_i21k_300ep.npz
    big_vision/vit_s16_i1k_90ep.npz
"""


@dataclass(frozen=True)
class Entry:
    """One checkpoint.

    Args:
        source: Package of the checkpoint, one of `PEERS`.
        name: Hub id, torchvision weights, or path below storage.googleapis.com; a local path if it is your own.
        hints: Settings that the checkpoint does not store, as arguments of `from_checkpoint`.
        local: Whether `name` is a local path.
    """

    source: str
    name: str
    hints: dict[str, Any] = field(default_factory=dict)
    local: bool = False


# The last Google file is a SimpleViT; no torch package supports it or the models with a pre-training head.
ENTRIES = [
    *(Entry("timm", f"timm/{name}") for name in TIMM.split()),
    *(Entry("transformers", name) for name in TRANSFORMERS.split()),
    *(Entry("torchvision", name) for name in TORCHVISION.split()),
    *(Entry("google", name, {"hidden_act": "gelu"}) for name in GOOGLE.split()),
]


@dataclass(frozen=True)
class Row:
    """Result for one checkpoint: the largest relative difference over all stages, and the largest pixel difference."""

    entry: Entry
    verdict: str
    largest: float | None = None
    stage: str = ""
    pixels: float | None = None

    @property
    def passed(self) -> bool:
        """Return whether the checkpoint passes."""
        return self.verdict in ("same", "opens")


# The original package's model for a checkpoint, and its preprocessing of an image to (C, H, W) in float32

Peer = tuple[nn.Module, Callable[[Image.Image], torch.Tensor] | None]


def peer_of_timm(place: str, converted: Converted) -> Peer:
    """Create timm's model from a folder or Hub repository."""
    with needs("timm"):
        import timm
        from timm.data import create_transform, resolve_data_config

    module = timm.create_model(f"local-dir:{place}" if Path(place).exists() else f"hf-hub:{place}", pretrained=True)
    return module, create_transform(**resolve_data_config({}, model=module))


def peer_of_transformers(place: str, converted: Converted) -> Peer:
    """Load a checkpoint into the transformers class that saved it, or the supported part of that class."""
    import transformers

    from plain_vit.conversion.sources.transformers.families import CONTAINERS

    named = transformers.AutoConfig.from_pretrained(place).architectures[0]
    if named == "CLIPModel":  # vision tower and projection have a class of their own
        whole = transformers.CLIPModel.from_pretrained(place)
        tower: Any = whole.config.vision_config
        tower.projection_dim = whole.config.projection_dim
        module = transformers.CLIPVisionModelWithProjection(tower)
        module.vision_model, module.visual_projection = whole.vision_model, whole.visual_projection
    elif named in CONTAINERS and not CONTAINERS[named].whole:
        parts = getattr(transformers, named).from_pretrained(place).modules()
        module = next(part for part in parts if type(part).__name__ == CONTAINERS[named].holds)
    else:
        module = getattr(transformers, str(converted.report.layout).split()[0]).from_pretrained(place)
    try:
        processor = transformers.AutoImageProcessor.from_pretrained(place)
    except (OSError, ValueError):  # the folder has no image processor
        return module, None
    return module, lambda image: processor(image, return_tensors="pt")["pixel_values"][0]


def peer_of_torchvision(place: str, converted: Converted) -> Peer:
    """Build torchvision's model: by name for published weights, otherwise from the converted config."""
    from torchvision.models import get_weight, vision_transformer

    published = [
        get_weight(f"{name}.{weights.name}")
        for name, kind in vars(vision_transformer).items() if name.endswith("_Weights")
        for weights in kind
    ]  # fmt: skip
    weights = next((one for one in published if Path(one.url).name == Path(place).name), None)
    if weights is None:
        module = FORMATS["torchvision"].build_module(converted.report.config, converted.report.layout)
    else:
        builder = type(weights).__name__.removesuffix("_Weights").lower()
        image_size = weights.transforms().crop_size[0]
        module = getattr(vision_transformer, builder)(image_size=image_size)
    module.load_state_dict(torch.load(place, weights_only=True))
    return module, None if weights is None else weights.transforms()


def peer_of_google(place: str, converted: Converted) -> Peer:
    """Build timm's model with the same configuration, and load the file with timm's own loader."""
    module = FORMATS["timm"].build_module(converted.report.config, None)
    cast(Any, module).load_pretrained(place)
    return module, None


def peer_of_vit_pytorch(place: str, converted: Converted) -> Peer:
    """Build vit-pytorch's model from the converted config, and load the state dict."""
    module = FORMATS["vit_pytorch"].build_module(converted.report.config, converted.report.layout)
    module.load_state_dict(torch.load(place, weights_only=True))
    return module, None


PEERS: dict[str, Callable[[str, Converted], Peer]] = {
    "timm": peer_of_timm,
    "transformers": peer_of_transformers,
    "torchvision": peer_of_torchvision,
    "google": peer_of_google,
    "vit_pytorch": peer_of_vit_pytorch,
}


def fetch(entry: Entry) -> tuple[str, dict[str, Any]]:
    """Return the path or Hub id of a checkpoint and its hints; download files that are not in a Hub repository."""
    if entry.local or entry.source in ("timm", "transformers"):
        return entry.name, entry.hints
    hints = entry.hints
    if entry.source == "torchvision":
        from torchvision.models import get_weight

        url = get_weight(entry.name).url
        hints = {**hints, "architecture": Path(url).stem}
    else:
        url = f"https://storage.googleapis.com/{entry.name}"
    path = Path(torch.hub.get_dir(), "checkpoints", url.rpartition("/")[2])
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(url.replace("+", "%2B"), str(path))
    return str(path), hints


def check(entry: Entry, image: Image.Image) -> Row:
    """Open one checkpoint, and compare it with its original package."""
    place, hints = fetch(entry)
    converted = from_checkpoint(place, format=entry.source, **hints)
    try:
        module, prepare = PEERS[entry.source](place, converted)
    except ExportError as error:  # no other package has this model
        return Row(entry, "opens", stage=f"nothing to compare with: {str(error).splitlines()[-1].strip(' -')}")
    pixels: float | None = None
    batch = probe_images(converted.report.config)
    if prepare is not None:
        theirs = prepare(image)
        ours = cast(Any, converted.image_processor)(image, return_tensors="pt")["pixel_values"][0]
        pixels = (ours - theirs).abs().max().item() if ours.shape == theirs.shape else float("inf")
        batch = theirs[None]
    stages = compare_models(module.float().eval(), converted.model.float(), batch)
    largest = max(stages, key=lambda stage: stage.relative)
    same = largest.relative <= TOLERANCE and not pixels
    return Row(entry, "same" if same else "differs", largest.relative, largest.stage, pixels)


def synthetic_image() -> Image.Image:
    """Return an image with smooth and rough parts, whose sides are not multiples of any crop."""
    rows, columns = np.mgrid[0:389, 0:523]
    noise = np.random.default_rng(0).integers(0, 64, (389, 523))
    levels = [127 + 96 * np.sin(rows / 17 + columns / 29), columns * 191 / 523 + noise, rows * 255 / 389]
    return Image.fromarray(np.stack(levels, axis=-1).clip(0, 255).astype(np.uint8))


def table(rows: Sequence[Row]) -> str:
    """Format the rows as a Markdown table, below the date and the versions."""
    packages = ("plain-vit", "torch", "transformers", "timm", "torchvision", "vit-pytorch")
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    lines = [
        f"{sum(row.passed for row in rows)} of {len(rows)} checkpoints pass. {datetime.date.today().isoformat()}, "
        f"{platform.machine()}, {versions}.",
        "",
        "| source | checkpoint | verdict | largest difference | at | pixels |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        largest, pixels = ("-" if value is None else f"{value:.1e}" for value in (row.largest, row.pixels))
        stage = row.stage.replace("|", "\\|")
        lines.append(f"| {row.entry.source} | {row.entry.name} | {row.verdict} | {largest} | {stage} | {pixels} |")
    return "\n".join(lines)


def local_entry(text: str) -> Entry:
    """Parse SOURCE=PATH[,hint=value...]."""
    (source, name), *hints = (part.partition("=")[::2] for part in text.split(","))
    if source not in PEERS or not name:
        raise argparse.ArgumentTypeError(f"{text!r}: expected SOURCE=PATH with SOURCE one of {', '.join(PEERS)}")
    return Entry(source, name, {key: value_of(value) for key, value in hints}, local=True)


def value_of(text: str) -> Any:
    """Parse a number, a size (224x192), or a word."""
    for read in (size, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the selected checkpoints; return 1 if any differs or fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the checkpoints and stop")
    parser.add_argument("--only", metavar="PATTERN", help="only those whose name matches, such as 'google *augreg*'")
    parser.add_argument("--checkpoint", type=local_entry, action="append", metavar="SOURCE=PATH[,HINT=VALUE]",
                        help="check this file or folder instead of the public ones; may be repeated")  # fmt: skip
    parser.add_argument("--image", type=Path, help="image to use (default: a synthetic one)")
    parser.add_argument("--out", type=Path, help="also write the table to this Markdown file")
    options = parser.parse_args(arguments)
    entries = options.checkpoint or ENTRIES
    if options.only:
        entries = [
            entry for entry in entries
            if any(fnmatch.fnmatch(text, options.only) for text in (entry.name, f"{entry.source} {entry.name}"))
        ]  # fmt: skip
    if not entries:
        parser.error(f"no checkpoint matches {options.only!r}: see --list")
    if options.list:
        print("\n".join(f"{entry.source} {entry.name}" for entry in entries))
        return 0
    image = Image.open(options.image).convert("RGB") if options.image else synthetic_image()
    rows: list[Row] = []
    bar = tqdm(entries, unit="checkpoint")
    for entry in bar:
        bar.set_postfix_str(entry.name)
        try:
            rows.append(check(entry, image))
        except Exception as error:  # after any error, continue with the next
            rows.append(Row(entry, "failed", stage=f"{type(error).__name__}: {str(error).splitlines()[0]}"))
    print(table(rows))
    if options.out:
        options.out.write_text(table(rows) + "\n", encoding="utf-8")
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

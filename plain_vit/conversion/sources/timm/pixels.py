"""timm's evaluation transform as an image processor, in both directions."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from transformers.image_processing_utils import BaseImageProcessor

from ....errors import CheckpointError, ExportError
from ....image_processing_plain_vit import PlainViTImageProcessor, SourcePreprocessing
from ...tables.infer import pair
from ...tables.pixels import IMAGENET_MEAN, IMAGENET_STD, INTERPOLATIONS, unknown_value

# Defaults of timm's transform for keys missing in a pretrained_cfg (timm/data/config.py, timm/data/constants.py).
TIMM_DEFAULTS: dict[str, Any] = {
    "input_size": (3, 224, 224),
    "interpolation": "bicubic",
    "mean": IMAGENET_MEAN,
    "std": IMAGENET_STD,
    "crop_pct": 0.875,
    "crop_mode": "center",
}


def processor_from_timm(
    pretrained_cfg: Mapping[str, Any],
    *,
    num_channels: int | None = None,
    image_size: int | Sequence[int] | None = None,
) -> PlainViTImageProcessor:
    """Return a processor with the same pixels as timm's evaluation transform.

    Args:
        pretrained_cfg: As in a timm model or in its `config.json`; missing keys have timm's defaults.
        num_channels: Number of channels of the model, if it differs from the first entry of `input_size`.
        image_size: Image size of the model in pixels, an int or (height, width), if it differs from `input_size`.

    Raises:
        CheckpointError: if the entries contradict each other or timm itself cannot use them.

    Source:
        timm 1.0.31, `resolve_data_config` and `transforms_imagenet_eval`.
    """
    # timm uses its default for any empty value, including 0.
    cfg: dict[str, Any] = {key: pretrained_cfg.get(key) or default for key, default in TIMM_DEFAULTS.items()}
    if cfg["interpolation"] not in INTERPOLATIONS:
        raise CheckpointError(unknown_value("interpolation", cfg["interpolation"], INTERPOLATIONS))
    channels = num_channels or cfg["input_size"][0]
    mean, std = (_per_channel(name, cfg[name], channels) for name in ("mean", "std"))
    height, width = pair(image_size or cfg["input_size"][-2:])
    if not 1e-3 <= cfg["crop_pct"] <= 1e3:
        raise CheckpointError(
            f"crop_pct is {cfg['crop_pct']}: expected the fraction of an image that is kept, such as 0.9"
        )
    scaled = {side: math.floor(pixels / cfg["crop_pct"]) for side, pixels in (("height", height), ("width", width))}
    settings: dict[str, Any] = {"size": scaled, "crop_size": {"height": height, "width": width}, "do_center_crop": True}
    if cfg["crop_mode"] == "squash":
        if scaled == settings["crop_size"]:
            settings = {"size": scaled}
    elif cfg["crop_mode"] == "border":
        settings |= {"resize_mode": "contain", "pad_color": [round(255 * level) for level in mean]}
    elif cfg["crop_mode"] == "center" and scaled["height"] == scaled["width"]:
        settings["size"] = {"shortest_edge": scaled["height"]}
    elif cfg["crop_mode"] == "center":
        settings["resize_mode"] = "cover"
    else:
        raise CheckpointError(unknown_value("crop_mode", cfg["crop_mode"], ("center", "squash", "border")))
    resample = INTERPOLATIONS[cfg["interpolation"]]
    return PlainViTImageProcessor(image_mean=mean, image_std=std, resample=resample, **settings)


def processor_to_timm(processor: BaseImageProcessor) -> dict[str, Any]:
    """Return the entries of a `pretrained_cfg` with which timm prepares the same pixels.

    timm resizes with Pillow. A stock processor with the torchvision backend differs by up to two levels of 255.

    Args:
        processor: Our processor of either backend, or a stock processor without a centre crop.

    Raises:
        ExportError: if timm's evaluation transform cannot do what the processor does.
    """
    settings = processor.to_dict()
    size, crop = settings["size"], settings["crop_size"] if settings.get("do_center_crop") else {}
    mode, target = settings.get("resize_mode"), crop or size
    mean, std = tuple(settings["image_mean"]), tuple(settings["image_std"])
    if not settings["do_normalize"]:
        mean, std = (0.0,) * len(mean), (1.0,) * len(std)
    border = [round(255 * level) for level in mean]
    names = {number: name for name, number in INTERPOLATIONS.items()}
    faults = {
        "do_resize=False": not settings["do_resize"],
        "do_rescale=False": not settings["do_rescale"],
        f"rescale_factor={settings['rescale_factor']}": settings["rescale_factor"] != 1 / 255,
        "resize_with='torch'": settings.get("resize_with") == "torch",
        f"max_num_patches={settings.get('max_num_patches')}": settings.get("max_num_patches") is not None,
        "do_pad=True": bool(settings.get("do_pad")),
        f"resample={settings['resample']}": settings["resample"] not in names,
        "transformers' own centre crop, which rounds down where timm rounds half to even":
            bool(crop) and not isinstance(processor, SourcePreprocessing),
        f"size={size}": set(size) not in ({"height", "width"}, {"shortest_edge"}),
        "an output whose size depends on the image":
            target.keys() != {"height", "width"} or (mode == "cover" and not crop),
        "a crop filled with another colour than the mean's":
            mode == "contain" and list(settings.get("pad_color") or [0] * len(mean)) != border,
    }  # fmt: skip
    if not any(faults.values()):
        height, width = target["height"], target["width"]
        scaled = (size["shortest_edge"],) * 2 if "shortest_edge" in size else (size["height"], size["width"])
        crop_pct = _crop_pct((height, width), scaled)
        faults[f"a crop of {height}x{width} out of {scaled[0]}x{scaled[1]}, as one crop_pct"] = crop_pct is None
        # timm chooses between its two ways to cover by whether both sides are resized to the same length.
        faults["resize_mode='cover' of a square size"] = mode == "cover" and scaled[0] == scaled[1]
    if any(faults.values()):
        raise ExportError(
            "timm's evaluation transform cannot represent this image processor: pass another one, or none",
            [part for part, is_there in faults.items() if is_there],
        )
    return {
        "input_size": (len(mean), height, width),
        "interpolation": names[settings["resample"]],
        "crop_pct": crop_pct,
        "crop_mode": "border" if mode == "contain" else "center" if mode or "shortest_edge" in size else "squash",
        "mean": mean,
        "std": std,
    }


def _per_channel(name: str, levels: float | Sequence[float], channels: int) -> tuple[float, ...]:
    """Return one value per channel; a single value, or a list of equal values, applies to all channels."""
    levels = [levels] if isinstance(levels, int | float) else levels
    if len(levels) == channels:
        return tuple(levels)
    if len(set(levels)) == 1:
        return tuple(levels[:1]) * channels
    raise CheckpointError(
        f"{name} has {len(levels)} values {tuple(levels)} and the model {channels} channels: "
        "give image_mean and image_std, one number per channel"
    )


def _crop_pct(crop: tuple[int, int], scaled: tuple[int, int]) -> float | None:
    """Return the shortest decimal from which timm computes this resized size for this crop; None if there is none."""
    largest = min(side / pixels for side, pixels in zip(crop, scaled, strict=True))
    for digits in range(1, 18):
        for share in (round(largest, digits), math.floor(largest * 10**digits) / 10**digits):
            if share > 0 and tuple(math.floor(side / share) for side in crop) == scaled:
                return share
    return None

"""OpenCLIP's evaluation transform as an image processor."""

from collections.abc import Mapping, Sequence
from typing import Any

from ....errors import CheckpointError
from ....image_processing_plain_vit import PlainViTImageProcessor
from ...tables.infer import pair
from ...tables.pixels import INTERPOLATIONS, unknown_value

# Defaults of open_clip's transform for keys missing in a preprocess_cfg (its transform.py and constants.py).
OPENAI_MEAN = (0.48145466, 0.4578275, 0.40821073)
OPENAI_STD = (0.26862954, 0.26130258, 0.27577711)
DEFAULTS: dict[str, Any] = {
    "mode": "RGB",
    "mean": OPENAI_MEAN,
    "std": OPENAI_STD,
    "interpolation": "bicubic",
    "resize_mode": "shortest",
    "fill_color": 0,
}
# "random" chooses the filter only in training.
FILTERS = {"bicubic": "bicubic", "random": "bicubic", "bilinear": "bilinear"}
RESIZE_MODES = ("shortest", "longest", "squash")
CHANNELS = 3


def processor_from_open_clip(preprocess_cfg: Mapping[str, Any], image_size: int | Sequence[int]) -> Any:
    """Return a processor with the same pixels as open_clip's evaluation transform, for RGB and grey images.

    open_clip converts images to RGB after resizing. This processor converts them first, which gives other pixels for
    transparent, palette and CMYK images.

    Args:
        preprocess_cfg: As in an `open_clip_config.json`; missing keys and empty values have open_clip's defaults.
        image_size: Input size of the model in pixels, an int or (height, width). open_clip ignores another `size`.

    Raises:
        CheckpointError: for entries that open_clip itself cannot use.

    Source:
        open_clip 3.3.0, `image_transform`.
    """
    cfg = {name: preprocess_cfg.get(name) or default for name, default in DEFAULTS.items()}
    for name, known in (("mode", ("RGB",)), ("interpolation", tuple(FILTERS)), ("resize_mode", RESIZE_MODES)):
        if cfg[name] not in known:
            raise CheckpointError(unknown_value(name, cfg[name], known))
    height, width = pair(image_size)
    size = {"height": height, "width": width}
    settings: dict[str, Any] = {"size": size, "crop_size": size, "do_center_crop": True}
    interpolation = FILTERS[cfg["interpolation"]]
    if cfg["resize_mode"] == "squash":
        settings = {"size": size}
    elif cfg["resize_mode"] == "longest":
        settings |= {"resize_mode": "contain", "pad_color": [cfg["fill_color"]] * CHANNELS}
    elif height == width:
        settings["size"] = {"shortest_edge": height}
    else:
        settings["resize_mode"] = "cover"
        interpolation = "bicubic"  # open_clip ignores the configured filter here
    mean, std = (_per_channel(name, cfg[name]) for name in ("mean", "std"))
    return PlainViTImageProcessor(image_mean=mean, image_std=std, resample=INTERPOLATIONS[interpolation], **settings)


def _per_channel(name: str, levels: Any) -> tuple[float, ...]:
    """Return one value per channel."""
    values = tuple(levels) if isinstance(levels, list | tuple) else (levels,) * CHANNELS
    if len(values) != CHANNELS:
        raise CheckpointError(f"{name} has {len(values)} values: expected one, or one per channel of RGB")
    return values

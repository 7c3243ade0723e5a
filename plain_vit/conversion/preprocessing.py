"""What each source says about its pixels, as an image processor; and back to timm and to transformers' stock class."""

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from PIL.Image import Resampling
from transformers import AutoImageProcessor, ViTImageProcessor, ViTImageProcessorPil
from transformers.image_processing_utils import BaseImageProcessor

from plain_vit.errors import CheckpointError, ExportError, OutputError
from plain_vit.image_processing_plain_vit import (
    PlainViTImageProcessor,
    PlainViTImageProcessorPil,
    SourcePreprocessing,
    check_settings,
)

from .torchvision.architectures import FILES as TORCHVISION_FILES

BACKENDS = {"pil": PlainViTImageProcessorPil, "torchvision": PlainViTImageProcessor}
INTERPOLATIONS = {  # timm's and torchvision's name -> Pillow's number, which transformers stores
    "nearest": Resampling.NEAREST.value,
    "bilinear": Resampling.BILINEAR.value,
    "bicubic": Resampling.BICUBIC.value,
    "lanczos": Resampling.LANCZOS.value,
    "box": Resampling.BOX.value,
    "hamming": Resampling.HAMMING.value,
}
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

# What timm's transform takes for a key that a pretrained_cfg leaves out (timm/data/config.py, timm/data/constants.py).
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
    backend: str = "torchvision",
) -> SourcePreprocessing:
    """Prepare the same pixels as timm's evaluation transform.

    Args:
        pretrained_cfg: As in a timm model or in the `config.json` beside its weights; keys that it leaves out
            mean what timm takes them to mean.
        num_channels: Channels of the model, where they differ from the first of `input_size`.
        image_size: Pixels, an int or (height, width), where the model was built for another size than `input_size`.
        backend: "torchvision" (tensors) or "pil" (arrays): the same pixels.

    Raises:
        CheckpointError: if the entries contradict each other or timm itself cannot use them.

    Source:
        timm 1.0.31, `resolve_data_config` and `transforms_imagenet_eval`.
    """
    # timm takes its default for whatever is empty, 0 included.
    cfg: dict[str, Any] = {key: pretrained_cfg.get(key) or default for key, default in TIMM_DEFAULTS.items()}
    if cfg["interpolation"] not in INTERPOLATIONS:
        raise CheckpointError(_unknown("interpolation", cfg["interpolation"], INTERPOLATIONS))
    channels = num_channels or cfg["input_size"][0]
    mean, std = (_per_channel(name, cfg[name], channels) for name in ("mean", "std"))
    height, width = _pair(image_size or cfg["input_size"][-2:])
    if not 1e-3 <= cfg["crop_pct"] <= 1e3:
        raise CheckpointError(
            f"crop_pct is {cfg['crop_pct']}: expected the share of an image that is kept, such as 0.9"
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
        raise CheckpointError(_unknown("crop_mode", cfg["crop_mode"], ("center", "squash", "border")))
    resample = INTERPOLATIONS[cfg["interpolation"]]
    return _processor(backend, image_mean=mean, image_std=std, resample=resample, **settings)


def processor_from_torchvision(source: Any, *, backend: str = "torchvision") -> SourcePreprocessing:
    """Prepare the same pixels as the transform that torchvision publishes with its weights.

    Args:
        source: The transform (`ViT_B_16_Weights.IMAGENET1K_V1.transforms()`), or the name of a published file, such as
            "vit_b_16-c867db91.pth".
        backend: "torchvision" (tensors) or "pil" (arrays): the same pixels.

    Raises:
        CheckpointError: if the file is none of torchvision's own: what prepared its images is then not known.
    """
    mean, std = IMAGENET_MEAN, IMAGENET_STD
    if isinstance(source, (str, Path)):
        stem = Path(source).stem
        if stem not in TORCHVISION_FILES:
            raise CheckpointError(
                f"{stem} is not one of torchvision's published files ({', '.join(TORCHVISION_FILES)}), and its own "
                "preprocessing is not in it: give the image processor yourself"
            )
        resize, crop, interpolation = TORCHVISION_FILES[stem]
    else:
        (resize,), (crop,), interpolation = source.resize_size, source.crop_size, source.interpolation.value
        mean, std = source.mean, source.std
    return _processor(
        backend,
        size={"shortest_edge": resize},
        crop_size={"height": crop, "width": crop},
        do_center_crop=True,
        resample=INTERPOLATIONS[interpolation],
        image_mean=mean,
        image_std=std,
    )


def processor_from_transformers(
    preprocessor_config: Mapping[str, Any], model_config: Mapping[str, Any] | None = None, *, backend: str | None = None
) -> BaseImageProcessor:
    """Return the processor that a folder in transformers' layout describes, plain-vit's own included.

    A stock processor stays the stock class that `AutoImageProcessor` takes: its pixels are the source.

    Args:
        preprocessor_config: The contents of `preprocessor_config.json`, of this or an older release of transformers.
        model_config: The contents of the `config.json` beside it, which tells the class where the other does not.
        backend: "pil", "torchvision", or what `AutoImageProcessor` takes where nothing is asked for.

    Raises:
        CheckpointError: if neither names an image processor that transformers or plain-vit has.
        ValueError: for settings that no image can be prepared with.
    """
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            for name, content in (("preprocessor_config.json", preprocessor_config), ("config.json", model_config)):
                if content is not None:  # without the names of code, which is never asked for
                    known = {key: value for key, value in content.items() if key != "auto_map"}
                    Path(folder, name).write_text(json.dumps(known), encoding="utf-8")
        except OSError as error:
            raise OutputError(f"temporary files cannot be written: {error.strerror}. Make room.") from error
        try:
            processor = AutoImageProcessor.from_pretrained(folder, backend=backend, trust_remote_code=False)
        except (OSError, ValueError) as error:
            named = preprocessor_config.get("image_processor_type") or preprocessor_config.get("feature_extractor_type")
            raise CheckpointError(
                f"preprocessor_config.json names the image processor {named}, config.json the model type "
                f"{(model_config or {}).get('model_type')}: expected one of transformers or plain-vit; give the image "
                f"processor yourself ({str(error).strip().partition(chr(10))[0]})"
            ) from error
    check_settings(vars(processor))
    return processor


def processor_from_google(image_size: int | Sequence[int], *, backend: str = "torchvision") -> SourcePreprocessing:
    """Prepare pixels as Google's vision_transformer evaluates: resized directly, scaled to [-1, 1].

    TensorFlow resizes without antialiasing, so pixels of images that shrink are near the original's, not equal.

    Args:
        image_size: Input size of the model in pixels, an int or (height, width).
        backend: "torchvision" (tensors) or "pil" (arrays): the same pixels.

    Source:
        github.com/google-research/vision_transformer, `vit_jax/input_pipeline.py`.
    """
    return default_processor(image_size, num_channels=3, mean=(0.5,) * 3, std=(0.5,) * 3, backend=backend)[0]


def default_processor(
    image_size: int | Sequence[int],
    num_channels: int = 3,
    *,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    backend: str = "torchvision",
) -> tuple[SourcePreprocessing, tuple[str, ...]]:
    """Return a processor for a source that records nothing about its pixels, and what had to be assumed.

    Args:
        image_size: Input size of the model in pixels, an int or (height, width).
        num_channels: Channels of the model.
        mean: Mean of each channel of values in 0..1; 0.5 is assumed if not given.
        std: Deviation of each channel of values in 0..1; 0.5 is assumed if not given.
        backend: "torchvision" (tensors) or "pil" (arrays): the same pixels.

    Returns:
        The processor, which stretches the image to `image_size` (bilinear), and one sentence per assumption, for the
        report of the conversion.
    """
    height, width = _pair(image_size)
    assumed = [f"the images were stretched to {height}x{width} pixels, bilinear: the checkpoint does not say"]
    if mean is None or std is None:
        assumed.append(
            "pixels were scaled to [-1, 1] (image_mean 0.5, image_std 0.5): the checkpoint does not say; "
            "give image_mean and image_std if they were not"
        )
    processor = _processor(
        backend,
        size={"height": height, "width": width},
        resample=INTERPOLATIONS["bilinear"],
        image_mean=tuple(mean or (0.5,) * num_channels),
        image_std=tuple(std or (0.5,) * num_channels),
    )
    return processor, tuple(assumed)


def processor_to_timm(processor: BaseImageProcessor) -> dict[str, Any]:
    """Return the entries of timm's `pretrained_cfg` that make timm prepare the same pixels.

    timm resizes with Pillow: a stock processor of torchvision's backend is up to two levels of 255 away from it.

    Args:
        processor: Ours of either backend, or a stock one without a centre crop.

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
        "do_pad=True": bool(settings.get("do_pad")),
        f"resample={settings['resample']}": settings["resample"] not in names,
        "transformers' own centre crop, which rounds down where timm rounds half to even":
            bool(crop) and not isinstance(processor, SourcePreprocessing),
        f"size={size}": set(size) not in ({"height", "width"}, {"shortest_edge"}),
        "an output whose size depends on the image": target.keys() != {"height", "width"},
        "a crop filled with another colour than the mean's":
            mode == "contain" and list(settings.get("pad_color") or [0] * len(mean)) != border,
    }  # fmt: skip
    if not any(faults.values()):
        height, width = target["height"], target["width"]
        scaled = (size["shortest_edge"],) * 2 if "shortest_edge" in size else (size["height"], size["width"])
        crop_pct = _crop_pct((height, width), scaled)
        faults[f"a crop of {height}x{width} out of {scaled[0]}x{scaled[1]}, as one crop_pct"] = crop_pct is None
        # timm itself chooses between the two ways to cover, by whether both sides scale to the same length.
        faults["resize_mode='cover' of a square size"] = mode == "cover" and scaled[0] == scaled[1]
    if any(faults.values()):
        raise ExportError(
            "timm's evaluation transform cannot express this image processor: pass another one, or none",
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


def stock_processor(processor: SourcePreprocessing) -> ViTImageProcessor | ViTImageProcessorPil:
    """Return transformers' own ViT processor with the same pixels, which needs neither plain-vit nor trust.

    The pixels are equal for images without transparency; transformers blends transparency with white, the sources
    drop it. A folder does not say the backend: `AutoImageProcessor` opens what the result saves with torchvision, one
    or two levels of 255 away, unless it is asked for `backend="pil"`.

    Args:
        processor: Ours, of either backend. The result is the class that resizes with Pillow, or with torch where
            `resize_with` says so: then its normalisation rounds otherwise, by up to 2e-6.

    Raises:
        ExportError: if the stock class would prepare other pixels: its centre crop is off by one on some sizes.
    """
    settings = processor.to_dict()
    size, crop = settings["size"], settings.get("crop_size") or {}
    margins = [size.get(side, 0) - crop[side] for side in crop] if settings.get("do_center_crop") else []
    faults = {
        f"resize_mode={settings.get('resize_mode')!r}": settings.pop("resize_mode", None) is not None,
        "pad_color": settings.pop("pad_color", None) is not None,
        "a centre crop whose margin depends on the image": bool(margins) and size.keys() != {"height", "width"},
        f"a centre crop with the margins {margins}": any(margin % 4 == 3 or margin < 0 for margin in margins),
    }
    if any(faults.values()):
        raise ExportError(
            "transformers' own ViTImageProcessor would prepare other pixels: keep PlainViTImageProcessor",
            [part for part, is_there in faults.items() if is_there],
        )
    settings["do_convert_rgb"] = len(settings["image_mean"]) == 3  # the stock class converts to nothing but RGB
    stock = ViTImageProcessor if settings.pop("resize_with") == "torch" else ViTImageProcessorPil
    return stock(**settings)


def _processor(backend: str, **settings: Any) -> SourcePreprocessing:
    if backend not in BACKENDS:
        raise ValueError(_unknown("backend", backend, BACKENDS))
    return BACKENDS[backend](**settings)


def _unknown(name: str, got: object, known: Sequence[str] | Mapping[str, Any]) -> str:
    return f"{name} is {got!r}: expected one of {', '.join(known)}"


def _pair(size: int | Sequence[int]) -> tuple[int, int]:
    """Return (height, width) of a size that may be an int."""
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


def _per_channel(name: str, levels: Sequence[float], channels: int) -> tuple[float, ...]:
    """Return one level per channel; a list of another length tells them only where all its levels are equal."""
    if len(levels) == channels:
        return tuple(levels)
    if len(set(levels)) == 1:
        return tuple(levels[:1]) * channels
    raise CheckpointError(
        f"{name} has {len(levels)} levels {tuple(levels)} and the model {channels} channels: "
        "give image_mean and image_std, one number per channel"
    )


def _crop_pct(crop: tuple[int, int], scaled: tuple[int, int]) -> float | None:
    """Return the shortest decimal share that timm turns from this crop into these sides before it."""
    largest = min(side / pixels for side, pixels in zip(crop, scaled, strict=True))
    for digits in range(1, 18):
        for share in (round(largest, digits), math.floor(largest * 10**digits) / 10**digits):
            if share > 0 and tuple(math.floor(side / share) for side in crop) == scaled:
                return share
    return None

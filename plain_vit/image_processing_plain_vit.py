"""Exact preprocessing: the pixels that timm, torchvision and their users' loaders hand to a ViT.

Two classes share everything but the library that resizes: `PlainViTImageProcessor` (torchvision, on tensors) and
`PlainViTImageProcessorPil` (Pillow, which the sources use on image files). Where transformers' own processors differ
from the sources, these follow the sources: the centre crop rounds half to even, transparency is dropped instead of
blended, and files keep the orientation in which their pixels are stored.

Legend: `C` channels, `H W` pixels.
"""

import json
import os
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

import numpy as np
import torch
from PIL import Image
from transformers.image_processing_backends import PilBackend, TorchvisionBackend
from transformers.image_processing_utils import BaseImageProcessor
from transformers.image_utils import (
    ChannelDimension,
    PILImageResampling,
    SizeDict,
    infer_channel_dimension_format,
    is_valid_image,
)

# Where both classes stand in a saved folder, in the form that `AutoImageProcessor` reads.
AUTO_MAP = {
    "AutoImageProcessor": {
        "torchvision": "image_processing_plain_vit.PlainViTImageProcessor",
        "pil": "image_processing_plain_vit.PlainViTImageProcessorPil",
    }
}
RESIZE_MODES = (None, "cover", "contain")
PIL_MODES = {1: "L", 3: "RGB"}  # channels -> what the sources' loaders convert an opened image to
DEEP_MODES = {"I", "I;16", "I;16B", "I;16L", "I;16N", "F"}  # more than 8 bits: Pillow's conversion clips them at 255

# Keys that transformers writes into preprocessor_config.json beside the settings.
WRITTEN_BY_TRANSFORMERS = {
    "_valid_processor_keys", "auto_map", "feature_extractor_type", "image_processor_type", "processor_class",
}  # fmt: skip


class SourcePreprocessing(BaseImageProcessor):
    """What both backends share: how images are opened, converted, resized and cropped, and how settings are saved.

    Args:
        resize_mode: How `size` is meant when it is a (height, width). None stretches the image to it; "cover" keeps the
            aspect ratio and covers it; "contain" keeps the aspect ratio and fits inside.
        pad_color: Level of each channel (0..255) where the crop reaches beyond the image; black if not given.
        **kwargs: The settings of every transformers image processor: `size`, `crop_size`, `do_center_crop`,
            `resample`, `image_mean`, `image_std` and so on. `image_mean` holds one number per channel of the model.

    Raises:
        ValueError: for a setting that does not exist or cannot work, and at a call for images that the sources cannot
            prepare either.

    Source:
        `timm.data.transforms_factory.transforms_imagenet_eval` (timm 1.0.31) and
        `torchvision.transforms.functional.center_crop`, whose pixels are matched.
    """

    resample = PILImageResampling.BILINEAR
    image_mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    image_std: tuple[float, ...] = (0.5, 0.5, 0.5)
    size = {"height": 224, "width": 224}
    do_convert_rgb = True
    do_resize = True
    do_rescale = True
    do_normalize = True
    resize_mode: str | None = None
    pad_color: tuple[int, ...] | None = None
    _auto_class = "AutoImageProcessor"  # the code travels with every saved folder

    def __init__(self, **kwargs: Any) -> None:
        known = {*self.valid_kwargs.__annotations__, "resize_mode", "pad_color"}
        unknown = sorted(kwargs.keys() - known - WRITTEN_BY_TRANSFORMERS)
        if unknown:
            raise ValueError(f"{type(self).__name__} has no setting {unknown}: the settings are {sorted(known)}")
        super().__init__(**kwargs)
        if self.resize_mode not in RESIZE_MODES:
            raise ValueError(f"resize_mode is {self.resize_mode!r}: expected one of {RESIZE_MODES}")
        if self.resize_mode is not None and dict(self.size).keys() != {"height", "width"}:
            raise ValueError(f"resize_mode {self.resize_mode!r} needs a size with height and width, not {self.size}")
        if self.pad_color is not None:
            self.pad_color = tuple(self.pad_color)
            if len(self.pad_color) != len(self.image_mean):
                raise ValueError(
                    f"pad_color is {self.pad_color}: expected one level per channel, {len(self.image_mean)} in all"
                )

    def _standardize_kwargs(self, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Check mean and deviation: they also say how many channels the model has."""
        kwargs = super()._standardize_kwargs(**kwargs)
        mean, std = kwargs["image_mean"], kwargs["image_std"]
        if not (isinstance(mean, tuple) and isinstance(std, tuple) and len(mean) == len(std) > 0 and all(std)):
            raise ValueError(
                f"image_mean is {mean} and image_std is {std}: expected two lists with one number per channel of the "
                "model, the deviations not 0"
            )
        return kwargs

    def fetch_images(self, images: Any) -> Any:
        """Open files and URLs as the sources' loaders do; (H, W) becomes (1, H, W); all other images pass through."""
        if isinstance(images, (list, tuple)):
            return [self.fetch_images(image) for image in images]
        if isinstance(images, (str, os.PathLike)):
            return open_image(images)
        images = super().fetch_images(images)
        return images if isinstance(images, Image.Image) or images.ndim != 2 else images[None]

    def process_image(
        self,
        image: Any,  # an opened image, or an array or a tensor of (H, W), (C, H, W) or (H, W, C)
        do_convert_rgb: bool | None = None,
        input_data_format: str | ChannelDimension | None = None,
        **kwargs: Any,
    ) -> Any:
        """Bring one image to the channels of the model, channels first: (C, H, W)."""
        channels = len(kwargs["image_mean"])
        if isinstance(image, Image.Image):
            image = _to_array(image, channels, convert=bool(do_convert_rgb))
            input_data_format = ChannelDimension.LAST
        elif is_valid_image(image):
            dtype = str(image.dtype).removeprefix("torch.")
            if dtype != "uint8" and (kwargs["do_rescale"] or "float" not in dtype):
                raise ValueError(
                    f"got an image of {dtype}: expected uint8 (0..255), or floating point values that are already "
                    "scaled together with do_rescale=False"
                )
            if image.ndim == 3 and input_data_format is None:
                input_data_format = infer_channel_dimension_format(image, num_channels=(1, channels))
        image = super().process_image(image, do_convert_rgb=False, input_data_format=input_data_format, **kwargs)
        if image.shape[0] == 1 and channels == 3 and do_convert_rgb:
            image = image[[0, 0, 0]]  # what Pillow makes of a grey image
        if image.shape[0] != channels:
            raise ValueError(
                f"got an image of {image.shape[0]} channels: the model has {channels} (the length of image_mean); "
                "convert the image first"
            )
        return image

    def resize(self, image: Any, size: SizeDict, resample: Any = None, **kwargs: Any) -> Any:
        """Resize (..., H, W); where `resize_mode` keeps the aspect ratio, each side rounds half to even as in timm."""
        if self.resize_mode is not None:
            height, width = image.shape[-2:]
            ratios = height / size.height, width / size.width
            ratio = min(ratios) if self.resize_mode == "cover" else max(ratios)
            size = SizeDict(height=round(height / ratio), width=round(width / ratio))
        return super().resize(image, size, resample, **kwargs)  # type: ignore[misc]  # the backend's

    def center_crop(self, image: Any, size: SizeDict, **kwargs: Any) -> Any:  # type: ignore[override]
        """Cut (..., H, W) to `size` around its centre, filling with `pad_color` what lies beyond the image.

        An odd margin rounds half to even, as in torchvision; transformers' own crop always rounds down.
        """
        if size.height is None or size.width is None:
            raise ValueError(f"crop_size is {size}: expected height and width")
        top, rows = _centre(image.shape[-2], size.height)
        left, columns = _centre(image.shape[-1], size.width)
        image = image[..., rows, columns]
        height, width = image.shape[-2:]
        if (height, width) == (size.height, size.width):
            return image
        shape = (*image.shape[:-2], size.height, size.width)
        canvas = image.new_zeros(shape) if isinstance(image, torch.Tensor) else np.zeros(shape, image.dtype)
        for channel, level in enumerate(self.pad_color or ()):
            canvas[..., channel, :, :] = level
        canvas[..., top : top + height, left : left + width] = image
        return canvas

    def to_dict(self) -> dict[str, Any]:
        """Return the settings alone; `to_json_file` adds the names of the classes where the folder needs them."""
        settings = super().to_dict()
        return {name: value for name, value in settings.items() if name not in WRITTEN_BY_TRANSFORMERS}

    def to_json_file(self, json_file_path: str | os.PathLike) -> None:
        """Write the settings, and the names of the classes unless the config.json beside them already says those.

        transformers looks for the classes here first. In a model's folder they stand in config.json instead: code that
        is named here is also taken for a video processor's, for which a `pipeline` may ask for trust even where the
        package is imported.
        """
        settings = self.to_dict()
        config_file = Path(json_file_path).with_name("config.json")
        config = json.loads(config_file.read_text(encoding="utf-8")) if config_file.is_file() else {}
        if "AutoImageProcessor" not in config.get("auto_map", {}):
            settings |= {"image_processor_type": "PlainViTImageProcessor", "auto_map": AUTO_MAP}
        Path(json_file_path).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")


class PlainViTImageProcessor(SourcePreprocessing, TorchvisionBackend):  # type: ignore[misc]
    """Prepare images with torchvision's tensor operations: batched, on any device."""


class PlainViTImageProcessorPil(SourcePreprocessing, PilBackend):  # type: ignore[misc]
    """Prepare images with Pillow: the same pixels as the sources' own loaders, bit for bit."""

    def process_image(self, image: Any, *args: Any, **kwargs: Any) -> np.ndarray:
        """Bring one image to the channels of the model; Pillow resizes one or three of them."""
        channels = len(kwargs["image_mean"])
        if channels not in PIL_MODES:
            raise ValueError(
                f"the model has {channels} channels, and Pillow prepares 1 or 3: use PlainViTImageProcessor "
                '(backend="torchvision")'
            )
        return super().process_image(image, *args, **kwargs)


def open_image(source: str | os.PathLike) -> Image.Image:
    """Open an image as the sources' loaders do: its EXIF orientation is not applied.

    Args:
        source: A path, or a URL that starts with http:, https: or data:.
    """
    if urlsplit(str(source)).scheme in ("http", "https", "data"):
        with urlopen(str(source), timeout=60) as response:
            source_file = BytesIO(response.read())
        image = Image.open(source_file)
    else:
        image = Image.open(source)
    with image:
        image.load()
    return image


def _to_array(image: Image.Image, channels: int, convert: bool) -> np.ndarray:
    """Convert an opened image as `Image.open(...).convert(...)` does in the sources' loaders, to (H, W[, C])."""
    mode = PIL_MODES.get(channels)
    if mode is None or not convert:
        if image.mode == "P" or image.mode in DEEP_MODES or len(image.getbands()) != channels:
            raise ValueError(
                f"got an image of mode {image.mode}: it is not converted to the {channels} channels of the model"
                f"{'' if convert else ' with do_convert_rgb=False'}; pass an array of that many channels instead"
            )
        return np.array(image)
    if image.mode in DEEP_MODES:
        raise ValueError(
            f"got an image of mode {image.mode} (more than 8 bits per channel): converting it to {mode} would clip "
            "every level above 255 to white; scale it to 8 bits first"
        )
    return np.array(image.convert(mode))


def _centre(have: int, want: int) -> tuple[int, slice]:
    """Return where the image begins on the canvas, and the part of it that is kept, along one side."""
    if have < want:
        return (want - have) // 2, slice(None)
    start = round((have - want) / 2)  # half to even, as torchvision
    return 0, slice(start, start + want)


__all__ = ["PlainViTImageProcessor", "PlainViTImageProcessorPil"]

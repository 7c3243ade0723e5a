"""Image processors that reproduce the preprocessing of timm, torchvision and their users' loaders exactly.

Both classes resize images with Pillow, like the sources: `PlainViTImageProcessor` returns tensors and keeps those on an
accelerator there, `PlainViTImageProcessorPil` returns arrays. Where transformers' own processors differ from the
sources, these follow the sources: the centre crop rounds half to even, transparency is dropped instead of blended,
EXIF orientation is not applied, and rescaling and normalisation use the sources' order of operations.

Legend: `C` channels, `H W` pixels.
"""

import copy
import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit
from urllib.request import urlopen

from .releases_plain_vit import OLDEST  # noqa: F401  # isort: skip
import numpy as np
import torch
from PIL import Image
from transformers.dynamic_module_utils import custom_object_save
from transformers.image_processing_backends import PilBackend, TorchvisionBackend
from transformers.image_processing_utils import BaseImageProcessor, BatchFeature
from transformers.image_transforms import get_size_with_aspect_ratio
from transformers.image_utils import (
    ChannelDimension,
    PILImageResampling,
    SizeDict,
    get_image_size_for_max_height_width,
)
from transformers.models.siglip2.image_processing_pil_siglip2 import get_image_size_for_max_num_patches

# Both classes in a saved folder, in the form that `AutoImageProcessor` expects.
AUTO_MAP = {
    "AutoImageProcessor": {
        "torchvision": "image_processing_plain_vit.PlainViTImageProcessor",
        "pil": "image_processing_plain_vit.PlainViTImageProcessorPil",
    }
}
OURS = tuple(name.rpartition(".")[2] for name in AUTO_MAP["AutoImageProcessor"].values())  # names of the classes
RESIZE_MODES = (None, "cover", "contain")
RESIZERS = ("pillow", "torch")
TORCH_FILTERS = {PILImageResampling.NEAREST, PILImageResampling.BILINEAR, PILImageResampling.BICUBIC}
SCALING = ("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std")
PIL_MODES = {1: "L", 3: "RGB"}  # channels -> mode to which the sources' loaders convert an opened image
DEEP_MODES = {"I", "I;16", "I;16B", "I;16L", "I;16N", "F"}  # more than 8 bits: Pillow's conversion clips them at 255

FLAGS = ("do_convert_rgb", "do_resize", "do_center_crop", "do_rescale", "do_normalize", "do_pad")
LAYOUTS = ("data_format", "input_data_format")
SIZES = ("size", "crop_size", "pad_size")
LARGEST_NUMBER = 1e6  # of a mean, a standard deviation or a factor
MOST_PIXELS = 2**28  # of a resized image: 16,384 x 16,384

NOT_LEVELS = {"1", "P", "PA"} | DEEP_MODES  # modes whose values are not intensities from 0 to 255

# Keys that transformers writes into preprocessor_config.json in addition to the settings.
WRITTEN_BY_TRANSFORMERS = {
    "_valid_processor_keys", "auto_map", "feature_extractor_type", "image_processor_type", "processor_class",
}  # fmt: skip


class SourcePreprocessing(BaseImageProcessor, ABC):
    """Base class of both image processors: opens, converts, resizes and crops images, and saves the settings.

    Args:
        resize_mode: Meaning of a `size` with height and width. None stretches the image to it; "cover" keeps the aspect
            ratio and covers that area; "contain" keeps the aspect ratio and fits inside it.
        resize_with: Backend for 8-bit images that are not on an accelerator: "pillow", like the sources, or "torch",
            which is faster on large tensors but not exact.
        pad_color: Value of each channel (0..255) where the crop extends beyond the image (default: black).
        max_num_patches: Resize each image to at most this many patches, keeping its aspect ratio, and return patches:
            `pixel_values` (B, max_num_patches, P), `pixel_attention_mask` and `spatial_shapes`, as transformers'
            Siglip2ImageProcessor does; `size` is not used. None for images of one size.
        patch_size: Side of these patches, in pixels.
        **kwargs: The settings of every transformers image processor: `size`, `crop_size`, `do_center_crop`,
            `resample`, `image_mean`, `image_std` and so on. `image_mean` has one number per channel of the model.

    Raises:
        ValueError: A setting does not exist or is invalid, or an image is one that the sources cannot process either.

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
    resize_with = "pillow"
    pad_color: tuple[int, ...] | None = None
    max_num_patches: int | None = None
    patch_size: int | None = None
    _auto_class: str | None = "AutoImageProcessor"  # the code is saved with every folder

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not _is_ours(cls) and "_auto_class" not in vars(cls):
            cls._auto_class = None

    def __init__(self, **kwargs: Any) -> None:
        own = {"resize_mode", "resize_with", "pad_color", "max_num_patches", "patch_size"}
        known = {*self.valid_kwargs.__annotations__, *own}
        unknown = sorted(kwargs.keys() - known - WRITTEN_BY_TRANSFORMERS)
        if unknown:
            raise ValueError(f"{type(self).__name__} has no setting {unknown}: the settings are {sorted(known)}")
        settings = {name: value for name, value in kwargs.items() if name in known}
        super().__init__(**{"resize_with": self.resize_with, **settings})  # saved even if not given
        if self.resize_mode not in RESIZE_MODES:
            raise ValueError(f"resize_mode is {self.resize_mode!r}: expected one of {RESIZE_MODES}")
        if self.resize_mode is not None and dict(self.size).keys() != {"height", "width"}:
            raise ValueError(f"resize_mode {self.resize_mode!r} needs a size with height and width, not {self.size}")
        if self.resize_with not in RESIZERS:
            raise ValueError(f"resize_with is {self.resize_with!r}: expected one of {RESIZERS}")
        if self.pad_color is not None:
            levels = self.pad_color if isinstance(self.pad_color, list | tuple) else ()
            self.pad_color = tuple(levels)
            if len(levels) != len(self.image_mean) or not all(_is_number(level, 0, 255) for level in levels):
                raise ValueError(
                    f"pad_color is {self.pad_color}: expected one value from 0 to 255 per channel, "
                    f"{len(self.image_mean)} in total"
                )

        self._check_patches()

    @classmethod
    def from_dict(cls, image_processor_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Build from saved settings as transformers does, but refuse the settings of another class.

        Args:
            image_processor_dict: The contents of `preprocessor_config.json`. If it names a stock class and has
                `resize_with`, plain-vit exported it.
            **kwargs: Settings that replace the saved ones, and keywords of transformers.

        Raises:
            ValueError: The settings belong to another class, or are invalid, as for the constructor.
        """
        named = [image_processor_dict.get(key) for key in ("image_processor_type", "feature_extractor_type")]
        others = [name for name in named if name and name not in (cls.__name__, *OURS)]
        if others and "resize_with" not in image_processor_dict:
            raise ValueError(
                f"these settings belong to {others[0]!a:.80}, and some of the same names mean something else to "
                f"{cls.__name__}: use AutoImageProcessor.from_pretrained(FOLDER), which chooses the class"
            )
        return super().from_dict(image_processor_dict, **kwargs)

    @property
    def model_input_names(self) -> list[str]:  # type: ignore[override]  # depends on a setting
        """Names of the outputs of a call."""
        patches = [] if self.max_num_patches is None else ["pixel_attention_mask", "spatial_shapes"]
        return ["pixel_values", *patches]

    def _check_patches(self) -> None:
        """Refuse patch settings that contradict each other or the settings for images of one size."""
        if self.max_num_patches is None and self.patch_size is None:
            return
        for name in ("max_num_patches", "patch_size"):
            if not _is_whole(getattr(self, name), 1, MOST_PIXELS):
                raise ValueError(
                    f"{name} is {getattr(self, name)!a:.200}: expected a positive int, as patches are cut by both "
                    "max_num_patches and patch_size"
                )
        if others := [name for name in ("do_center_crop", "do_pad", "resize_mode") if getattr(self, name, None)]:
            raise ValueError(f"max_num_patches keeps the whole image and its aspect ratio: omit {', '.join(others)}")

    def _standardize_kwargs(self, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Validate every setting; the length of mean and deviation is the number of channels."""
        for name in SIZES:
            size = kwargs.get(name)
            given = dict(size) if isinstance(size, Mapping | SizeDict) else size
            if not isinstance(given, int | dict | None) and not (isinstance(given, list | tuple) and len(given) == 2):
                raise ValueError(f"{name} is {given!a:.200}: expected an int, (height, width) or a dict of sides")
        kwargs = super()._standardize_kwargs(**kwargs)
        check_settings(kwargs)
        mean, std = kwargs["image_mean"], kwargs["image_std"]
        if not (isinstance(mean, tuple) and isinstance(std, tuple) and len(mean) == len(std) > 0):
            raise ValueError(
                f"image_mean is {mean} and image_std is {std}: expected two lists with one number per channel of the "
                "model"
            )
        return kwargs

    def fetch_images(self, images: Any) -> Any:
        """Open files and URLs like the sources' loaders; images are returned unchanged."""
        if isinstance(images, (list, tuple)):
            return [self.fetch_images(image) for image in images]
        if isinstance(images, (str, os.PathLike)):
            return open_image(images)
        return super().fetch_images(images)

    def _prepare_images_structure(self, images: Any, expected_ndims: int = 3) -> list[Any]:
        """Flatten nested lists and batches (B, C, H, W) to a list of images."""
        flat = list(_one_by_one(self.fetch_images(images)))
        if not flat:
            raise ValueError("got an empty list: expected at least one image")
        return flat

    def process_image(
        self,
        image: Any,  # an opened image, or an array or a tensor of (H, W), (C, H, W) or (H, W, C)
        do_convert_rgb: bool | None = None,
        input_data_format: str | ChannelDimension | None = None,
        **kwargs: Any,
    ) -> Any:
        """Convert one image to the model's channels: a Pillow image, or an array or a tensor (C, H, W)."""
        channels = len(kwargs["image_mean"])
        sides = image.size if isinstance(image, Image.Image) else tuple(image.shape)
        if 0 in sides:
            raise ValueError(f"got an image of {sides}, which has no pixels: expected a positive height and width")
        if isinstance(image, Image.Image):
            return _in_mode(image, channels, convert=bool(do_convert_rgb))
        dtype = str(image.dtype).removeprefix("torch.")
        if dtype != "uint8" and (kwargs["do_rescale"] or "float" not in dtype):
            raise ValueError(
                f"got an image of {dtype}: expected uint8 (0..255), or floating point values that are already "
                "scaled together with do_rescale=False"
            )
        if dtype != "uint8":
            image = image.float() if isinstance(image, torch.Tensor) else image.astype(np.float32)
        convertible = {1, channels} if channels == 3 and do_convert_rgb else {channels}
        image = _channels_first(image, convertible, input_data_format)
        if image.shape[0] not in convertible:
            raise ValueError(
                f"got an image of {image.shape[0]} channels: the model has {channels} (the length of image_mean); "
                "convert the image first"
            )
        return image if image.shape[0] == channels else image[[0, 0, 0]]  # as Pillow converts grey to RGB

    def resize(self, image: Any, size: SizeDict, resample: Any = None, **kwargs: Any) -> Any:
        """Resize a Pillow image, or an array or a tensor (..., H, W)."""
        height, width = image.size[::-1] if isinstance(image, Image.Image) else image.shape[-2:]
        height, width = self._resized_sides(height, width, size)
        resample = PILImageResampling.BILINEAR if resample is None else resample
        if isinstance(image, Image.Image):
            return image.resize((width, height), resample)
        if self._pillow_resizes(image):
            return _resize_planes(image, (width, height), resample)
        image = _as_tensor(image).contiguous()
        if resample not in TORCH_FILTERS and not (resample == PILImageResampling.LANCZOS and _on_cpu(image)):
            raise ValueError(
                f"torch cannot resize with resample={resample} on {image.device.type}: pass uint8 images on the CPU "
                'to a processor with resize_with="pillow", or use backend="pil"'
            )
        return super().resize(image, SizeDict(height=height, width=width), resample, **kwargs)  # type: ignore[misc]

    @abstractmethod
    def _pillow_resizes(self, image: np.ndarray | torch.Tensor) -> bool:
        """Whether this array or tensor is resized by Pillow rather than torch."""

    def _preprocess(
        self, images: list[Any], do_resize: bool, size: SizeDict, resample: Any, **kwargs: Any
    ) -> BatchFeature:
        """Resize images on the CPU one by one with Pillow, and leave the rest to the backend."""
        on_cpu = {_on_cpu(image) for image in images}
        if len(on_cpu) > 1:
            raise ValueError("got images on the CPU together with tensors on an accelerator: move them to one device")
        if do_resize and on_cpu == {True} and self.resize_with == "pillow":
            images, do_resize = [self.resize(image, size, resample) for image in images], False
        tensors = [_as_tensor(image) for image in images]
        kwargs |= {"do_resize": do_resize, "size": size, "resample": resample}
        return self._finish(tensors, **kwargs) if self.max_num_patches is None else self._patches(tensors, **kwargs)

    def _patches(self, images: list[torch.Tensor], return_tensors: Any, **kwargs: Any) -> BatchFeature:
        """Return the patches of each image, padded with zeros to the largest number of patches."""
        data: dict[str, list[Any]] = {"pixel_values": [], "pixel_attention_mask": [], "spatial_shapes": []}
        side, most = cast(int, self.patch_size), cast(int, self.max_num_patches)
        for image in images:
            whole = _as_tensor(self._finish([image], return_tensors=None, **kwargs)["pixel_values"][0])
            h, w = whole.shape[-2] // side, whole.shape[-1] // side
            if (h * side, w * side) != tuple(whole.shape[-2:]) or h * w > most:
                raise ValueError(
                    f"got an image of {tuple(whole.shape[-2:])} pixels with do_resize=False: expected a multiple of "
                    f"{side} in each direction, and at most {most} patches"
                )
            padded = torch.nn.functional.pad(cut_into_patches(whole, side), (0, 0, 0, most - h * w))
            mask = (torch.arange(most) < h * w).to(device=whole.device, dtype=torch.int32)
            data["pixel_values"].append(padded)
            data["pixel_attention_mask"].append(mask)
            data["spatial_shapes"].append((h, w))
        return BatchFeature(data=data, tensor_type=return_tensors)

    @abstractmethod
    def _finish(self, images: list[torch.Tensor], **kwargs: Any) -> BatchFeature:
        """Apply the remaining steps, like transformers' `_preprocess`."""

    def _resized_sides(self, height: int, width: int, size: Any) -> tuple[int, int]:
        """Return (height, width) after the resize, rounded like the sources."""
        if self.max_num_patches is not None and self.patch_size is not None:
            sides = get_image_size_for_max_num_patches(height, width, self.patch_size, self.max_num_patches)
        elif self.resize_mode is not None:
            ratios = height / size.height, width / size.width
            ratio = min(ratios) if self.resize_mode == "cover" else max(ratios)
            sides = round(height / ratio), round(width / ratio)  # half to even, as in timm
        elif size.shortest_edge and size.longest_edge:
            sides = get_size_with_aspect_ratio((height, width), size.shortest_edge, size.longest_edge)
        elif size.shortest_edge:
            longer = int(size.shortest_edge * max(height, width) / min(height, width))
            sides = (size.shortest_edge, longer) if height <= width else (longer, size.shortest_edge)
        elif size.longest_edge:
            scale = size.longest_edge / max(height, width)
            sides = int(height * scale + 0.5), int(width * scale + 0.5)  # half up, as in Segment Anything
        elif size.max_height and size.max_width:
            sides = get_image_size_for_max_height_width((height, width), size.max_height, size.max_width)
        elif size.height and size.width:
            sides = size.height, size.width
        else:
            raise ValueError(
                f"size is {size}: expected height and width, shortest_edge or longest_edge or both, or max_height and "
                "max_width"
            )
        if min(sides) < 1:
            raise ValueError(f"an image of {height}x{width} pixels has no pixel left at {sides[0]}x{sides[1]}")
        check_pixels(height, width, sides)
        return sides

    def center_crop(self, image: Any, size: SizeDict, **kwargs: Any) -> Any:  # type: ignore[override]
        """Crop (..., H, W) to `size` around its centre, padding beyond the image with `pad_color`.

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
        scale = 1 if image.dtype in (np.uint8, torch.uint8) else 255
        for channel, level in enumerate(self.pad_color or ()):
            canvas[..., channel, :, :] = level / scale
        canvas[..., top : top + height, left : left + width] = image
        return canvas

    def rescale_and_normalize(
        self,
        images: torch.Tensor,  # (..., C, H, W)
        do_rescale: bool,
        rescale_factor: float,
        do_normalize: bool,
        image_mean: Sequence[float],
        image_std: Sequence[float],
    ) -> torch.Tensor:
        """Rescale and normalise with the sources' sequence of operations; fused operations round differently."""
        if not (do_rescale or do_normalize):
            return images.contiguous()
        pixels = images.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        if do_rescale:
            pixels.div_(pixels.new_tensor(1 / rescale_factor))  # a tensor: CUDA multiplies by a number's inverse
        if do_normalize:
            mean, std = (pixels.new_tensor(values)[:, None, None] for values in (image_mean, image_std))
            pixels.sub_(mean).div_(std)
        return pixels

    def to_dict(self) -> dict[str, Any]:
        """Return the settings, and the names of the class and its code: a composite processor saves this dict.

        For a subclass that was not registered with `register_for_auto_class`, a composite processor saves no code, so
        this dict names none.
        """
        names = self._names()
        if self._auto_class is None:
            del names["auto_map"]
        return self.settings() | names

    def settings(self) -> dict[str, Any]:
        """Return only the settings, from which the same image processor can be built."""
        settings = super().to_dict()
        return {name: value for name, value in settings.items() if name not in WRITTEN_BY_TRANSFORMERS}

    def _names(self) -> dict[str, Any]:
        """Return the names by which transformers finds the class and its code in a saved folder."""
        kind = type(self)
        if _is_ours(kind) or self._auto_class is None:
            return {"image_processor_type": "PlainViTImageProcessor", "auto_map": copy.deepcopy(AUTO_MAP)}
        path = f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}"
        return {"image_processor_type": kind.__name__, "auto_map": {"AutoImageProcessor": path}}

    def to_json_file(self, json_file_path: str | os.PathLike) -> None:
        """Write the settings, and the names of the classes unless config.json already contains them.

        transformers looks for the classes here first. In a model folder they are in config.json instead, because
        transformers also treats code named here as a video processor's, and a `pipeline` may then require trust in
        remote code even if the package is imported.

        The code of a subclass is saved if it was registered with `register_for_auto_class`; otherwise the folder names
        the plain-vit class it derives from and contains that code.
        """
        settings, kind = self.settings(), type(self)
        config_file = Path(json_file_path).with_name("config.json")
        config = json.loads(config_file.read_text(encoding="utf-8")) if config_file.is_file() else {}
        if not _is_ours(kind):
            ours: Any = next(base for base in kind.__mro__ if _is_ours(base))
            custom_object_save(ours, config_file.parent)
        is_registered = not _is_ours(kind) and self._auto_class is not None
        if is_registered or "AutoImageProcessor" not in config.get("auto_map", {}):
            settings |= self._names()
        Path(json_file_path).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _is_ours(kind: type) -> bool:
    """Return whether a class is defined in this file, in the package or in a checkpoint."""
    return kind.__module__.rpartition(".")[2] == "image_processing_plain_vit"


class PlainViTImageProcessor(SourcePreprocessing, TorchvisionBackend):  # type: ignore[misc]
    """Image processor that returns tensors, bit-equal to the sources' own transforms.

    Pillow resizes 8-bit files, images, arrays and tensors on the CPU, with any number of channels. torch resizes
    tensors on an accelerator, which stay there, floating point values, as in the sources' transforms, and everything if
    `resize_with` is "torch".
    """

    def _pillow_resizes(self, image: np.ndarray | torch.Tensor) -> bool:
        return self.resize_with == "pillow" and _on_cpu(image) and image.dtype in (np.uint8, torch.uint8)

    def _finish(
        self, images: list[torch.Tensor], device: str | torch.device | None = None, **kwargs: Any
    ) -> BatchFeature:
        if device is not None:
            images = [image.to(device) for image in images]
        return TorchvisionBackend._preprocess(self, images, **kwargs)


class PlainViTImageProcessorPil(SourcePreprocessing, PilBackend):  # type: ignore[misc]
    """Image processor that returns arrays, bit-equal to the sources' own transforms.

    Pillow resizes everything, including floating point values: channel by channel, within 1e-5 of their range from
    torch.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if self.resize_with != "pillow":
            raise ValueError(
                f"resize_with is {self.resize_with!r}, which the Pillow backend does not support: "
                'use backend="torchvision", or resize_with="pillow"'
            )

    def process_image(self, image: Any, *args: Any, **kwargs: Any) -> Any:
        """Convert one image to the model's channels: a Pillow image, or an array (C, H, W)."""
        if not _on_cpu(image):
            raise ValueError(
                f"got a tensor on {image.device}, but Pillow resizes on the CPU: move it there, or use "
                'PlainViTImageProcessor (backend="torchvision")'
            )
        return super().process_image(image, *args, **kwargs)

    def _pillow_resizes(self, image: np.ndarray | torch.Tensor) -> bool:
        return True

    def _finish(  # type: ignore[override]
        self,
        images: list[torch.Tensor],
        do_center_crop: bool,
        crop_size: SizeDict,
        do_pad: bool | None,
        pad_size: Any,
        return_tensors: Any,
        **kwargs: Any,
    ) -> BatchFeature:
        scaling = {name: kwargs[name] for name in SCALING}
        prepared: Any = []
        for image in images:
            cropped = self.center_crop(image, crop_size) if do_center_crop else image
            prepared.append(self.rescale_and_normalize(cropped, **scaling).detach().numpy())
        if do_pad:
            prepared = self.pad(prepared, pad_size=pad_size)
        return BatchFeature(data={"pixel_values": prepared}, tensor_type=return_tensors)


def check_settings(settings: Mapping[str, Any]) -> None:
    """Refuse impossible settings of any image processor.

    Args:
        settings: Settings by name, as returned by `to_dict`; missing ones and None are ignored.

    Raises:
        ValueError: A setting is invalid; the message names it and what was expected.
    """
    numbers, largest = "finite numbers, one per channel", LARGEST_NUMBER
    wrong = [(name, "True or False") for name in FLAGS if not isinstance(settings.get(name), bool | None)]
    if not _are_numbers(settings.get("image_mean"), -largest, largest):
        wrong.append(("image_mean", numbers))
    if not _are_numbers(settings.get("image_std"), 5e-324, largest):
        wrong.append(("image_std", f"{numbers}, greater than 0"))
    if not _are_numbers(settings.get("rescale_factor"), 5e-324, largest):
        wrong.append(("rescale_factor", "a positive finite number, such as 1/255"))
    if not (settings.get("resample") is None or _is_whole(settings["resample"], 0, max(PILImageResampling))):
        wrong.append(("resample", f"the number of a Pillow filter, 0 to {max(PILImageResampling):d}"))
    layouts = [None, *(member.value for member in ChannelDimension), *ChannelDimension]
    wrong += [(name, "channels_first or channels_last") for name in LAYOUTS if settings.get(name) not in layouts]
    for name in SIZES:
        sides = dict(settings.get(name) or {})
        pixels = math.prod(sides.get(side, 1) for side in ("height", "width"))
        if not all(_is_whole(side, 1, MOST_PIXELS) for side in sides.values()) or pixels > MOST_PIXELS:
            wrong.append((name, f"positive ints in pixels, at most {MOST_PIXELS} pixels in total"))
    for name, expected in wrong:
        raise ValueError(f"{name} is {settings[name]!a:.200}: expected {expected}")


def _is_number(value: Any, least: float, most: float) -> bool:
    """Return whether this is a number in a range; NaN and booleans are not."""
    kinds = (int, float, np.integer, np.floating)
    return isinstance(value, kinds) and not isinstance(value, bool) and bool(least <= value <= most)


def _are_numbers(value: Any, least: float, most: float) -> bool:
    """Return whether this is None, a number in a range, or a list of such numbers."""
    listed = value if isinstance(value, list | tuple) else [value]
    return value is None or all(_is_number(number, least, most) for number in listed)


def _is_whole(value: Any, least: int, most: int) -> bool:
    return isinstance(value, (int, np.integer)) and _is_number(value, least, most)


def check_pixels(height: int, width: int, sides: tuple[int, int]) -> None:
    """Check that an image of this height and width has at most `MOST_PIXELS` once resized to these sides.

    Raises:
        ValueError: It would have more pixels.
    """
    if sides[0] * sides[1] > MOST_PIXELS:
        raise ValueError(
            f"an image of {height}x{width} pixels would become {sides[0]}x{sides[1]}, but at most {MOST_PIXELS} pixels "
            "are allowed: crop it to another aspect ratio first"
        )


def open_image(source: str | os.PathLike) -> Image.Image:
    """Open an image like the sources' loaders, without applying its EXIF orientation.

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


def cut_into_patches(image: torch.Tensor, side: int) -> torch.Tensor:
    """Return the patches of an image (C, H, W) in raster order, each flattened in the order row, column, channel."""
    patches = image.unflatten(2, (-1, side)).unflatten(1, (-1, side)).permute(1, 3, 2, 4, 0)  # h w rows columns C
    return patches.flatten(2).flatten(0, 1)


def _one_by_one(images: Any) -> Iterator[Any]:
    """Yield single images: Pillow images, or arrays and tensors of two or three dimensions."""
    if isinstance(images, (list, tuple)) or (not isinstance(images, Image.Image) and images.ndim == 4):
        for image in images:
            yield from _one_by_one(image)
    elif not isinstance(images, Image.Image) and images.ndim not in (2, 3):
        raise ValueError(
            f"got an array of {tuple(images.shape)}: expected (height, width), (channels, height, width), "
            "(height, width, channels) or a batch of the last two"
        )
    else:
        yield images


def _on_cpu(image: Any) -> bool:
    return not isinstance(image, torch.Tensor) or image.device.type == "cpu"


def _in_mode(image: Image.Image, channels: int, convert: bool) -> Image.Image:
    """Convert an opened image like `Image.open(...).convert(...)` in the sources' loaders."""
    mode = PIL_MODES.get(channels)
    if mode is None or not convert:
        if image.mode in NOT_LEVELS or len(image.getbands()) != channels:
            raise ValueError(
                f"got an image of mode {image.mode}, which is not converted to the {channels} channels of the model"
                f"{'' if convert else ' with do_convert_rgb=False'}; pass an array of that many channels instead"
            )
        return image
    if image.mode in DEEP_MODES:
        raise ValueError(
            f"got an image of mode {image.mode} (more than 8 bits per channel): converting it to {mode} would clip "
            "every level above 255 to white; scale it to 8 bits first"
        )
    return image if image.mode == mode else image.convert(mode)


def _channels_first(image: Any, channels: set[int], data_format: str | ChannelDimension | None) -> Any:
    """Return an array or a tensor as (C, H, W), with one of the given numbers of channels.

    Raises:
        ValueError: Both its first and its last dimension could be the channels, or neither.
    """
    if image.ndim == 2:
        return image[None]
    first, last = ChannelDimension.FIRST, ChannelDimension.LAST
    possible = [place for place, side in ((first, 0), (last, 2)) if image.shape[side] in channels]
    if data_format is not None:
        possible = [ChannelDimension(data_format)]
    if len(possible) != 1:
        raise ValueError(
            f"got an image of shape {tuple(image.shape)}: expected {' or '.join(map(str, sorted(channels)))} channels "
            "in the first or in the last dimension; if both could be channels, give input_data_format"
        )
    if possible == [first]:
        return image
    return image.permute(2, 0, 1) if isinstance(image, torch.Tensor) else image.transpose(2, 0, 1)


def _resize_planes(image: Any, size: tuple[int, int], resample: int) -> Any:
    """Resize an array or a tensor (..., H, W) with Pillow, which treats each channel independently."""
    if isinstance(image, torch.Tensor):
        return torch.from_numpy(_resize_planes(image.detach().numpy(), size, resample))
    if image.shape[:-2] == (3,) and image.dtype == np.uint8 and image.transpose(1, 2, 0).flags.c_contiguous:
        return np.array(Image.fromarray(image.transpose(1, 2, 0)).resize(size, resample)).transpose(2, 0, 1)  # faster
    resized = np.empty((*image.shape[:-2], size[1], size[0]), image.dtype)
    for plane in np.ndindex(image.shape[:-2]):
        resized[plane] = Image.fromarray(image[plane]).resize(size, resample)
    return resized


def _as_tensor(image: Any) -> torch.Tensor:
    """Return a Pillow image or an array (C, H, W) as a tensor (C, H, W)."""
    if isinstance(image, torch.Tensor):
        return image
    if isinstance(image, Image.Image):
        levels = np.array(image)
        return torch.from_numpy(levels[None] if levels.ndim == 2 else levels.transpose(2, 0, 1))
    return torch.from_numpy(
        np.require(image, requirements=["C", "W"])
    )  # torch needs a writable array with positive strides


def _centre(have: int, want: int) -> tuple[int, slice]:
    """Return, along one side, the offset of the image on the canvas and the part of the image that is kept."""
    if have < want:
        return (want - have) // 2, slice(None)
    start = round((have - want) / 2)  # half to even, as torchvision
    return 0, slice(start, start + want)


__all__ = ["PlainViTImageProcessor", "PlainViTImageProcessorPil"]

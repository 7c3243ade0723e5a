"""Read transformers' image processors from folders, and export ours to its stock class."""

import json
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from transformers import (
    AutoImageProcessor,
    Siglip2ImageProcessor,
    Siglip2ImageProcessorPil,
    ViTImageProcessor,
    ViTImageProcessorPil,
)
from transformers.image_processing_utils import BaseImageProcessor

from ....errors import CheckpointError, ExportError, OutputError
from ....image_processing_plain_vit import SourcePreprocessing, check_settings

CUTTING = ("crop_to_patches", "do_image_splitting", "do_pan_and_scan")  # settings that cut a large image into tiles


def processor_from_transformers(
    preprocessor_config: Mapping[str, Any], model_config: Mapping[str, Any] | None = None
) -> BaseImageProcessor:
    """Return the image processor of a folder in transformers' layout, including plain-vit's own folders.

    A stock processor keeps the stock class that `AutoImageProcessor` chooses, so its pixels are the source's.

    Args:
        preprocessor_config: The contents of `preprocessor_config.json`, of this or an older release of transformers,
            or the part of `processor_config.json` for images.
        model_config: The contents of `config.json`, which determines the class if `preprocessor_config` does not.

    Raises:
        CheckpointError: if neither names an image processor that transformers or plain-vit has.
        ValueError: for settings with which no image can be prepared.
    """
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            for name, content in (("preprocessor_config.json", preprocessor_config), ("config.json", model_config)):
                if content is not None:  # without references to code, which is never loaded
                    known = {key: value for key, value in content.items() if key != "auto_map"}
                    Path(folder, name).write_text(json.dumps(known), encoding="utf-8")
        except OSError as error:
            raise OutputError(f"temporary files cannot be written: {error.strerror}. Free disk space.") from error
        try:
            processor = AutoImageProcessor.from_pretrained(folder, trust_remote_code=False)
        except (OSError, ValueError) as error:
            named = preprocessor_config.get("image_processor_type") or preprocessor_config.get("feature_extractor_type")
            reason = "" if named else f" ({str(error).strip().partition(chr(10))[0]})"  # of settings, not of the class
            raise CheckpointError(
                f"the folder names the image processor {named}, its config.json the model type "
                f"{(model_config or {}).get('model_type')}: expected one of transformers or plain-vit. Correct it, or "
                "move preprocessor_config.json (or processor_config.json) out of the folder to open the model alone"
                f"{reason}"
            ) from error
    check_settings(vars(processor))
    return processor


def uncut(processor: BaseImageProcessor) -> tuple[BaseImageProcessor | None, list[str]]:
    """Return a processor that prepares one input for an image of any size, as an encoder by itself takes it.

    Processors of multimodal models may cut a large image into tiles, which their model joins again.

    Args:
        processor: Of a model that contains the encoder. Its settings are changed where they say whether to cut.

    Returns:
        The processor, or None if it always cuts; and notes for the report.
    """
    kind: type[Any] = type(processor)
    notes: list[str] = []
    if isinstance(processor, SourcePreprocessing):
        return processor, notes
    name, switches = kind.__name__, [setting for setting in CUTTING if hasattr(processor, setting)]
    if cutting := [setting for setting in switches if getattr(processor, setting)]:
        for setting in cutting:
            setattr(processor, setting, False)
        notes.append(f"images are prepared whole: {name} cuts large ones into tiles ({', '.join(cutting)}=True)")
    # Of default sizes: those of a stranger's file could fill the memory.
    prepared = kind(**dict.fromkeys(switches, False))(np.zeros((1024, 2048, 3), np.uint8), return_tensors="np")
    found = {key: np.shape(value) for key, value in prepared.items()}
    shape = found.get("pixel_values", ())
    if shape[:1] == (1,) and (len(shape) == 4 or (len(shape) == 3 and "spatial_shapes" in found)):
        return processor, notes
    return None, [
        f"no image processor: {name} prepares an image as {found}, for the whole model. Give image_mean= and "
        "image_std= to prepare images for the encoder alone"
    ]


def stock_processor(processor: SourcePreprocessing) -> BaseImageProcessor:
    """Return transformers' stock processor with the same pixels, which opens without plain-vit and without trust.

    It is ViT's processor, or SigLIP 2's for patches of images of many sizes.

    The pixels are equal for images without transparency: transformers blends transparency with white, the sources drop
    it. A saved folder does not record the backend. `AutoImageProcessor` opens it with torchvision, whose pixels differ
    by one or two levels of 255, unless called with `backend="pil"`.

    Args:
        processor: Our processor, of either backend. The result resizes with Pillow, or with torch if `resize_with`
            says so; then its normalisation differs by rounding, by up to 2e-6.

    Raises:
        ExportError: if the stock class would prepare other pixels, as for some sizes where its centre crop is off by 1.
    """
    settings = processor.settings()
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
    if settings.get("max_num_patches") is not None:
        is_torch = settings.pop("resize_with") == "torch"
        kept = {name: value for name, value in settings.items() if name not in ("size", "crop_size", "do_center_crop")}
        return (Siglip2ImageProcessor if is_torch else Siglip2ImageProcessorPil)(**kept)
    for name in ("max_num_patches", "patch_size"):
        settings.pop(name, None)
    settings["do_convert_rgb"] = len(settings["image_mean"]) == 3  # the stock class converts only to RGB
    stock = ViTImageProcessor if settings.pop("resize_with") == "torch" else ViTImageProcessorPil
    return stock(**settings)

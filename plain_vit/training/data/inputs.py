"""The inputs of a model in a batch: images of one size, or packed patches of images of many sizes.

Legend: `B` images, `C` channels, `H W` pixels, `N` patches of all images, `P` values of a patch.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import PIL.Image
import torch

from ...image_processing_plain_vit import cut_into_patches
from ...packing import pack, unpad, whole_images

MODEL_INPUTS = ("pixel_values", "pixel_attention_mask", "spatial_shapes", "image_sizes")


def model_inputs(batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the model's keyword arguments from a batch or from an image processor's output."""
    return {name: batch[name] for name in MODEL_INPUTS if name in batch}


def count_images(batch: Mapping[str, Any]) -> int:
    """Return the number of images in a batch, which for packed patches is not the first dimension."""
    return len(batch["spatial_shapes"] if "spatial_shapes" in batch else next(iter(batch.values())))


def max_num_patches_of(image_processor: Any) -> int | None:
    """Return the maximum number of patches per image, or None if the processor resizes all images to one size."""
    return getattr(image_processor, "max_num_patches", None)


class PackedImages:
    """Collate function that concatenates the patches of images of many sizes, without padding.

    Args:
        patch_size: side of a patch, in pixels.
    """

    def __init__(self, patch_size: int) -> None:
        self.patch_size = patch_size

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return `pixel_values` [N, P], `spatial_shapes` [B, 2], and the other entries stacked."""
        return pack([self._cut(example) for example in examples])

    def _cut(self, example: Mapping[str, Any]) -> dict[str, Any]:
        pixels, side = example["pixel_values"], self.patch_size
        grid = torch.tensor([pixels.shape[-2] // side, pixels.shape[-1] // side])
        return {**example, "pixel_values": cut_into_patches(pixels, side), "spatial_shapes": grid}


class NormalizedPatches:
    """Normalise flattened patches.

    Args:
        normalize: normalisation of pixels [..., C, H, W].
        patch_size: side of a patch, in pixels.
    """

    def __init__(self, normalize: Callable[[torch.Tensor], torch.Tensor], patch_size: int) -> None:
        self.normalize, self.patch_size = normalize, patch_size

    def __call__(self, patches: torch.Tensor) -> torch.Tensor:
        """Return normalised patches [N, P]."""
        images = patches.unflatten(1, (self.patch_size, self.patch_size, -1)).permute(0, 3, 1, 2)  # N C rows columns
        return self.normalize(images).permute(0, 2, 3, 1).flatten(1)


def images_in(inputs: Mapping[str, torch.Tensor], image_processor: Any) -> list[torch.Tensor]:
    """Return the images (C, H, W) in a model's inputs, each in its own size.

    Args:
        inputs: inputs of the model, made by this image processor.
        image_processor: determines the patch size.
    """
    if "spatial_shapes" not in inputs:
        return list(inputs["pixel_values"])
    return whole_images(inputs, image_processor.patch_size)


class NoiseInputs:
    """Random inputs of a model, of the same shape as those of images.

    Args:
        image_processor: determines the shape.
    """

    def __init__(self, image_processor: Any) -> None:
        square = PIL.Image.new("RGB", (512, 512))
        inputs = model_inputs(image_processor([square], return_tensors="pt"))
        self.of_one = pack(unpad(inputs)) if "spatial_shapes" in inputs else inputs

    def __call__(self, images: int) -> dict[str, torch.Tensor]:
        """Return random inputs for this many images."""
        inputs = {name: values.repeat(images, *[1] * (values.ndim - 1)) for name, values in self.of_one.items()}
        return {**inputs, "pixel_values": torch.randn_like(inputs["pixel_values"])}

"""Run a model and record its attentions and outputs, without changing it.

Legend: `B` batch, `C` channels, `H W` pixels, `h w` patch grid, `L` tokens, `D` hidden size.
"""

import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import nn

from ..errors import AnalysisError
from ..modeling_plain_vit import PlainViTModel, PlainViTPreTrainedModel
from ..packed_plain_vit import OneSize, tokens_of
from ..packing import whole_images
from .replicas import eager, replica

Kept = TypeVar("Kept")
Score = Callable[[torch.Tensor], torch.Tensor]  # of one image: from its logits or pooled features to one number
Target = int | Sequence[int] | Score | Sequence[Score] | None


@dataclass(frozen=True)
class TokenLayout:
    """Positions of the tokens of an image in the sequence.

    Args:
        grid_size: Patch grid (down, across).
        patch_size: Patch (height, width) in pixels.
        before: Names of the tokens before the patches, in order: "class", "distillation", "register 0", ...
        after: Names of the tokens after the patches: registers, in models that append them.
    """

    grid_size: tuple[int, int]
    patch_size: tuple[int, int]
    before: tuple[str, ...]
    after: tuple[str, ...]

    @property
    def num_patches(self) -> int:
        """Count the patches."""
        return self.grid_size[0] * self.grid_size[1]

    @property
    def patches(self) -> slice:
        """Return the positions of the patches, in raster order."""
        return slice(len(self.before), len(self.before) + self.num_patches)

    def query(self, query: str | tuple[int, int]) -> slice:
        """Return the positions of a query.

        Args:
            query: The name of a token, "patches" for all patches, or the (row, column) of a patch, from 0.

        Raises:
            AnalysisError: There is no such token, or the patch is outside the grid.
        """
        if isinstance(query, str):
            if query == "patches":
                return self.patches
            named = {**{name: i for i, name in enumerate(self.before)},
                     **{name: self.patches.stop + i for i, name in enumerate(self.after)}}  # fmt: skip
            if query not in named:
                raise AnalysisError(
                    f"the model has no token {query!r}: expected one of {[*named, 'patches']}, or the (row, column) of "
                    "a patch"
                )
            return slice(named[query], named[query] + 1)
        row, column = patch_in_grid("query patch", query, self.grid_size)
        position = self.patches.start + row * self.grid_size[1] + column
        return slice(position, position + 1)


def plain(model: Any) -> PlainViTPreTrainedModel:
    """Return the plain ViT inside wrappers of `torch.compile`, data parallelism and PEFT, in any order.

    Raises:
        AnalysisError: The model is not a plain ViT, or is prepared for an engine, which leaves no modules.
    """
    while (inside := _unwrapped(model)) is not model:
        model = inside
    if getattr(getattr(model, "config", None), "model_type", None) != "plain_vit":
        raise AnalysisError(
            f"got a {type(model).__name__}: expected a plain ViT, as PlainViTForImageClassification.from_pretrained or "
            "plain_vit.conversion.from_module return it"
        )
    if not hasattr(model.base_model, "embeddings"):
        raise AnalysisError(
            f"this {type(model).__name__} has no modules to look at, its pass is a graph in an engine: give the model "
            "itself, not one that is prepared for an engine"
        )
    return cast(PlainViTPreTrainedModel, model)


def _unwrapped(model: Any) -> Any:
    """Return the model inside a wrapper, or the model itself if it is not wrapped."""
    model = getattr(eager(model), "module", eager(model))
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def observed(model: nn.Module) -> PlainViTPreTrainedModel:
    """Return a replica of the plain ViT inside any wrappers; hooks on the replica do not affect the model.

    Raises:
        AnalysisError: As for `plain`.
    """
    return replica(plain(model))


def encoder(model: nn.Module) -> PlainViTModel:
    """Return the encoder of a plain ViT."""
    return cast(PlainViTModel, plain(model).base_model)


def token_layout(model: nn.Module, pixel_values: torch.Tensor) -> TokenLayout:
    """Return the token layout of these images.

    Args:
        model: A plain ViT.
        pixel_values: Normalised pixels of shape (B, C, H, W).

    Raises:
        AnalysisError: The pixels do not fit the model.
    """
    config = plain(model).config
    try:
        grid_size = cast(OneSize, tokens_of(config, pixel_values)).grid_size
        positions = encoder(model).embeddings.position_embeddings
        if config.position_resampling == "truncate" and positions is not None:
            with torch.no_grad():  # raises the model's error if the position table is too small for this grid
                positions(grid_size, torch.empty(0, device=plain(model).device))
    except ValueError as error:
        raise AnalysisError(str(error)) from error
    special = ["class"] * config.use_class_token + ["distillation"] * config.use_distillation_token
    registers = [f"register {i}" for i in range(config.num_register_tokens)]
    last = config.register_tokens_last
    return TokenLayout(
        grid_size=grid_size,
        patch_size=config.patch_shape,
        before=tuple(special if last else special + registers),
        after=tuple(registers if last else ()),
    )


def as_batch(model: nn.Module, pixel_values: torch.Tensor | Mapping[str, Any]) -> torch.Tensor:
    """Return pixels, or the pixels in an image processor's output, on the model's device.

    Raises:
        AnalysisError: The input holds patches of images of several sizes, or values that are not floating-point.
    """
    if isinstance(pixel_values, Mapping):
        pixel_values = pixels_of(pixel_values, plain(model).config.patch_shape[0])
    pixels = torch.as_tensor(pixel_values)
    if not pixels.is_floating_point():
        raise AnalysisError(f"the pixels have dtype {pixels.dtype}: give normalised ones, as an image processor does")
    return pixels.to(plain(model).device)


def prepared(
    model: nn.Module, pixel_values: torch.Tensor | Mapping[str, Any]
) -> tuple[PlainViTPreTrainedModel, torch.Tensor, TokenLayout]:
    """Return a replica of the model (see `observed`), its input (see `as_batch`), and the token layout.

    Raises:
        AnalysisError: As for these functions and `token_layout`.
    """
    replicated, pixels = observed(model), as_batch(model, pixel_values)
    return replicated, pixels, token_layout(replicated, pixels)


def pixels_of(inputs: Mapping[str, Any], patch_size: int | None) -> torch.Tensor:
    """Return the pixels (B, C, H, W) in the output of an image processor, even if it cut or padded them.

    Args:
        inputs: The output.
        patch_size: Side of the patches, in pixels.

    Raises:
        AnalysisError: The images differ in size, or the side of their patches is not known.
    """
    if not {"spatial_shapes", "image_sizes"} & inputs.keys():
        return _as_tensor(inputs["pixel_values"])
    tensors = {name: _as_tensor(values) for name, values in inputs.items()}
    if "image_sizes" in tensors:
        sides = tensors["image_sizes"].tolist()
        images = [image[:, :h, :w] for image, (h, w) in zip(tensors["pixel_values"], sides, strict=True)]
    elif patch_size is None:
        raise AnalysisError("the pixels are cut into patches: give the image processor too, which knows their size")
    else:
        images = whole_images(tensors, patch_size)
    if sizes := sorted({tuple(image.shape[1:]) for image in images[1:] if image.shape != images[0].shape}):
        raise AnalysisError(
            f"the images are of {tuple(images[0].shape[1:])} and {sizes[0]} pixels (height, width): give images of one "
            "size together, and others one by one"
        )
    return torch.stack(images)


def _as_tensor(values: Any) -> torch.Tensor:
    """Return a tensor, also for the lists that an image processor returns without `return_tensors`."""
    if isinstance(values, list):
        return torch.stack([torch.as_tensor(value) for value in values])
    return torch.as_tensor(values)


def attention_modules(model: nn.Module) -> list[list[nn.Module]]:
    """Return the attention modules of each layer; only layers with parallel branches have several.

    Raises:
        AnalysisError: The model has no layers.
    """
    layers = encoder(model).layers
    if len(layers) == 0:
        raise AnalysisError("the model has no layers (num_hidden_layers=0), so there is no attention to show")
    return [[m for name, m in layer.named_modules() if name.split(".")[-1] == "attention"] for layer in layers]


def record_attentions(model: nn.Module, keep: Callable[[torch.Tensor], Kept]) -> list[list[Kept]]:
    """Record the attention weights of every forward pass of a replica, with any attention implementation.

    Each attention returns its weights, and only the result of `keep` stays in memory.

    Args:
        model: A plain ViT, from `observed`.
        keep: Function applied to the weights of one attention, of shape (B, heads, L, L).

    Returns:
        One list per layer with a result for each of its attentions, filled by the forward pass.
    """
    modules = attention_modules(model)
    kept: list[list[Kept]] = [[] for _ in modules]

    def ask(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return args, {**kwargs, "output_attentions": True}

    def record(layer: list[Kept]) -> Callable:
        return lambda _module, _args, output: layer.append(keep(output[1]))

    for layer, attentions in zip(kept, modules, strict=True):
        for attention in attentions:
            attention.register_forward_pre_hook(ask, with_kwargs=True)
            attention.register_forward_hook(record(layer))
    return kept


def record_outputs(*modules: nn.Module) -> list[torch.Tensor]:
    """Record the outputs of modules of a replica in every forward pass, in the order in which the modules run."""
    kept: list[torch.Tensor] = []
    for module in modules:
        module.register_forward_hook(lambda _module, _args, output: kept.append(output))
    return kept


def whole_numbers(what: str, given: Any, *, shape: tuple[int, ...] | None = None) -> np.ndarray:
    """Return a whole number, or a sequence of them of any kind, as an array of integers.

    Args:
        what: What the numbers are, for the error message.
        given: Numbers of Python, numpy or torch.
        shape: () for one number, (n,) for n numbers (default: any shape).

    Raises:
        AnalysisError: The values are not whole numbers, or have another shape.
    """
    try:
        numbers = np.asarray(given.detach().cpu() if isinstance(given, torch.Tensor) else given)
    except ValueError:  # nested sequences of different lengths
        numbers = np.empty(0, dtype=object)
    is_whole = numbers.dtype.kind in "iu" or (numbers.dtype.kind == "f" and numbers.size == 0)
    if not is_whole or numbers.ndim > 1 or shape not in (None, numbers.shape):
        expected = "a whole number, or a sequence of them" if shape is None else (
            f"{shape[0]} whole numbers" if shape else "a whole number")  # fmt: skip
        raise AnalysisError(f"{what} is {reprlib.repr(given)}: expected {expected}")
    return numbers.astype(np.int64)


def patch_in_grid(what: str, patch: Any, grid_size: tuple[int, int]) -> tuple[int, int]:
    """Return the (row, column) of a patch.

    Raises:
        AnalysisError: The value is not a pair of whole numbers, or the patch is outside the grid.
    """
    row, column = whole_numbers(what, patch, shape=(2,)).tolist()
    h, w = grid_size
    if not (0 <= row < h and 0 <= column < w):
        raise AnalysisError(
            f"the {what} {(row, column)} is outside the grid: expected a row from 0 to {h - 1} and a column from 0 to "
            f"{w - 1}"
        )
    return row, column


def chosen(what: str, wanted: int | Sequence[int] | None, count: int) -> list[int]:
    """Return layer or head numbers from 0; negative ones count from the end.

    Raises:
        AnalysisError: There are no numbers, or one of them is out of range.
    """
    if wanted is None:
        return list(range(count))
    numbers = np.atleast_1d(whole_numbers(what, wanted)).tolist()
    if not numbers:
        raise AnalysisError(f"no {what} is chosen: give one or more, or omit the argument for all of them")
    for number in numbers:
        if not -count <= number < count:
            raise AnalysisError(
                f"{what} {number} is out of range: the model has {count}, numbered 0 to {count - 1} (or -{count} to -1 "
                "from the end)"
            )
    return [number % count for number in numbers]


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Multiply matrices in float32, even under autocast."""
    with torch.autocast(left.device.type, enabled=False):
        return left.float() @ right.float()


def as_array(values: torch.Tensor) -> np.ndarray:
    """Return values of any dtype, on any device, as an array in float32."""
    return values.detach().float().cpu().numpy()


def classify(model: PlainViTPreTrainedModel, pixel_values: torch.Tensor) -> torch.Tensor:
    """Return logits of shape (B, classes) in float32.

    Raises:
        AnalysisError: The model returns no logits per image.
    """
    logits = getattr(model(pixel_values), "logits", None)
    if logits is None or logits.ndim != 2 or not model.config.num_labels:
        raise AnalysisError(
            f"{type(model).__name__} returns no class scores for an image: expected a PlainViTForImageClassification "
            'with labels whose pooling is not "none"; for gradients, you can also give target a function of an '
            "image's pooled features"
        )
    return logits.float()


def vectors(model: PlainViTPreTrainedModel, pixel_values: torch.Tensor) -> torch.Tensor:
    """Return one vector per image in float32: the logits of a classifier, the pooled features of another model.

    Raises:
        AnalysisError: The model returns neither.
    """
    outputs = model(pixel_values)
    found = outputs.get("logits", outputs.get("pooler_output"))
    if found is None or found.ndim != 2:
        raise AnalysisError(
            f"this {type(model).__name__} pools nothing, so there is no vector of an image: expected a "
            "PlainViTForImageClassification or PlainViTModel with its pooling"
        )
    return found.float()


def differentiable_scores(
    model: PlainViTPreTrainedModel, pixel_values: torch.Tensor, target: Target
) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """Return the scores of images with gradients, and the function that computes the same scores of other pixels.

    Args:
        model: A plain ViT.
        pixel_values: Normalised pixels of shape (B, C, H, W), which require gradients.
        target: The class or a function of the logits, or of the pooled features if the model has no classifier, for
            each image or for all (default: the class with the highest score of each image).

    Raises:
        AnalysisError: The scores have no gradients, a class is out of range, or there are more or fewer targets than
            images; also the errors of `classify` and `vectors`.
    """
    given = list(target) if isinstance(target, (list, tuple)) else [target]
    are_functions = all(map(callable, given))
    read = vectors if are_functions else classify
    outputs = read(model, pixel_values)
    if not are_functions:
        functions: list[Any] = [itemgetter(number) for number in target_classes(outputs, cast(Any, target))]
    elif isinstance(target, (list, tuple)) and len(given) != len(outputs):
        raise AnalysisError(
            f"got {len(given)} target functions for {len(outputs)} images: expected one for each, or one for all"
        )
    else:
        functions = given * (len(outputs) // len(given))

    def scores(outputs: torch.Tensor) -> torch.Tensor:
        each = [function(output) for function, output in zip(functions, outputs, strict=True)]
        for score in each:
            if not isinstance(score, torch.Tensor) or score.numel() != 1:
                what = (
                    f"{tuple(score.shape)} numbers" if isinstance(score, torch.Tensor) else f"a {type(score).__name__}"
                )
                raise AnalysisError(f"target returns {what}: expected a tensor with one number")
        return torch.stack([score.reshape(()) for score in each])

    found = scores(outputs)
    if not found.requires_grad:
        raise AnalysisError(
            f"this {type(model).__name__} or target computes without gradients: give the model itself, not one that is "
            "prepared for inference, a differentiable target, and call outside of torch.inference_mode()"
        )
    return found, lambda pixels: scores(read(model, pixels))


def target_classes(logits: torch.Tensor, target: int | Sequence[int] | None) -> list[int]:
    """Return the target class of each image, the highest if None.

    Raises:
        AnalysisError: A class is out of range, or the number of classes is neither 1 nor the number of images.
    """
    batch, classes = logits.shape
    if target is None:
        return logits.argmax(dim=-1).tolist()
    numbers = whole_numbers("target", target)
    if numbers.shape not in ((), (batch,)):
        raise AnalysisError(
            f"got {len(numbers)} target classes for {batch} images: expected one for each, or one for all"
        )
    targets: list[int] = np.full(batch, numbers).tolist()
    if not all(0 <= number < classes for number in targets):
        raise AnalysisError(f"target {targets} is out of range: the classes are 0 to {classes - 1}")
    return targets

"""Images of many sizes in one batch, as sequences of patches (NaViT: Dehghani et al. 2023; NaFlex: SigLIP 2, 2025).

Besides images of one size, `pixel_values` of shape (B, C, H, W), a model takes patches of images of many sizes, in
raster order, each flattened in the order row, column, channel, together with `spatial_shapes` (images, 2), the grids:

    padded  `pixel_values` (B, N, P), the patches of an image per row, padded at the end to the largest number;
    packed  `pixel_values` (N, P), the patches of all images one after the other, without padding.

Images padded to one size with their `image_sizes`, in pixels, are cut into patches and packed (`without_padding`).

Each of these three layouts has a class that knows where the tokens of an image are: which positions are added to them,
which tokens attend to each other, and which are pooled together. Padding is never attended to or pooled.

Shapes: `B` batch, `N` patches, `P` values of a patch, `L` tokens, `D` hidden size, `h w` patch grid, `d` head width.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from .configuration_plain_vit import PlainViTConfig
from .positions_plain_vit import Distances, Rotation, Windows, distances_of, windows_of

Grid = tuple[int, int]
GridFunction = Callable[[Grid, torch.Tensor], torch.Tensor]

# Arguments that select tokens in some model of this package or of transformers
MASKS = ("attention_mask", "head_mask", "bool_masked_pos", "image_sizes", "pixel_attention_mask", "spatial_shapes")
# Found in the names of kernels that take no mask over pairs of tokens
UNMASKED = ("flash", "flex", "paged")


class Places(NamedTuple):
    """Positions of the tokens of a block, and how many of them it computes.

    Args:
        rotation: Rotation of queries and keys; None for no rotation.
        distances: Distances of all pairs of tokens, for a relative position bias; None if no bias depends on them.
        windows: Windows of the patch grid, for blocks that attend within them; None if none does.
        images: Layout that keeps attention and stochastic depth within an image; None if each row is an image.
        num_output_tokens: Number of leading tokens of each row that the block computes; None for all.
    """

    rotation: Rotation | None = None
    distances: Distances | None = None
    windows: Windows | None = None
    images: "ManySizes | None" = None
    num_output_tokens: int | None = None

    def first(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the leading tokens of (B, L, D) that the block computes."""
        if self.num_output_tokens is None:
            return hidden_states
        return hidden_states[:, : self.num_output_tokens].contiguous()


PLAIN = Places()  # one image per row, and nothing that depends on positions


class Tokens(ABC):
    """Layout of the tokens of each image in a batch.

    Attributes:
        images: This object if images have many sizes; None if each row is an image of the same size.
    """

    images: "ManySizes | None" = None

    @abstractmethod
    def lay_out(self, table_of: GridFunction, like: torch.Tensor) -> torch.Tensor:
        """Evaluate a function of the grid for the tokens of each image, in a form that can be added to the batch."""

    @abstractmethod
    def join(self, prefix: Sequence[torch.Tensor], patches: torch.Tensor) -> torch.Tensor:
        """Put tokens (1, count, D) before the patches of each image."""

    @abstractmethod
    def rotations(
        self, rotary: Callable[..., list[Rotation | None]], like: torch.Tensor, kept: torch.Tensor | None
    ) -> list[Rotation | None]:
        """Return the rotation of each block."""

    @abstractmethod
    def distances(self, config: PlainViTConfig, device: torch.device) -> Distances | None:
        """Return the distances of all pairs of tokens; None if no bias depends on them."""

    @abstractmethod
    def windows(self, config: PlainViTConfig, device: torch.device) -> Windows | None:
        """Return the windows of the patch grid; None if all blocks attend to the whole image."""

    @abstractmethod
    def by_image(self, hidden_states: torch.Tensor) -> tuple[Any, ...]:
        """Return a pooler's inputs: tokens with one image per row and, for many sizes, which are valid (B, L)."""

    def num_readable(self, count: int | None) -> int | None:
        """Return how many leading tokens of each row contain the first `count` of every image; None for all tokens."""
        return count


class OneSize(Tokens):
    """Images of one size."""

    def __init__(self, grid_size: Grid):
        self.grid_size = grid_size

    def lay_out(self, table_of: GridFunction, like: torch.Tensor) -> torch.Tensor:
        return table_of(self.grid_size, like)

    def join(self, prefix: Sequence[torch.Tensor], patches: torch.Tensor) -> torch.Tensor:
        return torch.cat((*(tokens.expand(patches.shape[0], -1, -1) for tokens in prefix), patches), dim=1)

    def rotations(
        self, rotary: Callable[..., list[Rotation | None]], like: torch.Tensor, kept: torch.Tensor | None
    ) -> list[Rotation | None]:
        return rotary(self.grid_size, like, kept)

    def distances(self, config: PlainViTConfig, device: torch.device) -> Distances | None:
        return distances_of(config, self.grid_size, device)

    def windows(self, config: PlainViTConfig, device: torch.device) -> Windows | None:
        return windows_of(config, self.grid_size, device)

    def by_image(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor]:
        return (hidden_states,)


class ManySizes(Tokens):
    """Base class for images of many sizes.

    Args:
        grids: The patch grid (down, across) of each image.
        num_prefix_tokens: Tokens before the patches of each image.
    """

    def __init__(self, grids: Sequence[Grid], num_prefix_tokens: int):
        self.grids = list(grids)
        self.lengths = [num_prefix_tokens + h * w for h, w in self.grids]
        self.num_prefix_tokens = num_prefix_tokens
        self.images = self

    @abstractmethod
    def arrange(self, of_images: Sequence[torch.Tensor]) -> torch.Tensor:
        """Arrange tensors (..., tokens, channels), one for each image, like the tokens in the batch."""

    @abstractmethod
    def attend(
        self, kernel: Callable[..., Any], implementation: str, query: torch.Tensor, key: torch.Tensor,
        value: torch.Tensor, **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """Compute attention within each image.

        Args:
            kernel: Maps query, key, value, mask and options to tokens (B, L, heads, d) and the weights.
            implementation: Name of the kernel.
            query: Shape (B, heads, L, d), or only the first tokens.
            key: Shape (B, heads, L, d).
            value: Shape (B, heads, L, d).
            **options: Further arguments of the kernel.
        """

    @abstractmethod
    def spread(self, of_images: torch.Tensor) -> torch.Tensor:
        """Return one value per image (images, 1, 1) in a form that multiplies the tokens of the batch."""

    def lay_out(self, table_of: GridFunction, like: torch.Tensor) -> torch.Tensor:
        tables = {grid: table_of(grid, like) for grid in dict.fromkeys(self.grids)}
        return self.arrange([tables[grid] for grid in self.grids])

    def rotations(
        self, rotary: Callable[..., list[Rotation | None]], like: torch.Tensor, kept: torch.Tensor | None
    ) -> list[Rotation | None]:
        if kept is not None:
            raise ValueError(
                "patch dropout is not combined with images of many sizes by any source: set patch_dropout_prob=0, or "
                "give images of one size"
            )
        of_grid = {grid: rotary(grid, like, None) for grid in dict.fromkeys(self.grids)}
        arranged: dict[int, Rotation | None] = {}  # blocks may share one
        blocks = []
        for of_images in zip(*(of_grid[grid] for grid in self.grids), strict=True):
            if id(of_images[0]) not in arranged:
                arranged[id(of_images[0])] = self._arrange_rotations(of_images)
            blocks.append(arranged[id(of_images[0])])
        return blocks

    def _arrange_rotations(self, rotations: Sequence[Rotation | None]) -> Rotation | None:
        some = [rotation for rotation in rotations if rotation is not None]
        if not some:
            return None

        def table(name: str) -> torch.Tensor:
            arranged = self.arrange([getattr(rotation, name) for rotation in some])
            return arranged if arranged.ndim == 4 else arranged[:, None]  # B (1 or heads) L d

        return Rotation(table("cos"), table("sin"), some[0].halves)

    def distances(self, config: PlainViTConfig, device: torch.device) -> None:
        return None  # such a bias is refused for images of many sizes

    def windows(self, config: PlainViTConfig, device: torch.device) -> None:
        return None  # and so are windows


class Padded(ManySizes):
    """One image per row, padded at the end to the largest.

    Args:
        grids: The patch grid (down, across) of each image.
        num_prefix_tokens: Tokens before the patches of each image.
        width: Patches in a row, padding included.
        device: Device of the tokens.
    """

    def __init__(self, grids: Sequence[Grid], num_prefix_tokens: int, width: int, device: torch.device):
        super().__init__(grids, num_prefix_tokens)
        self.width = num_prefix_tokens + width
        lengths = torch.tensor(self.lengths, device=device)
        is_full = min(self.lengths) == self.width
        self.valid = None if is_full else torch.arange(self.width, device=device) < lengths[:, None]  # B L

    def arrange(self, of_images: Sequence[torch.Tensor]) -> torch.Tensor:
        width = self.width - max(self.lengths) + max(one.shape[-2] for one in of_images)  # with prefix tokens or not
        return torch.stack([F.pad(one, (0, 0, 0, width - one.shape[-2])) for one in of_images])

    def join(self, prefix: Sequence[torch.Tensor], patches: torch.Tensor) -> torch.Tensor:
        return torch.cat((*(tokens.expand(patches.shape[0], -1, -1) for tokens in prefix), patches), dim=1)

    def attend(
        self, kernel: Callable[..., Any], implementation: str, query: torch.Tensor, key: torch.Tensor,
        value: torch.Tensor, **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        if self.valid is None:
            return kernel(query, key, value, None, **options)
        packing = ", or pack the patches of all images one after the other: pixel_values of shape (patches, values)"
        refuse_unmasked(implementation, "leave out padding", packing)
        mask = torch.zeros(self.valid.shape, dtype=query.dtype, device=query.device)
        mask = mask.masked_fill(~self.valid, torch.finfo(query.dtype).min)[:, None, None]  # B 1 1 L
        return kernel(query, key, value, mask, **options)

    def spread(self, of_images: torch.Tensor) -> torch.Tensor:
        return of_images

    def by_image(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return hidden_states, self.valid


class Packed(ManySizes):
    """The tokens of all images in one row, one image after the other.

    Attention is computed image by image, without a mask over all pairs of tokens or products between images.
    """

    def arrange(self, of_images: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(of_images), dim=-2)[None]

    def join(self, prefix: Sequence[torch.Tensor], patches: torch.Tensor) -> torch.Tensor:
        if not prefix:
            return patches
        images = patches[0].split([h * w for h, w in self.grids])
        return torch.cat([part for image in images for part in (*(tokens[0] for tokens in prefix), image)])[None]

    def attend(
        self, kernel: Callable[..., Any], implementation: str, query: torch.Tensor, key: torch.Tensor,
        value: torch.Tensor, **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        images = zip(*(heads.split(self.lengths, dim=2) for heads in (query, key, value)), strict=True)
        attended, weights = zip(*(kernel(*heads, None, **options) for heads in images), strict=True)
        if weights[0] is None:
            return torch.cat(attended, dim=1), None
        blocks = [torch.block_diag(*(image[0, head] for image in weights)) for head in range(query.shape[1])]
        return torch.cat(attended, dim=1), torch.stack(blocks)[None]

    def spread(self, of_images: torch.Tensor) -> torch.Tensor:
        lengths = torch.tensor(self.lengths, device=of_images.device)
        return of_images.flatten().repeat_interleave(lengths)[None, :, None]

    def num_readable(self, count: int | None) -> None:
        return None

    def by_image(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        images = hidden_states[0].split(self.lengths)
        lengths = torch.tensor(self.lengths, device=hidden_states.device)
        valid = torch.arange(max(self.lengths), device=hidden_states.device) < lengths[:, None]
        return torch.nn.utils.rnn.pad_sequence(images, batch_first=True), valid


# Reading of a model's inputs


def cut_patches(pixel_values: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Cut images (B, C, H, W) into flattened patches (B, N, rows columns C), without partial patches."""
    batch, channels, *sides = pixel_values.shape
    h, w = sides[0] // height, sides[1] // width
    patches = pixel_values[..., : h * height, : w * width].reshape(batch, channels, h, height, w, width)
    return patches.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def as_weights(pixel_values: torch.Tensor, model: PreTrainedModel) -> torch.Tensor:
    """Return the pixels in the dtype of the weights; refuse integers, because they were not normalised."""
    expected = "normalised floats, as the image processor makes them"
    if not isinstance(pixel_values, torch.Tensor):
        raise TypeError(
            f'pixel_values is a {type(pixel_values).__name__}: expected a tensor of {expected} with return_tensors="pt"'
        )
    if not pixel_values.is_floating_point():
        raise ValueError(f"pixel_values has dtype {pixel_values.dtype}: expected {expected}")
    return pixel_values.to(dtype_of(model))


def dtype_of(model: PreTrainedModel) -> torch.dtype:
    """Return the dtype of a model's first weights; a replica of `nn.DataParallel` holds them without parameters."""
    if not getattr(model, "_is_replica", False):
        return model.dtype
    held = (value for module in model.modules() for value in vars(module).values())
    return next(value.dtype for value in held if isinstance(value, torch.Tensor) and value.is_floating_point())


def refuse_masks(options: dict[str, Any]) -> None:
    """Remove masks that the model does not take from its other arguments; refuse any that is not None."""
    for name in MASKS:
        if options.pop(name, None) is not None:
            raise ValueError(
                f"{name} is not an input of this model, in which each token attends to all tokens of its image: omit "
                "it. Patches are masked with bool_masked_pos; spatial_shapes describes padding, in models that take it"
            )


def refuse_unmasked(implementation: str, purpose: str, otherwise: str = "") -> None:
    """Refuse a kernel that takes no mask over pairs of tokens."""
    if any(kind in implementation for kind in UNMASKED):
        advice = f'call set_attn_implementation("sdpa"){otherwise}'
        raise ValueError(f"attention {implementation!r} cannot {purpose}: {advice}")


def tokens_of(
    config: PlainViTConfig,
    pixel_values: torch.Tensor,
    pixel_attention_mask: torch.Tensor | None = None,
    spatial_shapes: torch.Tensor | None = None,
) -> Tokens:
    """Return the layout of the tokens in a batch.

    Args:
        config: Config of the model.
        pixel_values: Shape (B, C, H, W); or with `spatial_shapes` (B, N, P) or (N, P).
        pixel_attention_mask: Shape (B, N), 0 for padding; optional, but it must agree with `spatial_shapes`.
        spatial_shapes: Patch grid (down, across) of each image, of shape (images, 2).

    Raises:
        ValueError: The inputs contradict each other or do not fit the model; the message says what was expected.
    """
    shape, channels = tuple(pixel_values.shape), config.num_channels
    if spatial_shapes is None:
        if len(shape) != 4 or shape[1] != channels:
            raise ValueError(
                f"pixel_values has shape {shape}: expected (batch, {channels}, height, width); patches of images of "
                "many sizes need spatial_shapes beside them"
            )
        if pixel_attention_mask is not None:
            raise ValueError("pixel_attention_mask marks padded patches: it needs spatial_shapes")
        return OneSize(config.grid_of(*shape[-2:]))
    values = config.patch_shape[0] * config.patch_shape[1] * channels
    if len(shape) not in (2, 3) or shape[-1] != values:
        raise ValueError(
            f"pixel_values has shape {shape} beside spatial_shapes: expected the flattened patches of images of many "
            f"sizes, padded (batch, patches, {values}) or packed (patches, {values})"
        )
    _check_model(config)
    grids = _pairs_in("spatial_shapes", "patch", spatial_shapes)
    tokens = _padded(config, grids, pixel_values) if len(shape) == 3 else _packed(config, grids, pixel_values)
    if pixel_attention_mask is not None:
        _check_mask(pixel_attention_mask, grids, shape)
    return tokens


def without_padding(
    config: PlainViTConfig,
    pixel_values: torch.Tensor,
    spatial_shapes: torch.Tensor | None,
    image_sizes: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return pixels and grids; of images that were padded to one size, their patches, packed, and their grids.

    Args:
        config: Config of the model.
        pixel_values: As for `tokens_of`; with `image_sizes`, images (B, C, H, W) padded at the right and the bottom.
        spatial_shapes: As for `tokens_of`.
        image_sizes: Height and width in pixels of each image before the padding, of shape (B, 2), as
            `PixtralImageProcessor` returns them.

    Raises:
        ValueError: The inputs contradict each other or do not fit the model; the message says what was expected.
    """
    if image_sizes is None:
        return pixel_values, spatial_shapes
    shape, sizes = tuple(pixel_values.shape), _pairs_in("image_sizes", "pixel", image_sizes)
    padded = shape[2:] if len(shape) == 4 and spatial_shapes is None else (0, 0)
    if len(sizes) != shape[0] or any(side > most for size in sizes for side, most in zip(size, padded, strict=True)):
        raise ValueError(
            f"pixel_values has shape {shape}, and image_sizes is {sizes}: expected images (B, C, H, W), the height and "
            "width of each, at most H and W, and no spatial_shapes"
        )
    grids = torch.tensor([config.grid_of(*size) for size in sizes])
    images = [image[None, :, :height, :width] for image, (height, width) in zip(pixel_values, sizes, strict=True)]
    return torch.cat([cut_patches(image, *config.patch_shape)[0] for image in images]), grids


def _pairs_in(name: str, unit: str, pairs: torch.Tensor) -> list[tuple[int, int]]:
    """Return the grids or sizes of images as ints."""
    if not isinstance(pairs, torch.Tensor):
        raise TypeError(f"{name} is a {type(pairs).__name__}: expected a tensor (images, 2)")
    kind = pairs.dtype
    if pairs.ndim != 2 or pairs.shape[1] != 2 or kind.is_floating_point or kind == torch.bool:
        raise ValueError(
            f"{name} has shape {tuple(pairs.shape)} and dtype {kind}: expected ints of shape (images, 2), the "
            f"sides of each image (down, across), counted by the {unit}"
        )
    found = [(int(down), int(across)) for down, across in pairs.tolist()]
    if not found or min(min(pair) for pair in found) < 1:
        raise ValueError(f"{name} is {found}: expected at least one image, and one {unit} in each direction")
    return found


def _padded(config: PlainViTConfig, grids: Sequence[Grid], pixel_values: torch.Tensor) -> Padded:
    batch, width = pixel_values.shape[:2]
    if len(grids) != batch or max(h * w for h, w in grids) > width:
        raise ValueError(
            f"pixel_values has {batch} rows of {width} patches, and spatial_shapes the grids {grids}: expected one for "
            "each row, of at most as many patches"
        )
    return Padded(grids, config.num_prefix_tokens, width, pixel_values.device)


def _packed(config: PlainViTConfig, grids: Sequence[Grid], pixel_values: torch.Tensor) -> Packed:
    total = sum(h * w for h, w in grids)
    if total != pixel_values.shape[0]:
        raise ValueError(
            f"pixel_values has {pixel_values.shape[0]} patches, and the grids of spatial_shapes {total}: expected the "
            "patches of all images, without padding"
        )
    return Packed(grids, config.num_prefix_tokens)


def _check_mask(mask: torch.Tensor, grids: Sequence[Grid], shape: tuple[int, ...]) -> None:
    """Refuse a mask that does not match the grids."""
    if tuple(mask.shape) != shape[:-1]:
        raise ValueError(f"pixel_attention_mask has shape {tuple(mask.shape)}: expected {shape[:-1]}, one per patch")
    counts = torch.tensor([h * w for h, w in grids], device=mask.device)
    expected = torch.arange(shape[1], device=mask.device) < counts[:, None] if len(shape) == 3 else True
    if not torch.all(mask.bool() == expected):
        raise ValueError(
            "pixel_attention_mask contradicts spatial_shapes: expected 1 for the first patches of each row, as many as "
            "its grid has, and 0 for the padding after them"
        )


def _check_model(config: PlainViTConfig) -> None:
    """Refuse models that no source uses with images of many sizes."""
    unusual = {
        "a ResNet stem": config.resnet_stem is not None,
        f'patch_projection="{config.patch_projection}"': config.patch_projection == "shifted",
        f'attention_type="{config.attention_type}"': config.attention_type not in ("self", "differential"),
        "attention within windows": config.window_attention is not None,
        "a relative position bias": config.relative_position_bias is not None,
        "register_tokens_last": config.register_tokens_last,
        "a distillation token": config.use_distillation_token,
    }
    if found := [name for name, is_there in unusual.items() if is_there]:
        raise ValueError(
            f"images of many sizes are not combined with {' or '.join(found)} by any source: give images of one size, "
            "(batch, channels, height, width), without spatial_shapes"
        )


__all__ = [
    "PLAIN", "ManySizes", "OneSize", "Packed", "Padded", "Places", "Tokens", "as_weights", "cut_patches",
    "refuse_masks", "tokens_of", "without_padding",
]  # fmt: skip

"""Tokens of single blocks, asked for as in timm (`forward_intermediates`) and in DINOv2 (`get_intermediate_layers`).

Shapes: `B` batch, `C` channels, `H W` pixels, `h w` patch grid, `N` patches, `D` hidden size.
"""

from collections.abc import Sequence
from typing import Any

import torch

from .packed_plain_vit import as_weights, tokens_of


class IntermediateLayers:
    """Mixin of every plain ViT model: the tokens after any of its blocks."""

    config: Any
    base_model: Any
    tokens_to_map: Any

    @property
    def feature_info(self) -> list[dict[str, Any]]:
        """For each block its name, its channels and its stride in pixels, as in timm."""
        height, width = self.config.patch_shape
        stride = height if height == width else (height, width)
        return [
            {"module": f"layers.{number}", "num_chs": self.config.hidden_size, "reduction": stride}
            for number in range(self.config.num_hidden_layers)
        ]

    def forward_features(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Return the normalised tokens (B, L, D) of normalised pixels (B, C, H, W), as in timm."""
        vit, pixel_values = self.base_model, as_weights(pixel_values, self.base_model)
        return vit.layernorm(vit.encode(pixel_values, tokens_of(self.config, pixel_values))[0])

    def forward_intermediates(
        self,
        pixel_values: torch.Tensor,
        indices: int | Sequence[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
    ) -> Any:
        """Return the patches after some blocks, with the arguments and results of timm's method of this name.

        Args:
            pixel_values: Normalised pixels of shape (B, C, H, W); the patch size must divide H and W.
            indices: The last `indices` blocks if an int; the blocks of these numbers, from 0, if a sequence (negative
                numbers count from the end); all blocks if None.
            return_prefix_tokens: Also return the tokens before the patches.
            norm: Apply the final norm, if it precedes the pooling.
            stop_early: Skip the blocks after the last one of `indices`; the final tokens are then those after it.
            output_fmt: "NCHW" for maps (B, D, h, w) or "NLC" for tokens (B, N, D).
            intermediates_only: Return only the patches after those blocks, not the final tokens.
            output_dict: Return a dict with `image_features`, `image_intermediates` and `image_intermediates_prefix`.

        Returns:
            The normalised tokens after the last block run, of shape (B, L, D), and the patches after each chosen block:
            a list in the order of the blocks; with `return_prefix_tokens` a list of pairs of patches and prefix tokens.

        Raises:
            ValueError: A block does not exist, `output_fmt` is unknown, or the pixels do not fit the model.
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f'output_fmt is {output_fmt!r}: expected "NCHW" or "NLC"')
        vit, numbers = self.base_model, self._block_numbers(indices)
        pixel_values = as_weights(pixel_values, vit)
        tokens = tokens_of(self.config, pixel_values)
        depth = max(numbers) + 1 if stop_early else None
        stages = [number + 1 for number in numbers]
        hidden_states, chosen = vit.encode(pixel_values, tokens, stages=stages, num_layers=depth)
        if norm:
            chosen = [vit.layernorm(states) for states in chosen]
        prefix = [states[:, : self.config.num_prefix_tokens] for states in chosen]
        patches = [self.tokens_to_map(states, *pixel_values.shape[-2:]) for states in chosen]
        if output_fmt == "NLC":
            patches = [one.flatten(2).transpose(1, 2) for one in patches]
        with_prefix = return_prefix_tokens and self.config.num_prefix_tokens > 0
        if output_dict:
            found: dict[str, Any] = {"image_intermediates": patches}
            found |= {"image_intermediates_prefix": prefix} if with_prefix else {}
            return found if intermediates_only else {**found, "image_features": vit.layernorm(hidden_states)}
        found_list = list(zip(patches, prefix, strict=True)) if with_prefix else patches
        return found_list if intermediates_only else (vit.layernorm(hidden_states), found_list)

    def get_intermediate_layers(
        self,
        pixel_values: torch.Tensor,
        n: int | Sequence[int] = 1,
        reshape: bool = False,
        return_class_token: bool = False,
        norm: bool = True,
    ) -> tuple[Any, ...]:
        """Return the patches after some blocks, with the arguments and results of DINOv2's method of this name.

        Args:
            pixel_values: Normalised pixels of shape (B, C, H, W); the patch size must divide H and W.
            n: The last `n` blocks, or the numbers of the blocks, from 0.
            reshape: Return maps (B, D, h, w) instead of tokens (B, N, D).
            return_class_token: Return pairs of patches and the class token (B, D).
            norm: Apply the final norm, if it precedes the pooling. timm's method of this name does not by default.

        Raises:
            ValueError: A block does not exist, there is no class token, or the pixels do not fit the model.
        """
        if return_class_token and not self.config.use_class_token:
            raise ValueError("return_class_token=True, but the model has no class token: leave it out")
        output_fmt = "NCHW" if reshape else "NLC"
        found = self.forward_intermediates(
            pixel_values, n, return_class_token, norm, stop_early=True, output_fmt=output_fmt, intermediates_only=True
        )
        return tuple((patches, prefix[:, 0]) for patches, prefix in found) if return_class_token else tuple(found)

    def _block_numbers(self, indices: int | Sequence[int] | None) -> list[int]:
        """Return the numbers of blocks, from 0, in their order."""
        depth = self.config.num_hidden_layers
        if isinstance(indices, int) or indices is None:
            count = depth if indices is None else indices
            given = range(depth - count, depth) if 0 < count <= depth else [depth]
        else:
            given = [number + depth if number < 0 else number for number in indices]
        if not given or not all(0 <= number < depth for number in given):
            raise ValueError(f"blocks are given as {indices}: expected a count up to {depth}, or numbers below {depth}")
        return sorted(set(given))


__all__ = ["IntermediateLayers"]

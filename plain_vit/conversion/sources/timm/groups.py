"""Reading of the tables of architectures, whose entrypoints are in groups with common arguments."""

from collections.abc import Mapping, Sequence
from typing import Any


def architectures_in(groups: Sequence[tuple[Mapping[str, Any], str]]) -> dict[str, dict[str, Any]]:
    """Return the arguments of each entrypoint by its name.

    Args:
        groups: The common arguments, and a line for each entrypoint: name, image size (height x width where they
            differ) and patch size (pixels), width, depth, heads, width of the MLP over the width.
    """
    architectures = {}
    for common, lines in groups:
        for line in lines.strip().splitlines():
            name, img_size, patch_size, embed_dim, depth, num_heads, mlp_ratio = line.split()
            architectures[name] = {
                "img_size": tuple(map(int, img_size.split("x"))) if "x" in img_size else int(img_size),
                "patch_size": int(patch_size),
                "embed_dim": int(embed_dim),
                "depth": int(depth),
                "num_heads": int(num_heads),
                "mlp_ratio": float(mlp_ratio),
                **common,
            }
    return architectures

"""Files of code bases that are no peers of these tests: their names, around one plain ViT.

The names and settings are those of the packages' state dicts. Each was compared with its package once, as the tests do
here with the plain ViT: mmpretrain 1.2.0 and mmseg 1.2.2 (with mmcv-lite 2.2.0), kornia 0.9.0 and MONAI 1.6.1 as
installed, SWAG from its repository. No tokens differed by more than 4.5e-7, and the tensors came back bit for bit.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.conftest import randomize_

HEADS, WIDTH = 3, 24


class Block(nn.Module):
    def __init__(self, eps: float, bias: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, eps), nn.LayerNorm(WIDTH, eps)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH, bias=bias), nn.Linear(WIDTH, WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.fc2(functional.gelu(self.fc1(self.norm2(x))))


class ViT(nn.Module):
    """A plain ViT with the settings of a code base; returns the tokens after each block, and the output."""

    def __init__(self, base: "CodeBase") -> None:
        super().__init__()
        self.base, (height, width) = base, base.image_size
        self.patch = nn.Conv2d(3, WIDTH, base.patch_size, base.patch_size)
        rows = height // base.patch_size[0] * (width // base.patch_size[1]) + base.class_has_position
        self.cls, self.pos = nn.Parameter(torch.zeros(1, 1, WIDTH)), nn.Parameter(torch.zeros(1, rows, WIDTH))
        self.blocks = nn.ModuleList(Block(base.eps, base.qkv_bias) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH, base.eps)
        if "head" in base.names:
            self.head = nn.Linear(WIDTH, 5)
        randomize_(self)

    def forward(self, pixels: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        patches, token = self.patch(pixels).flatten(2).mT, self.cls.expand(len(pixels), -1, -1)
        if self.base.class_has_position:
            x = torch.cat([token, patches], 1) + self.pos
        else:
            x = torch.cat([token, patches + self.pos], 1)
        tokens = []
        for block in self.blocks:
            x = block(x)
            tokens.append(x)
        pooling = self.base.hints.get("pooling", self.base.pooling)
        if pooling == "mean":
            return tokens, self.head(self.norm(x[:, 1:].mean(1)))
        x = self.norm(x)
        return tokens, self.head(x[:, 0]) if hasattr(self, "head") else x


@dataclass(frozen=True)
class CodeBase:
    """A code base.

    Args:
        names: Its names of the modules and tensors of `ViT`.
        hints: Answers to the questions that its files leave open.
        eps: Epsilon of its norms.
        qkv_bias: Whether queries, keys and values have biases.
        class_has_position: Whether the class token has a position.
        pooling: What the code fixes, if no hint says it.
        unread: Further tensors that its code does not read.
        image_size: Height and width of its images.
        patch_size: Height and width of its patches.
        reshape: Changes the shapes of its tensors, by the names of `ViT`.
    """

    names: Mapping[str, str]
    hints: Mapping[str, Any]
    eps: float = 1e-6
    qkv_bias: bool = True
    class_has_position: bool = True
    pooling: str = "cls"
    unread: Mapping[str, Callable[..., torch.Tensor]] = field(default_factory=dict)
    image_size: tuple[int, int] = (12, 32)
    patch_size: tuple[int, int] = (4, 8)
    reshape: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = field(default_factory=dict)

    def state(self, model: ViT) -> dict[str, torch.Tensor]:
        """Return the state dict of a model with the names of the code base."""
        state = {}
        for name, tensor in model.state_dict().items():
            tensor = self.reshape.get(name, lambda same: same)(tensor)
            pattern = re.sub(r"\d+", "{}", name, count=1)
            number = re.findall(r"\.(\d+)\.", name)
            module, _, leaf = pattern.rpartition(".")
            theirs = self.names[pattern] if pattern in self.names else f"{self.names[module]}.{leaf}"
            state[theirs.format(*number)] = tensor.clone()
        for name, fill in self.unread.items():
            state |= {name.format(number): fill(WIDTH) for number in range(2)}
        return state


def mm(prefix: str, *, fused: bool = True, **heads: str) -> dict[str, str]:
    """Return the names of OpenMMLab's ViT."""
    layer = f"{prefix}layers.{{}}"
    attention = {"blocks.{}.qkv": f"{layer}.attn.qkv", "blocks.{}.proj": f"{layer}.attn.proj"} if fused else {
        "blocks.{}.qkv.weight": f"{layer}.attn.attn.in_proj_weight",
        "blocks.{}.qkv.bias": f"{layer}.attn.attn.in_proj_bias",
        "blocks.{}.proj": f"{layer}.attn.attn.out_proj",
    }  # fmt: skip
    return {
        **{"cls": f"{prefix}cls_token", "pos": f"{prefix}pos_embed", "patch": f"{prefix}patch_embed.projection"},
        **{"blocks.{}.norm1": f"{layer}.ln1", "blocks.{}.norm2": f"{layer}.ln2", "norm": f"{prefix}ln1"},
        **{"blocks.{}.fc1": f"{layer}.ffn.layers.0.0", "blocks.{}.fc2": f"{layer}.ffn.layers.1"},
        **attention,
        **heads,
    }


MM_HINTS = {"num_attention_heads": HEADS, "layer_norm_eps": 1e-6, "hidden_act": "gelu", "image_size": (12, 32)}
SWAG_LAYER, KORNIA_BLOCK = "encoder.layers.layer_{}", "encoder.blocks.{}"
MONAI_NAMES = {
    **{"cls": "cls_token", "pos": "patch_embedding.position_embeddings", "patch": "patch_embedding.patch_embeddings"},
    **{"blocks.{}.norm1": "blocks.{}.norm1", "blocks.{}.norm2": "blocks.{}.norm2", "norm": "norm"},
    **{"blocks.{}.qkv": "blocks.{}.attn.qkv", "blocks.{}.proj": "blocks.{}.attn.out_proj"},
    **{"blocks.{}.fc1": "blocks.{}.mlp.linear1", "blocks.{}.fc2": "blocks.{}.mlp.linear2"},
    "head": "classification_head",
}
MONAI_HINTS = {"num_attention_heads": HEADS, "pooling": "cls", "image_size": (12, 32)}

CODE_BASES = {
    "openmmlab": CodeBase(mm("backbone.", head="head.layers.head"), {**MM_HINTS, "pooling": "cls"}),
    "openmmlab linear": CodeBase(
        mm("backbone.", head="head.fc") | {"norm": "backbone.ln2"}, {**MM_HINTS, "pooling": "mean"}
    ),
    "openmmlab mmseg": CodeBase(mm("", fused=False), {**MM_HINTS, "pooling": "none"}),
    "swag": CodeBase(
        {
            **{"cls": "class_token", "pos": "encoder.pos_embedding", "patch": "conv_proj", "norm": "encoder.ln"},
            **{"blocks.{}.norm1": f"{SWAG_LAYER}.ln_1", "blocks.{}.norm2": f"{SWAG_LAYER}.ln_2"},
            "blocks.{}.qkv.weight": f"{SWAG_LAYER}.self_attention.in_proj_weight",
            "blocks.{}.qkv.bias": f"{SWAG_LAYER}.self_attention.in_proj_bias",
            "blocks.{}.proj": f"{SWAG_LAYER}.self_attention.out_proj",
            **{"blocks.{}.fc1": f"{SWAG_LAYER}.mlp.linear_1", "blocks.{}.fc2": f"{SWAG_LAYER}.mlp.linear_2"},
            "head": "head.layers.head",
        },
        {"num_attention_heads": HEADS},
        image_size=(20, 20),
        patch_size=(4, 4),
        reshape={"pos": lambda table: table.transpose(0, 1)},
    ),
    "kornia": CodeBase(
        {
            **{"cls": "patch_embedding.cls_token", "pos": "patch_embedding.positions", "norm": "norm"},
            "patch": "patch_embedding.backbone",
            **{"blocks.{}.norm1": f"{KORNIA_BLOCK}.0.fn.0", "blocks.{}.norm2": f"{KORNIA_BLOCK}.1.fn.0"},
            **{"blocks.{}.qkv": f"{KORNIA_BLOCK}.0.fn.1.qkv", "blocks.{}.proj": f"{KORNIA_BLOCK}.0.fn.1.projection"},
            **{"blocks.{}.fc1": f"{KORNIA_BLOCK}.1.fn.1.0", "blocks.{}.fc2": f"{KORNIA_BLOCK}.1.fn.1.3"},
        },
        {"num_attention_heads": HEADS, "image_size": (12, 32)},
        pooling="none",
        reshape={"pos": lambda table: table[0]},
    ),
    "monai": CodeBase(
        MONAI_NAMES,
        MONAI_HINTS,
        eps=1e-5,
        qkv_bias=False,
        class_has_position=False,
        unread={"blocks.{}.norm_cross_attn.weight": torch.ones, "blocks.{}.norm_cross_attn.bias": torch.zeros},
    ),
    "monai 1.3": CodeBase(MONAI_NAMES, MONAI_HINTS, eps=1e-5, qkv_bias=False, class_has_position=False),
}

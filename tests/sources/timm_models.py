"""Small models of timm's entrypoints with randomised parameters, and differences of two models at all stages."""

from typing import Any

import timm
import torch
from torch import nn

from plain_vit import PlainViTForImageClassification
from plain_vit.conversion.engine import revert
from plain_vit.conversion.format import Hints
from plain_vit.conversion.timm.architectures import ARCHITECTURES
from plain_vit.conversion.timm.eva.architectures import ARCHITECTURES as EVA
from plain_vit.conversion.timm.source import TIMM
from tests.conftest import randomize_
from tests.tiny import difference

# One line for each kind of block, norm, MLP, token, head and position that the 179 entrypoints have.
REPRESENTATIVES = [
    "vit_base_patch16_224",  # plain
    "deit_small_distilled_patch16_224",  # distillation token and head
    "vit_base_patch32_clip_quickgelu_224",  # norm before the blocks, epsilon 1e-5, quick GELU
    "vit_giant_patch14_reg4_dinov2",  # registers without positions, LayerScale, packed SwiGLU
    "vit_medium_patch16_gap_240",  # no class token, mean after the norm, no qkv bias
    "vit_so400m_patch14_siglip_384",  # map head, tanh GELU, partial patches
    "aimv2_large_patch14_224",  # RMSNorm, SwiGLU, a norm on the patches, no biases
    "beit3_base_patch16_224",  # norms inside attention and MLP, mean before the norm
    "vit_intern300m_patch14_448",  # no final norm
    "vit_dwee_patch16_reg1_gap_256",  # differential attention
    "vit_base_patch16_xp_224",  # parallel blocks, qk norm
    "vit_dpwee_patch16_reg1_gap_256",  # parallel blocks with differential attention
    "vit_small_patch16_18x2_224",  # branches
    "vit_base_patch16_rpn_224",  # norms at the end of the residual branches
    "test_vit3",  # map head that reads a register
    "vit_tiny_r_s16_p8_224",  # the root of a ResNet
    "vit_small_r26_s32_224",  # a ResNet of four stages
]

# One line for each kind of rotation, block, norm, MLP, projection, head and position that the entrypoints of Eva have.
EVA_REPRESENTATIVES = [
    "vit_small_patch16_dinov3",  # DINOv3: centred coordinates, halves, registers, no bias
    "vit_small_plus_patch16_dinov3_qkvb",  # the same with a gated MLP, and biases on queries and values
    "vit_7b_patch16_dinov3",  # another alignment of its MLP
    "eva_giant_patch14_224",  # no rotation, biases on queries and values
    "eva02_tiny_patch14_336",  # EVA-02: another grid than that of the rotation, a packed MLP, one projection
    "eva02_base_patch14_448",  # three projections, a norm inside the gated MLP
    "eva02_large_patch14_clip_336",  # a norm inside the attention
    "eva02_enormous_patch14_clip_224",  # norms at the end of the residual branches
    "vit_pe_core_tiny_patch16_384",  # a norm before the blocks, a pooling with heads of its own
    "vit_pe_core_gigantic_patch14_448",  # one with an MLP of its own
    "vit_pe_lang_large_patch14_448",  # no final norm
    "vit_base_patch16_rope_ape_224",  # positions added and rotated
    "vit_base_patch16_rope_mixed_ape_224",  # learned frequencies
    "vit_betwixt_patch16_rope_reg4_gap_256",  # registers without a class token
    "vit_large_patch16_sapiens2",  # keys and values shared by queries in some blocks, LayerScale on the attention alone
]

# What differs in the order of operations, and by how much it may: the rest is 0.0.
REORDERED = {
    "ParallelScalingBlock": "timm multiplies by all first layers at once, and adds their bias afterwards",
    "DiffParallelScalingBlock": "timm multiplies by all first and by all last layers at once",
    "ResPostBlock": "timm's tokens lie transposed in memory, so that their mean sums in another order",
}
TOLERANCE = 1e-5


def tolerance(name: str) -> float:
    """Return the largest relative difference that an entrypoint may show in float32."""
    return TOLERANCE if ARCHITECTURES.get(name, {}).get("block_fn") in REORDERED else 0.0


def image_size(name: str) -> tuple[int, int]:
    """Return a small size, not square, of 3 x 5 patches of the entrypoint; where its own is none, partial patches."""
    patch, size = (ARCHITECTURES | EVA)[name]["patch_size"], (ARCHITECTURES | EVA)[name]["img_size"]
    rest = (size if isinstance(size, int) else size[0]) % patch
    return 3 * patch + rest, 5 * patch + rest


def tiny_timm(name: str, **arguments: Any) -> Any:
    """Return timm's entrypoint at a small geometry, in evaluation mode, every parameter random."""
    small = {"img_size": image_size(name), "embed_dim": 56, "num_heads": 7, "depth": 3, "num_classes": 11}
    small |= arguments
    if "num_kv_heads" in EVA.get(name, {}):
        small.setdefault("num_kv_heads", ([1] + [7, 1] * small["depth"])[: small["depth"]])
    return randomize_(timm.create_model(name, **small)).eval()


def pixels_for(module: Any, seed: int = 1, size: tuple[int, int] | None = None) -> torch.Tensor:
    """Return normalised pixels of the module's own size, or of another."""
    height, width = size or module.patch_embed.img_size
    return torch.randn(2, module.in_chans, height, width, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def stage_differences(module: Any, model: nn.Module, pixel_values: torch.Tensor) -> dict[str, float]:
    """Return the relative difference of every block's output and of the logits (features without a classifier)."""
    tokens: list[torch.Tensor] = []
    hooks = [block.register_forward_hook(lambda _, args, output: tokens.append(output)) for block in module.blocks]
    theirs = module(pixel_values)
    for hook in hooks:
        hook.remove()
    outputs = model(pixel_values, output_hidden_states=True)
    result = {
        f"block {i}": difference(ours.float(), source.float())
        for i, (ours, source) in enumerate(zip(outputs.hidden_states[1:], tokens, strict=True), start=1)
    }
    ours = outputs.logits if "logits" in outputs else outputs.pooler_output
    return result | {"logits": difference(ours.float(), theirs.float())}


def same_tensors(one: nn.Module, other: nn.Module) -> bool:
    """Tell whether two state dicts have the same names, shapes and bits."""
    ones, others = one.state_dict(), other.state_dict()
    return ones.keys() == others.keys() and all(torch.equal(ones[name], others[name]) for name in ones)


def measurements(
    name: str, found: dict[str, float], features: dict[str, float], rounded: dict[str, float], resized: float | None
) -> dict[str, Any]:
    """Return the line for the table of what opens.

    Args:
        name: The entrypoint, whose tensors were seen to go back bit for bit.
        found: Differences of the stages in float32.
        features: The same without a classifier.
        rounded: The same in bfloat16.
        resized: The largest difference for images of another size; None where timm takes one size only.
    """
    return {
        "source": f"timm {name}",
        "opens": True,
        "logits": found["logits"],
        "blocks": max(value for stage, value in found.items() if stage != "logits"),
        "features_without_classifier": features["logits"],
        "bfloat16": max(rounded.values()),
        "another_resolution": resized,
        "way_back_bit_exact": True,
        "parameters": parameters_at_full_size(name),
        "timm": timm.__version__,
        "torch": torch.__version__,
    }


def parameters_at_full_size(name: str) -> int:
    """Return the count of parameters at the entrypoint's own geometry, which is ours in every shape."""
    module = timm.create_model(name, device="meta")
    description = TIMM.describe_module(module, Hints())
    with torch.device("meta"):
        model = PlainViTForImageClassification(description.config)
    rows = TIMM.rows(description.config, description.layout)
    back = revert(rows, model.state_dict(), description.config)
    assert {key: tensor.shape for key, tensor in back.items()} == {
        key: tensor.shape for key, tensor in module.state_dict().items()
    }
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == sum(parameter.numel() for parameter in module.parameters())
    return count

"""Random models of timm, saved as bare state dicts and opened with true answers: equal outputs, or an error."""

import functools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm import layers
from timm.models import beit, deit, eva, save_for_hf, vision_transformer
from torch import nn

from plain_vit.conversion.sources.timm.arguments import ACTIVATIONS, POOLINGS
from plain_vit.conversion.sources.timm.plain.arguments import BLOCKS
from tests.conftest import randomize_
from tests.sizes import draws
from tests.sources.truthful import Oracle, Outcome, Tally, logits_differ_by, open_truthfully, truth_among

POOLS = ["", "avg", "avgmax", "max", "token", "map", "prr"]
BLOCK_CLASSES = [*[vision_transformer.Block] * 6, *[vision_transformer.ResPostBlock] * 3,
                 vision_transformer.ParallelScalingBlock, vision_transformer.DiffParallelScalingBlock,
                 vision_transformer.ParallelThingsBlock]  # fmt: skip
NORMS = [*[layers.LayerNorm] * 5, *[layers.RmsNorm] * 2, layers.SimpleNorm]
MLPS = [*[layers.Mlp] * 5, layers.SwiGLU, layers.SwiGLUPacked, layers.GluMlp]
ACTS = [nn.GELU, nn.GELU, layers.GELUTanh, layers.QuickGELU, nn.SiLU, nn.ReLU]
EPSILONS = [1e-6, 1e-6, 1e-5, 1e-3]


# Two orders of the same sums in float64.
EXACT = 1e-10


class NotBuilt(Exception):
    """timm refuses these arguments."""


def built(kind: Callable[..., nn.Module], arguments: dict[str, Any]) -> nn.Module:
    """Build a model with random parameters."""
    try:
        return randomize_(kind(**arguments), seed=random.randrange(10**6)).eval()
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        raise NotBuilt from error


def geometry(draw: random.Random) -> dict[str, Any]:
    """Draw sizes that all three classes share; grids and patches are rarely square."""
    heads = draw.choice([1, 2, 3, 4, 6])
    patch = (draw.choice([2, 4]), draw.choice([2, 3, 4]))
    grid = draw.choice([(2, 2), (3, 3), (4, 4), (2, 8), (1, 5), (3, 4), (5, 3), (2, 3)])
    rest = draw.choice([0, 0, 0, 1])
    return {
        "img_size": (grid[0] * patch[0] + rest, grid[1] * patch[1]),
        "patch_size": patch,
        "in_chans": draw.choice([1, 2, 3, 5]),
        "num_classes": draw.choice([0, 2, 7]),
        "embed_dim": heads * draw.choice([2, 4, 8, 12]),
        "num_heads": heads,
        "depth": draw.choice([1, 2, 3]),
        "mlp_ratio": draw.choice([1, 2.5, 4]),
        "global_pool": draw.choice(POOLS),
    }


def vision_transformer_of(draw: random.Random) -> nn.Module:
    """Draw one of timm's VisionTransformer or VisionTransformerDistilled."""
    arguments = geometry(draw)
    norm = functools.partial(draw.choice(NORMS), eps=draw.choice(EPSILONS))
    arguments |= {
        "qkv_bias": draw.random() < 0.7, "qk_norm": draw.random() < 0.2, "scale_attn_norm": draw.random() < 0.1,
        "scale_mlp_norm": draw.random() < 0.1, "proj_bias": draw.random() < 0.9,
        "init_values": draw.choice([None, None, 0.1]), "class_token": draw.random() < 0.7,
        "pos_embed": draw.choice(["learn", "learn", "learn", "none"]), "no_embed_class": draw.random() < 0.3,
        "reg_tokens": draw.choice([0, 0, 1, 3]), "pre_norm": draw.random() < 0.3, "final_norm": draw.random() < 0.9,
        "fc_norm": draw.choice([None, None, True, False]), "pool_include_prefix": draw.random() < 0.3,
        "norm_layer": norm, "embed_norm_layer": draw.choice([None, None, None, norm]),
        "act_layer": draw.choice(ACTS), "block_fn": draw.choice(BLOCK_CLASSES), "mlp_layer": draw.choice(MLPS),
        "attn_layer": draw.choice(["attn"] * 5 + ["diff"]),
    }  # fmt: skip
    if draw.random() < 0.1:
        arguments |= {"global_pool": "token", "class_token": True, "reg_tokens": 0, "no_embed_class": False}
        return built(deit.VisionTransformerDistilled, arguments)
    return built(vision_transformer.VisionTransformer, arguments)


def eva_of(draw: random.Random) -> nn.Module:
    """Draw one of timm's Eva, rotary or not."""
    arguments = geometry(draw)
    rotary = draw.random() < 0.4
    arguments |= {
        "qkv_bias": draw.random() < 0.4, "qkv_fused": draw.random() < 0.9, "qk_norm": draw.random() < 0.1,
        "swiglu_mlp": draw.random() < 0.2, "scale_mlp": draw.random() < 0.1, "scale_attn_inner": draw.random() < 0.1,
        "attn_type": draw.choice(["eva", "rope"]),
        "norm_layer": functools.partial(draw.choice(NORMS), eps=draw.choice(EPSILONS)),
        "init_values": draw.choice([None, 0.1]), "class_token": draw.random() < 0.7,
        "num_reg_tokens": draw.choice([0, 0, 2]), "no_embed_class": draw.random() < 0.3,
        "use_abs_pos_emb": draw.random() < 0.6, "use_rot_pos_emb": rotary,
        "rope_type": draw.choice(["cat", "dinov3", "mixed"]), "use_post_norm": draw.random() < 0.2,
        "use_pre_transformer_norm": draw.random() < 0.2,
        "use_post_transformer_norm": draw.choice([None, None, True, False]),
        "use_fc_norm": draw.choice([None, None, True, False]),
        "attn_pool_num_heads": draw.choice([None, None, 1]), "attn_only_layer_scale": draw.random() < 0.2,
        "num_kv_heads": draw.choice([None, None, None, 1]),
    }  # fmt: skip
    return built(eva.Eva, arguments)


def beit_of(draw: random.Random) -> nn.Module:
    """Draw one of timm's Beit."""
    arguments = geometry(draw)
    arguments["global_pool"] = draw.choice(["", "avg", "token"])
    arguments |= {
        "qkv_bias": draw.random() < 0.5, "init_values": draw.choice([None, 0.1]),
        "use_abs_pos_emb": draw.random() < 0.7, "use_rel_pos_bias": draw.random() < 0.3,
        "use_shared_rel_pos_bias": draw.random() < 0.2, "swiglu_mlp": draw.random() < 0.2,
        "scale_mlp": draw.random() < 0.1,
        "norm_layer": functools.partial(draw.choice(NORMS), eps=draw.choice(EPSILONS)),
    }  # fmt: skip
    return built(beit.Beit, arguments)


# Architectures whose layer classes do not depend on `model_args`.
NAMED = ["vit_base_patch16_224", "vit_small_patch14_dinov2", "vit_base_patch16_rpn_224", "vit_giant_patch14_dinov2",
         "vit_small_patch16_18x2_224", "vit_pwee_patch16_reg1_gap_256", "aimv2_large_patch14_224"]  # fmt: skip


def folder_of(draw: random.Random) -> nn.Module:
    """Draw one of timm's architectures, modified by arguments that a config.json can contain."""
    options = {
        "qkv_bias": draw.random() < 0.7, "qk_norm": draw.random() < 0.2, "init_values": draw.choice([None, 0.1]),
        "class_token": draw.random() < 0.7, "no_embed_class": draw.random() < 0.3,
        "reg_tokens": draw.choice([0, 0, 1, 3]), "pre_norm": draw.random() < 0.3, "final_norm": draw.random() < 0.9,
        "fc_norm": draw.choice([None, None, True, False]), "pool_include_prefix": draw.random() < 0.3,
        "act_layer": draw.choice(["gelu", "gelu_tanh", "quick_gelu", "silu", "relu"]),
        "norm_layer": draw.choice(["layernorm", "rmsnorm", "simplenorm"]),
    }  # fmt: skip
    changed = {name: value for name, value in options.items() if draw.random() < 0.4}
    return built(functools.partial(timm.create_model, draw.choice(NAMED)), geometry(draw) | changed)


# The true settings of a model


def _activation(module: Any) -> str:
    name = type(module).__name__
    words = {"GELU": "gelu", "GELUTanh": "gelu_tanh", "QuickGELU": "quick_gelu", "SiLU": "silu", "ReLU": "relu"}
    return ACTIVATIONS[words[name]]


def truths(module: Any) -> dict[str, Any]:
    """Return the true settings of a live model, read from its modules; None if no setting describes it."""
    block = module.blocks[0]
    kind = type(block).__name__
    attention = block.attns[0].attn if hasattr(block, "attns") else getattr(block, "attn", block)
    mlp = block.ffns[0].mlp if hasattr(block, "ffns") else getattr(block, "mlp", None)
    norm = block.attns[0].norm if hasattr(block, "attns") else getattr(block, "norm1", None) or block.in_norm
    rotary = getattr(module, "rope", None) is not None or getattr(module, "rel_pos_bias", None) is not None
    names = {"Block": "sequential", "EvaBlock": "sequential", "EvaBlockPostNorm": "post_norm", **BLOCKS}
    pool = getattr(module, "attn_pool", None)
    same_heads = pool is None or pool.num_heads == attention.num_heads
    # The poolings of Eva and Beit read only the patches, except "map", which reads all tokens.
    includes = getattr(module, "pool_include_prefix", module.global_pool == "map")
    mlp_types = {"Mlp": "mlp", "SwiGLU": "swiglu", "GluMlp": None if getattr(mlp, "gate_last", 0) else "swiglu_packed"}
    return {
        "num_attention_heads": attention.num_heads,
        "attention_scale": "head_dim**-0.5",
        "layer_norm_eps": norm.eps,
        "hidden_act": _activation(block.mlp_act if mlp is None else mlp.act),
        "pooling": POOLINGS[module.global_pool] if same_heads else None,
        "pool_prefix_tokens": includes,
        "block_type": names[kind],
        "norm_type": {"LayerNorm": "layer_norm", "RmsNorm": "rms_norm"}.get(type(norm).__name__),
        "mlp_type": mlp_types[type(mlp).__name__] if mlp is not None else "mlp",
        "position_embedding_type": "none" if module.pos_embed is None else "learned",
        "rope_type": None if rotary else "none",
        "image_size": tuple(module.patch_embed.img_size),
    }


def oracle_of(module: Any) -> Oracle:
    """Return the oracle of a model; it answers epsilon and size freely, other settings from the candidates."""
    true = truths(module)

    def answer(question: str, candidates: Sequence[object]) -> object | None:
        if question == "architecture":
            return None  # the model is random, so it is no known architecture
        assert question in true, f"{question} is asked, and no truth is known"
        if question in ("layer_norm_eps", "image_size"):
            return true[question]
        return truth_among(true[question], candidates)

    return answer


def tried(module: Any, path: Path, **options: Any) -> tuple[Outcome, float]:
    """Open a saved model with true answers, and return the outcome and the largest difference."""
    outcome = open_truthfully(path, oracle_of(module), format="timm", **options)
    if outcome.converted is None:
        return outcome, 0.0
    shape = (module.patch_embed.proj.in_channels, *module.patch_embed.img_size)
    # In float64, because small random widths and images without contrast amplify rounding.
    ours: nn.Module = outcome.converted.model
    return outcome, logits_differ_by(module.double(), ours.double(), shape, dtype=torch.float64)


# For each kind, the minimum share that opens, and the number of models in the nightly run.
KINDS = {
    "vision_transformer": (vision_transformer_of, 0.4, 1000),
    "eva": (eva_of, 0.1, 500),
    "beit": (beit_of, 0.05, 200),
    "folder": (folder_of, 0.4, 300),
}


@pytest.mark.slow(quick=["vision_transformer"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_bare_file_opens_right_by_true_answers_or_not_at_all(kind: str, tmp_path: Path) -> None:
    draw_model, share, nightly = KINDS[kind]
    tally, path = Tally(), tmp_path if draw_model is folder_of else tmp_path / "model.safetensors"
    seed, count = 0, draws(15, nightly)
    while tally.total < count:
        seed += 1
        draw = random.Random(seed)
        random.seed(seed)
        try:
            module = draw_model(draw)
        except NotBuilt:
            continue
        if draw_model is folder_of:
            save_for_hf(module, str(path), safe_serialization=True)
        else:
            save_file({name: tensor.contiguous() for name, tensor in module.state_dict().items()}, path)
        outcome, off = tried(module, path)
        assert off <= EXACT, f"seed {seed}: opened, off by {off:.1e}, answered {outcome.answers}\n{module}"
        tally.add(outcome, off)
    print(f"{kind}: {tally}")
    assert tally.opened >= share * count, tally

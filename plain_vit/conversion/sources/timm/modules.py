"""Live models of timm: the parts from which their arguments are read, and what two models are compared by."""

from dataclasses import dataclass
from typing import Any, Self

from torch import nn

from ...tables.compare_modules import class_name, class_path

# Classes and their names in timm's arguments; classes with the same name compute the same.
CLASSES = {
    "torch.nn.modules.normalization.LayerNorm": "layernorm",
    "timm.layers.norm.LayerNorm": "layernorm",
    "torch.nn.modules.normalization.RMSNorm": "rmsnorm",
    "timm.layers.norm.RmsNorm": "rmsnorm",
    "torch.nn.modules.activation.GELU": "gelu",
    "torch.nn.modules.activation.GELU(tanh)": "gelu_tanh",
    "timm.layers.activations.GELU": "gelu",
    "timm.layers.activations.GELUTanh": "gelu_tanh",
    "timm.layers.activations.QuickGELU": "quick_gelu",
    "torch.nn.modules.activation.SiLU": "silu",
    "torch.nn.modules.activation.ReLU": "relu",
    "timm.layers.mlp.Mlp": "Mlp",
    "timm.layers.mlp.SwiGLU": "SwiGLU",
    "timm.layers.mlp.GluMlp": "SwiGLUPacked",
    "timm.layers.attention.Attention": "attn",
    "timm.layers.attention.AttentionRope": "rope",
    "timm.layers.diff_attention.DiffAttention": "diff",
    "timm.models.eva.EvaAttention": "eva",
    "timm.layers.pos_embed_sincos.RotaryEmbeddingCat": "cat",
    "timm.layers.pos_embed_sincos.RotaryEmbeddingMixed": "mixed",
    "timm.layers.pos_embed_sincos.RotaryEmbeddingDinoV3": "dinov3",
}

# Attributes of timm's modules that do not affect the forward pass, except for the check of the image size.
SILENT_ATTRIBUTES = {
    "strict_img_size",  # our model takes any size
    "fused_attn",  # changes only the order of operations
    "use_key_only_attn_mask",  # affects only padding tokens of a NaFlexVit
    "grad_checkpointing", "distilled_training", "weight_init_mode", "fix_init", "init_values", "head_init_scale",
    "inplace", "feat_size", "feature_info", "ordered",
    "pretrained_cfg", "default_cfg", "pretrained_model_args", "_traits", "_model_args",
}  # fmt: skip


@dataclass(frozen=True)
class Parts:
    """The parts of a live model from which the arguments are read: the first block stands for all."""

    model: Any
    block: Any
    attention: Any
    mlp: Any

    @classmethod
    def of(cls, model: Any) -> Self:
        """Find the parts of a model.

        Raises:
            ExportError: for a class that plain-vit does not know.
        """
        block = model.blocks[0]
        return cls(model, block, block.attn, block.mlp)

    def name_of(self, module: nn.Module) -> str:
        """Return the name of a module's class in timm's arguments, or the path of the class if it has none."""
        return class_name(module, CLASSES)


def is_there(module: nn.Module) -> bool:
    """Return whether a part of a live model is not the identity."""
    return not isinstance(module, nn.Identity)


def named_class(module: Any) -> str:
    """Return the class of a model with its name in timm, for errors."""
    named = (getattr(module, "pretrained_cfg", None) or {}).get("architecture")
    return f"{class_path(module)}{f' ({named})' if named else ''}"

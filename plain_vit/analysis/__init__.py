"""Look inside a plain ViT: functions that return arrays; the pictures of them are in `plain_vit.analysis.plots`.

Array functions need torch and numpy alone; pictures need the extra `analysis`.
"""

from .attention import (
    attention_distance,
    attention_maps,
    attention_rollout,
    gradient_rollout,
    patch_distances,
    probe_attention,
    rollout,
)
from .inspection import TokenLayout, token_layout
from .results import confusion_matrix, displayable, predict

__all__ = [
    "TokenLayout",
    "attention_distance",
    "attention_maps",
    "attention_rollout",
    "confusion_matrix",
    "displayable",
    "gradient_rollout",
    "patch_distances",
    "predict",
    "probe_attention",
    "rollout",
    "token_layout",
]

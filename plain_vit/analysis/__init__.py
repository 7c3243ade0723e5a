"""Interpretability of a plain ViT: functions that return arrays; `plain_vit.analysis.plots` draws them.

Array functions need only torch and numpy (`integrated_gradients` also captum); figures need the extra `analysis`.
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
from .dense_features import (
    Correspondences,
    PatchComponents,
    correspondences,
    patch_components,
    patch_features,
    patch_similarity,
)
from .embeddings import (
    PatchFilters,
    PositionSimilarity,
    ResampledPositions,
    patch_filters,
    position_similarity,
    relative_position_biases,
    resampled_positions,
)
from .gradients import grad_cam, grad_cam_layer, integrated_gradients, tokens_to_grid
from .hidden_states import logit_lens, token_norms
from .inspection import TokenLayout, token_layout
from .results import confusion_matrix, displayable, predict
from .streams import average_over_images, pixel_batches

__all__ = [
    "Correspondences",
    "PatchComponents",
    "PatchFilters",
    "PositionSimilarity",
    "ResampledPositions",
    "TokenLayout",
    "attention_distance",
    "attention_maps",
    "attention_rollout",
    "average_over_images",
    "confusion_matrix",
    "correspondences",
    "displayable",
    "grad_cam",
    "grad_cam_layer",
    "gradient_rollout",
    "integrated_gradients",
    "logit_lens",
    "patch_components",
    "patch_distances",
    "patch_features",
    "patch_filters",
    "patch_similarity",
    "pixel_batches",
    "position_similarity",
    "predict",
    "probe_attention",
    "relative_position_biases",
    "resampled_positions",
    "rollout",
    "token_layout",
    "token_norms",
    "tokens_to_grid",
]

"""Logits to scores: probabilities, or the numbers of a regression, by the config's problem type."""

import torch

REGRESSION, MULTI_LABEL = "regression", "multi_label_classification"


def scores(logits: torch.Tensor, problem_type: str | None) -> torch.Tensor:
    """Return the scores that transformers' image-classification pipeline gives.

    Args:
        logits: Logits of shape (..., K).
        problem_type: Problem type in the model's config.

    Returns:
        Scores of the same shape and dtype: the numbers of a regression; independent probabilities of labels (sigmoid),
        for multi-label models or a single label; otherwise probabilities of classes (softmax).
    """
    if problem_type == REGRESSION:
        return logits
    return logits.sigmoid() if problem_type == MULTI_LABEL or logits.shape[-1] == 1 else logits.softmax(dim=-1)

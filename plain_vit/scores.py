"""Logits to scores: probabilities or numbers, by the problem of the config."""

import torch

REGRESSION, MULTI_LABEL = "regression", "multi_label_classification"


def scores(logits: torch.Tensor, problem_type: str | None) -> torch.Tensor:
    """Return the scores that transformers' image-classification pipeline gives.

    Args:
        logits: Of shape (..., K).
        problem_type: That of the model's config.

    Returns:
        Of the same shape and dtype: the numbers of a regression; the probability of each label where several may apply,
        or of a single one (sigmoid); otherwise the probabilities of classes (softmax).
    """
    if problem_type == REGRESSION:
        return logits
    return logits.sigmoid() if problem_type == MULTI_LABEL or logits.shape[-1] == 1 else logits.softmax(dim=-1)

"""Classification and distillation losses.

Legend: `B` batch, `K` classes.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F


def classification_loss(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    kind: str = "cross_entropy",
    label_smoothing: float = 0.0,
    class_weights: torch.Tensor | None = None,
    target_threshold: float | None = None,
) -> torch.Tensor:
    """Return the mean loss of a batch.

    Args:
        logits: logits [B, K].
        targets: class numbers [B], or class probabilities [B, K].
        kind: `cross_entropy`, in nats per image; `bce`: binary cross-entropy, averaged over images and classes; or
            `bce_sum`: averaged over images, summed over classes.
        label_smoothing: fraction of each target spread over all classes, 0 to 1.
        class_weights: [K], weight of an image of each class, averaged over soft targets. The sum is divided by the
            number of images, not by the sum of weights, so it does not depend on how images are split among processes.
        target_threshold: for `bce` and `bce_sum`, probabilities above it become 1 and others 0, before smoothing; None
            keeps them. (timm smooths first, so its threshold removes the smoothing.)
    """
    if kind != "cross_entropy":
        shares = F.one_hot(targets, logits.shape[-1]).to(logits.dtype) if targets.ndim == 1 else targets
        if target_threshold is not None:
            shares = (shares > target_threshold).to(shares.dtype)
        shares = shares * (1 - label_smoothing) + label_smoothing / logits.shape[-1]
        losses = F.binary_cross_entropy_with_logits(logits, shares, reduction="none")
        losses = losses.sum(dim=-1) if kind == "bce_sum" else losses.mean(dim=-1)
    elif class_weights is None:
        return F.cross_entropy(logits, targets, label_smoothing=label_smoothing)
    else:
        losses = F.cross_entropy(logits, targets, label_smoothing=label_smoothing, reduction="none")
    if class_weights is not None:
        losses = losses * (class_weights[targets] if targets.ndim == 1 else targets @ class_weights)
    return losses.mean()


def distillation_loss(
    logits: torch.Tensor, teacher_logits: torch.Tensor, *, kind: str = "soft", temperature: float = 1.0
) -> torch.Tensor:
    """Return the distillation loss between student and teacher, averaged over a batch.

    Args:
        logits: logits of the student [B, K].
        teacher_logits: logits of the teacher [B, K].
        kind: `soft` (KL divergence at the temperature, times its square: Hinton et al. 2015) or `hard` (cross-entropy
            with the teacher's decisions: Touvron et al. 2021).
        temperature: above 0; soft distillation only.
    """
    if kind == "hard":
        return F.cross_entropy(logits, teacher_logits.argmax(dim=-1))
    divergence = F.kl_div(
        F.log_softmax(logits / temperature, dim=-1),
        F.log_softmax(teacher_logits / temperature, dim=-1),
        reduction="batchmean",
        log_target=True,
    )
    return divergence * temperature**2


def balancing_weights(labels: Sequence[int], classes: int) -> torch.Tensor:
    """Return weights [classes] that balance the classes; their mean over the images is 1.

    Args:
        labels: labels of the images.
        classes: number of classes; a class without images has weight 0.
    """
    counts = torch.bincount(torch.as_tensor(labels), minlength=classes).double()
    present = (counts > 0).sum()
    return torch.where(counts > 0, len(labels) / (present * counts), 0.0).float()

"""Parity of two models: the largest difference at every stage, from the patches to the logits.

Both models get the same images. Hooks capture the input of each block, so the source runs its own code unmodified.

Shapes: `B` batch, `C` channels, `H W` pixels, `N` patches, `L` tokens, `D` hidden size.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from transformers.utils import ModelOutput

from ..configuration_plain_vit import PlainViTConfig
from ..errors import VerificationError
from .registry import FORMATS
from .tables.format import Contract, Probes

# Of our models, and of transformers' ViT.
OURS = Probes("embeddings.patch_embeddings", "layers.{}", "layernorm")

# Stages and the model outputs that contain them; of several outputs for a stage, the first that exists is used.
OUTPUTS = (
    ("logits", "logits"),
    ("reconstruction", "reconstruction"),
    ("features", "last_hidden_state"),
    ("pooled", "image_embeds"),
    ("pooled", "pooler_output"),
    ("pooled", "summary"),
)


@dataclass(frozen=True)
class StageDifference:
    """The largest difference at one stage.

    Args:
        stage: "patches", "embeddings", "layer 0" (its output) and so on, "final norm", "logits" (without a
            classifier "features", and "pooled" if it exists).
        difference: max |a - b|.
        scale: max |a|.
    """

    stage: str
    difference: float
    scale: float

    @property
    def relative(self) -> float:
        """The difference relative to the largest value, to compare with the project's tolerance."""
        return self.difference / self.scale if self.scale else self.difference


def probe_images(config: PlainViTConfig) -> torch.Tensor:
    """Return images of ordinary, tiny and very large values, which also reveal a wrong epsilon or order of norms.

    Args:
        config: Config of either model, for the image size and the channels.

    Returns:
        Normalised pixels of shape (3, C, H, W).
    """
    noise = torch.randn(3, config.num_channels, *config.image_shape, generator=torch.Generator().manual_seed(0))
    return noise * torch.tensor([1.0, 1e-3, 10.0]).view(3, 1, 1, 1)


def memory_of_probing(config: PlainViTConfig) -> int:
    """Estimate the memory, in bytes, to run two models on `probe_images` and keep the output of every stage.

    Args:
        config: Config of either model.
    """
    tokens = math.prod(config.grid_size) + config.num_prefix_tokens + config.num_register_tokens
    stages = config.hidden_size * (config.num_hidden_layers + 4) * 2 + config.intermediate_size * 3
    attention = config.num_attention_heads * tokens * 3  # attention weights of one layer, if they are materialized
    return 3 * 4 * (config.num_channels * math.prod(config.image_shape) * 3 + tokens * (stages + attention))


@torch.no_grad()
def compare_models(source: nn.Module, ours: nn.Module, pixel_values: torch.Tensor) -> list[StageDifference]:
    """Run both models on the same images, in evaluation mode, and compare them stage by stage.

    Args:
        source: A live model of timm, vit-pytorch, torchvision or transformers, or one of ours.
        ours: A plain ViT.
        pixel_values: Normalised pixels of shape (B, C, H, W).

    Returns:
        One entry per stage that both models have, in the order of the forward pass.

    Raises:
        VerificationError: The final outputs differ in kind or shape.
    """
    expected = _by_image(source, pixel_values)
    with _attention_of(source, ours):
        got = capture_stages(ours, pixel_values)
    if "logits" in expected and "logits" not in got:
        # Without a classifier, the source returns its pooled token or all tokens.
        output = expected.pop("logits")
        pooled = "pooled" in got and got["pooled"].shape == output.shape
        expected["pooled" if pooled else "features"] = output
    differences = []
    for stage in expected:
        if stage in got and expected[stage].shape == got[stage].shape:
            a, b = expected[stage].double(), got[stage].double()
            differences.append(StageDifference(stage, (a - b).abs().max().item(), a.abs().max().item()))
        elif stage in ("logits", "reconstruction", "features", "pooled"):
            other = f"have shape {tuple(got[stage].shape)}" if stage in got else "are not there"
            raise VerificationError(
                f"{stage} have shape {tuple(expected[stage].shape)} in the one model, in the other they {other}: these "
                "are different models"
            )
    return differences


def contract_of(model: nn.Module) -> Contract:
    """Return how a model takes images and returns tokens."""
    found = (source.contract_of(model) for source in FORMATS.values())
    return next((contract for contract in found if contract is not None), Contract())


def _by_image(model: nn.Module, pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the stages of a model; one image at a time if it puts the tokens of all images into one row."""
    contract = contract_of(model)
    batches = pixel_values.split(1) if contract.in_one_row else [pixel_values]
    alone = [capture_stages(model, batch) for batch in batches]
    found = {stage: torch.cat([one[stage] for one in alone]) for stage in alone[0]}
    return {stage: contract.rows(model, tokens, pixel_values) for stage, tokens in found.items()}


def capture_stages(model: nn.Module, pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the outputs of a model for these images, by stage.

    Args:
        model: A plain ViT of any supported package.
        pixel_values: Normalised pixels of shape (B, C, H, W).
    """
    stages: dict[str, torch.Tensor] = {}
    hooks = []
    modules = dict(model.named_modules())
    probes, prefix = find_probes(model)
    contract = contract_of(model)

    def keep(stage: str, value: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
        tokens = value[0] if isinstance(value, tuple) else value  # attentions or a grid may follow
        if tokens.ndim == 4 and stage != "patches":
            tokens = tokens.flatten(1, 2)  # from a grid
        stages[stage] = tokens.detach().clone()

    def before(module: nn.Module, stage: str) -> None:
        hooks.append(
            module.register_forward_pre_hook(
                lambda _, args, kwargs: keep(stage, args[0] if args else next(iter(kwargs.values()))), with_kwargs=True
            )
        )

    def after(module: nn.Module, stage: str) -> None:
        hooks.append(module.register_forward_hook(lambda _, args, output: keep(stage, output)))

    if probes is not None:
        after(modules[prefix + probes.patches], "patches")
        blocks = _blocks(modules, prefix, probes)
        for i, name in enumerate(blocks):
            before(modules[name], "embeddings" if i == 0 else f"layer {i - 1}")
        last = f"layer {len(blocks) - 1}" if blocks else "embeddings"
        if probes.end is None:
            after(modules[blocks[-1]], last)
        elif probes.end_is_norm:
            before(modules[prefix + probes.end], last)
            after(modules[prefix + probes.end], "final norm")
        else:
            after(modules[prefix + probes.end], last)
    training = model.training
    try:
        with _every_patch(model, pixel_values) as arguments:
            inputs = contract.inputs(model, pixel_values)
            first = inputs.pop(next(iter(inputs)))
            output = model.eval()(first, **inputs, **arguments)
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    if "patches" in stages:
        stages["patches"] = _as_tokens(stages["patches"], stages["embeddings"].shape[-1])
    if isinstance(output, ModelOutput):
        for stage, name in OUTPUTS:
            if output.get(name) is not None and name not in contract.others:
                stages.setdefault(stage, output[name])
    else:
        stages["logits"] = output[0] if isinstance(output, tuple) else output
    layers = [f"layer {i}" for i in range(len(stages))]
    order = ["patches", "embeddings", *layers, "final norm", "logits", "reconstruction", "features", "pooled"]
    return {stage: stages[stage] for stage in order if stage in stages and stage not in contract.others}


def find_probes(model: nn.Module) -> tuple[Probes | None, str]:
    """Return the probes for a model and the prefix of their names; None if only its output can be compared."""
    names = dict(model.named_modules())
    for probes in (OURS, *(each for source in FORMATS.values() for each in source.probes)):
        first = probes.blocks.format(0)
        for name in names:
            prefix = name.removesuffix(first)
            ends = [prefix + end for end in (probes.patches, probes.end) if end is not None]
            if name.endswith(first) and all(end in names for end in ends):
                return probes, prefix
    return None, ""


def _blocks(modules: dict[str, nn.Module], prefix: str, probes: Probes) -> list[str]:
    """Return the names of the blocks, in order."""
    names: list[str] = []
    while (name := prefix + probes.blocks.format(len(names))) in modules:
        names.append(name)
    return names


def _as_tokens(patches: torch.Tensor, width: int) -> torch.Tensor:
    """Return patches as (B, N, D); they may be a feature map with channels first or last."""
    if patches.ndim == 4:
        patches = patches.flatten(2).transpose(1, 2) if patches.shape[1] == width else patches.flatten(1, 2)
    return patches


@contextmanager
def _every_patch(model: nn.Module, pixel_values: torch.Tensor) -> Iterator[dict[str, torch.Tensor]]:
    """Yield arguments with which transformers' MAE, which masks and shuffles patches, uses all patches in order."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "mask_ratio"):
        yield {}
        return
    before, config.mask_ratio = config.mask_ratio, 0.0
    count: int = cast(Any, model).embeddings.patch_embeddings.num_patches
    try:
        yield {"noise": torch.arange(count, dtype=torch.float32).expand(len(pixel_values), -1)}
    finally:
        config.mask_ratio = before


@contextmanager
def _attention_of(source: nn.Module, ours: nn.Module) -> Iterator[None]:
    """Temporarily use the attention implementation that computes in the source's order of operations."""
    probes, _ = find_probes(source)
    before = ours.config._attn_implementation  # type: ignore[union-attr]
    source_config = getattr(source, "config", None)
    wanted = getattr(source_config, "_attn_implementation", None) or (probes.attention if probes else before)
    ours.set_attn_implementation(wanted)  # type: ignore[operator]
    try:
        yield
    finally:
        ours.set_attn_implementation(before)  # type: ignore[operator]

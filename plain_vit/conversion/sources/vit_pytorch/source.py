"""vit-pytorch (lucidrains): `ViT` and `SimpleViT` from release 0.0.2 on, and their plain variants.

All of them have exact GELU, norms with epsilon 1e-5, a fused projection of query, key and value without bias, and the
pixels of a patch in the order row, column, channel. `layouts.py` lists what the releases changed.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from ....configuration_plain_vit import PlainViTConfig
from ....errors import AmbiguousCheckpointError, ExportError, MappingError
from ...tables.compare_modules import class_path
from ...tables.engine import Row, ignored_names, revert
from ...tables.format import Description, Format, Hints, Probes, StateDict, write_state_dict
from .layouts import CLASS_TOKEN, CLASSES, LAYOUTS
from .modules import (
    build,
    changed_parts,
    file_of,
    installed_release,
    live_hints,
    mlp_reads_norm,
    overridden_methods,
    reads_patches,
    with_dropouts,
)
from .shapes import Reader, family_of, fits, head_of, layouts_of, with_head
from .tables import RELEASE, choose_layout, layout_rows, layouts_at

# The first tensor of every model of the package, which no other package has.
ANCHOR = re.compile(r"(?P<prefix>.*?)(to_patch_embedding\.(to_patch_tokens\.)?[12]|patch_to_embedding)\.weight")

# Tensors of the package's wrappers outside the model.
BESIDE = (
    ("patch_to_emb.*", "MAE, SimMIM or MPP: the patch embedding a second time"),
    ("mask_token", "MAE, SimMIM or MPP: replaces hidden patches"),
    ("enc_to_dec.*", "MAE: leads to the decoder"),
    ("decoder.*", "MAE: the decoder"),
    ("decoder_pos_emb.*", "MAE: positions of the decoder"),
    ("to_pixels.*", "MAE or SimMIM: predicts pixels"),
    ("to_bits.*", "MPP: predicts colours"),
    ("projector.*", "DINO: the projection of the features, for its loss only"),
)
UNUSED = {"decorr_loss.proj": "random directions of the decorrelation loss"}


class VitPytorchFormat(Format):
    """Models and state dicts of vit-pytorch."""

    name = "vit_pytorch"
    suffixes: tuple[str, ...] = (".pt", ".pth", ".bin", ".safetensors")
    opens: Mapping[str, Sequence[str]] = {"vit_pytorch": [f"{file}.{kind}" for file, kind in CLASSES.items()]}
    probes = (
        Probes("to_patch_embedding", "transformer.layers.{}.0", "transformer.norm", attention="eager"),
        Probes("to_patch_embedding", "transformer.layers.{}.0", "transformer", end_is_norm=False, attention="eager"),
        Probes(
            *("to_patch_embedding", "patch_transformer.layers.{}.0", "patch_transformer"),
            end_is_norm=False,
            attention="eager",
        ),
        Probes("patch_to_embedding", "transformer.layers.{}.0", "transformer", end_is_norm=False, attention="eager"),
    )

    def matches_names(self, names: Collection[str]) -> bool:
        """Return whether a state dict with these names is of vit-pytorch, wrapped or not."""
        prefixes = _prefixes(names)
        blocks = ("transformer.", "patch_transformer.")
        return any(name.removeprefix(prefix).startswith(blocks) for prefix in prefixes for name in names)

    def names_of_others(self, names: Collection[str]) -> str | None:
        """Return the unsupported model of the package that has these names, wrapped or not."""
        family = family_of(names)
        return family and f"vit-pytorch's {family}"

    def unexpected_names(self, names: Collection[str]) -> list[str]:
        """Return the names outside the model that belong to none of the package's wrappers."""
        prefixes = _prefixes(names)
        if len(prefixes) != 1 or not prefixes[0]:
            return []
        outside = [name for name in names if not name.startswith(prefixes[0])]
        known = ignored_names(outside, [*BESIDE, *UNUSED.items()])
        return [name for name in outside if name not in known]

    def heads_in(self, tensors: StateDict) -> list[str]:
        """Return the classifier, if it has tensors; its place differs from release to release."""
        (prefix, *others), shapes = _prefixes(tensors) or [""], _shapes(tensors)
        place = None if others else head_of(shapes)
        there = place is not None and any(name.startswith(f"{place}.") for name in shapes)
        return [f"{prefix}{place}"] if there else []

    def classifiers(self, tensors: StateDict) -> list[str]:
        """Return the classifier if it is not the classifier of any release."""
        shapes = _shapes(tensors)
        return [] if any(fits(layout, shapes) for layout in LAYOUTS) else self.heads_in(tensors)

    def matches_module(self, module: nn.Module) -> bool:
        """Return whether this module itself is one of the package's plain ViTs, or derived from one."""
        return any(file_of(base) is not None for base in type(module).__mro__)

    def describe_module(self, module: nn.Module, hints: Hints) -> Description:
        """Read the configuration of a live module, including heads, attention scale and dropout rates."""
        if methods := overridden_methods(type(module)):
            raise ExportError(
                f"{class_path(module)} is derived from a ViT of vit-pytorch and computes something of its own, which "
                "plain-vit cannot read:",
                methods,
            )
        state = module.state_dict()
        shapes = {name: tuple(tensor.shape) for name, tensor in state.items() if name not in UNUSED}
        dropped = head_of(shapes) if hints.drop else None
        if dropped:
            shapes = with_head(shapes, dropped)
        layout = layouts_of(shapes, hints.layout)[0]
        if layout.file == "vit_with_decorr":
            reads_norm = mlp_reads_norm(module.get_submodule("transformer.layers.0.1"))
            hints = replace(hints, layout=f"vit_with_decorr {'1.21.5' if reads_norm else '1.15.0'}")
        if layout.file == "na_vit":
            hints = replace(hints, layout=f"na_vit {'1.6.7' if reads_patches(module) else '1.2.6'}")
        description = self._describe(state, live_hints(module, layout, hints), live=True)
        config = with_dropouts(description.config, module, layout.names)
        if changed := changed_parts(module, config, layout, without=dropped):
            raise ExportError("this model has other parts than the class of vit-pytorch that it is of:", changed)
        given = [inference for inference in description.inferences if inference.source == "the caller"]
        return replace(description, config=config, inferences=given)

    def describe_checkpoint(self, tensors: StateDict, settings: Mapping[str, Any], hints: Hints) -> Description:
        """Read the configuration from the names and shapes of a state dict; the package writes no settings."""
        return self._describe(tensors, hints, live=False)

    def _describe(self, tensors: StateDict, hints: Hints, live: bool) -> Description:
        prefixes = _prefixes(tensors)
        if len(prefixes) > 1:
            raise AmbiguousCheckpointError(
                "there are several models of vit-pytorch side by side; which one should be used?",
                {"key": [prefix.rstrip(".") for prefix in prefixes if prefix]},  # no key selects a model without prefix
            )
        if not prefixes:
            raise MappingError(
                "there is no patch embedding of vit-pytorch among the tensors, such as", [ANCHOR.pattern]
            )
        (prefix,) = prefixes
        shapes = _shapes(tensors)
        if hints.drop and (place := head_of(shapes)) is not None:
            shapes = with_head(shapes, place)  # keeps the pooling, which the class omits without a head
        reader = Reader(shapes, hints, live)
        config, layout = reader.read()
        if hints.drop:
            config.num_labels = 0
        ignored = [*(BESIDE if prefix else ()), *UNUSED.items()]
        if 0 in shapes.get("cls_token", ()):
            ignored.append(("cls_token", "it has no rows: the mean of the patches is pooled"))
        stated_by = None if hints.layout is None else "the caller"
        return Description(config, layout.title, reader.inferences, ignored, prefix, stated_by)

    def rows(self, config: PlainViTConfig, layout: str | None) -> list[Row]:
        """Return the conversion table of a layout, given its title or a release that can represent this model."""
        target = next((known for known in LAYOUTS if known.title == layout), None)
        return layout_rows(target or choose_layout(config, layout or installed_release()), config)

    def build_module(self, config: PlainViTConfig, layout: str | None) -> nn.Module:
        """Build the class of the installed release that represents this config.

        Raises:
            ExportError: lists every part that none of its classes can represent.
        """
        release = installed_release()
        target = choose_layout(config, layout or release)
        if target not in layouts_at(release):
            raise ExportError(
                f"the installed vit-pytorch {release} has no class in the layout {target.title}: install that release, "
                "or write the state dict alone with to_checkpoint"
            )
        return build(target, config)

    def write(
        self, config: PlainViTConfig, tensors: StateDict, path: Path, image_processor: Any | None, layout: str | None
    ) -> str:
        """Write the state dict, with `torch.save` or as safetensors; the format stores no processor."""
        target = choose_layout(config, layout or RELEASE)
        state = revert(layout_rows(target, config), tensors, config)
        if CLASS_TOKEN in target.names and not config.use_class_token and CLASS_TOKEN not in target.optional:
            like = next(iter(state.values()))
            state["cls_token"] = like.new_empty((1,) * (target.token_axes - 2) + (0, config.hidden_size))
        write_state_dict(state, path)
        return target.title


def _shapes(tensors: StateDict) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the first model of the package among these tensors, without its prefix."""
    prefix = next(iter(_prefixes(tensors)), "")
    inside = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    return {name: tuple(tensor.shape) for name, tensor in inside.items() if name not in UNUSED}


def _prefixes(names: Collection[str]) -> list[str]:
    """Return the prefix of each model of the package among these names."""
    matches = (ANCHOR.fullmatch(name) for name in names)
    return sorted({match["prefix"] for match in matches if match and not match["prefix"].endswith("patch_to_emb.")})


VIT_PYTORCH = VitPytorchFormat()

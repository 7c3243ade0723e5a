"""torchvision's VisionTransformer: live modules, files with current and earlier names, and export."""

import functools
import re
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ....configuration_plain_vit import PlainViTConfig
from ....errors import AmbiguousCheckpointError, CheckpointError, ExportError
from ...tables.compare_modules import class_path, differences, epsilon_of, lost_fields, meta_device, uneven_heads
from ...tables.data_files import data_file
from ...tables.engine import DROP_FIRST_AXIS, IDENTITY, KERNEL_TO_PIXELS, Row, in_proj_rows, revert
from ...tables.format import (
    DROP_HEAD,
    Description,
    Hints,
    Inference,
    NamedFormat,
    Probes,
    StateDict,
    label_fields,
    write_state_dict,
)
from ...tables.infer import head_counts, pair, size_fault, square_grid
from .downloads import published_file
from .pixels import processor_from_torchvision, published_files

CLASS = "torchvision.models.vision_transformer.VisionTransformer"
EPS = 1e-6  # partial(nn.LayerNorm, eps=1e-6) in every builder

# Fields of all these models that differ from our defaults, and the arguments with the values of our fields.
FIXED_FIELDS: dict[str, Any] = {"position_resampling": "bicubic_align_corners"}
ARGUMENTS = {
    "image_size": "image_size",
    "patch_size": "patch_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "hidden_dim": "hidden_size",
    "mlp_dim": "intermediate_size",
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "representation_size": "representation_size",
}

# Suffix after the architecture in the names of published files.
PUBLISHED_NAME = re.compile(r"(_lc)?(_swag)?-[0-9a-f]{8}$")

# Attributes that do not affect the outputs: stored constructor arguments.
SILENT_ATTRIBUTES = {"seq_length", "inplace", "representation_size", "num_classes", "norm_layer"}

BLOCK, LAYER = "encoder.layers.encoder_layer_{}", "vit.layers.{}"
ROWS = [
    Row("class_token", "vit.embeddings.cls_token"),
    Row("encoder.pos_embedding", "vit.embeddings.position_embeddings.weight", DROP_FIRST_AXIS),
    Row("conv_proj.bias", "vit.embeddings.patch_embeddings.projection.bias"),
    Row(f"{BLOCK}.ln_1", f"{LAYER}.layernorm_before"),
    *in_proj_rows(f"{BLOCK}.self_attention", f"{LAYER}.attention"),
    Row(f"{BLOCK}.ln_2", f"{LAYER}.layernorm_after"),
    Row("encoder.ln", "vit.layernorm"),
    Row("heads.pre_logits", "vit.representation.0"),
]
MLP_NAMES = ("mlp.0", "mlp.3")
OLD_MLP_NAMES = ("mlp.linear_1", "mlp.linear_2")  # before torchvision 0.14
HEAD = "heads.head"


def architectures() -> dict[str, tuple[int, int, int, int, int]]:
    """Return patch size in pixels, hidden size, depth, heads and MLP width of each published builder."""
    return data_file("torchvision/architectures.json")["architectures"]


@dataclass(frozen=True)
class Layout:
    """Differences from torchvision's current names, written as text in reports and hints, such as "linear heads.1".

    Args:
        linear: Whether the MLP has the names of earlier releases.
        head: Path of the classifier; not torchvision's own if it was replaced.
    """

    linear: bool = False
    head: str = HEAD

    @classmethod
    def parse(cls, text: str | None) -> "Layout":
        """Parse the text of a layout."""
        words = (text or "").split()
        return cls("linear" in words, next((word for word in words if word.startswith("heads")), HEAD))

    def __str__(self) -> str:
        return " ".join([*(["linear"] if self.linear else []), *([self.head] if self.head != HEAD else [])])


class TorchvisionFormat(NamedFormat):
    """torchvision's Vision Transformers.

    A layout is the text of a `Layout`.
    """

    name = "torchvision"
    suffixes: tuple[str, ...] = (".pth", ".pt", ".safetensors")
    opens: Mapping[str, Sequence[str]] = {"torchvision.models": [CLASS.rpartition(".")[2]]}
    probes = (Probes("conv_proj", "encoder.layers.encoder_layer_{}", "encoder.ln"),)
    heads = ("heads",)

    @property
    def published_files(self) -> Mapping[str, str]:
        """The published files; each is an architecture of its own."""
        return {name: name for name in published_files()}

    @property
    def architectures(self) -> Collection[str]:
        """The names of the builders and of their published files."""
        return (*architectures(), *published_files())

    def settings_of(self, name: str) -> Mapping[str, Any]:
        """Return the name of the builder, and of the published file."""
        return {"builder": name.partition(".")[0], **self.models[name]}

    def config_of_settings(self, settings: Mapping[str, Any]) -> PlainViTConfig | None:
        """Return our config of the model of a builder, of the size of a published file."""
        if "builder" not in settings:
            return None
        patch_size, width, depth, heads, mlp_width = architectures()[settings["builder"]]
        return PlainViTConfig(
            **FIXED_FIELDS | {"num_labels": 1000},
            patch_size=patch_size,
            hidden_size=width,
            num_hidden_layers=depth,
            num_attention_heads=heads,
            intermediate_size=mlp_width,
            image_size=published_files()[settings["file"]][1] if "file" in settings else 224,
            layer_norm_eps=EPS,
        )

    def weights_of(self, name: str) -> str | None:
        """Return the path of published weights, which are downloaded to torch's cache if they are not there."""
        return published_file(self.models[name]["file"]) if "file" in self.models[name] else None

    def matches_names(self, names: Collection[str]) -> bool:
        """Return whether a state dict has torchvision's names."""
        return {"conv_proj.weight", "encoder.pos_embedding", f"{BLOCK.format(0)}.ln_1.weight"} <= set(names)

    def has_architecture(self, name: str) -> bool:
        """Return whether a name is a builder's or a published file's."""
        return PUBLISHED_NAME.sub("", name) in architectures()

    def matches_module(self, module: nn.Module) -> bool:
        """Return whether a live module is torchvision's, or derived from it."""
        return any(f"{base.__module__}.{base.__qualname__}" == CLASS for base in type(module).__mro__)

    def classifiers(self, tensors: StateDict) -> list[str]:
        """Return the only layer of the heads beside `pre_logits`, or the heads if they have several layers."""
        layers = {name.rpartition(".")[0] for name in tensors if f"{name}.".startswith("heads.")} - {"heads.pre_logits"}
        return self.heads_in(tensors) if len(layers) > 1 else [".".join(layer.split(".")[:2]) for layer in layers]

    def describe_module(self, module: Any, hints: Hints) -> Description:
        """Read the configuration of a live module. It determines everything, so no hints are needed.

        Raises:
            ExportError: lists every part that plain-vit does not support.
        """
        if class_path(module) != CLASS:
            raise ExportError(f"{class_path(module)} is derived from torchvision's VisionTransformer: pass that itself")
        if not isinstance(module.conv_proj, nn.Conv2d):
            raise ExportError("plain-vit does not know parts of this torchvision model:", ["a convolutional stem"])
        if not len(module.encoder.layers):
            raise ExportError("the model has no blocks: its heads cannot be read")
        block = module.encoder.layers[0]
        head, dropout, head_fields = _read_heads(module.heads)
        kept = {ours: getattr(module, theirs) for theirs, ours in ARGUMENTS.items() if hasattr(module, theirs)}
        kept |= {"representation_size": None, "layer_norm_eps": epsilon_of(block.ln_1)}
        config = PlainViTConfig(
            **FIXED_FIELDS | kept | head_fields,
            num_hidden_layers=len(module.encoder.layers),
            num_attention_heads=block.num_heads,
        )
        with meta_device():
            rebuilt = self.build_module(config, None)
        if faults := differences(module, rebuilt, {}, SILENT_ATTRIBUTES, without="heads"):
            raise ExportError("plain-vit does not know parts of this torchvision model (found, not expected):", faults)
        config.classifier_dropout_prob = dropout
        return Description(config, head)

    def describe_checkpoint(self, tensors: StateDict, settings: Mapping[str, Any], hints: Hints) -> Description:
        """Read the configuration of a state dict.

        Raises:
            AmbiguousCheckpointError: for heads and epsilon, which no tensor shows.
            CheckpointError: for a position table without a square grid, which torchvision's model cannot have.
        """
        width, channels, patch_size, _ = tensors["conv_proj.weight"].shape
        first = BLOCK.format(0)
        old = f"{first}.{OLD_MLP_NAMES[0]}.weight" in tensors
        mlp_width = tensors[f"{first}.{(OLD_MLP_NAMES if old else MLP_NAMES)[0]}.weight"].shape[0]
        depth = len({name.split(".")[2] for name in tensors if name.startswith("encoder.layers.")})
        rows = tensors["encoder.pos_embedding"].shape[1]
        grid = square_grid(rows - 1)
        if grid is None:
            raise CheckpointError(f"encoder.pos_embedding has {rows} rows: torchvision has one and a square grid")
        image_size = grid[0] * patch_size
        size = hints.image_size
        if size is not None and (fault := size_fault(pair(size), (patch_size, patch_size), [rows - 1])):
            raise CheckpointError(fault)
        shapes = {"patch_size": patch_size, "width": width, "depth": depth, "mlp_width": mlp_width}
        unseen, inferences = _settle_unseen(shapes, hints)
        inferences.append(Inference("image_size", image_size, f"the {rows} rows of encoder.pos_embedding"))
        places = [name.removesuffix(".weight") for name in tensors if name.startswith("heads.") and ".weight" in name]
        places = [place for place in places if place != "heads.pre_logits"]
        pre_logits = tensors.get("heads.pre_logits.weight")
        num_labels = tensors[f"{places[0]}.weight"].shape[0] if places else 0
        config = PlainViTConfig(
            **FIXED_FIELDS | unseen | {"num_labels": num_labels},
            patch_size=patch_size,
            hidden_size=width,
            num_hidden_layers=depth,
            intermediate_size=mlp_width,
            image_size=image_size,
            num_channels=channels,
            representation_size=None if pre_logits is None else pre_logits.shape[0],
        )
        if hints.architecture in published_files() and config.num_labels == 1000:
            inferences.append(_name_as_published(config, hints.architecture))
        layout = Layout(old, places[0] if places else HEAD)
        stated_by = None if hints.architecture is None else "the caller"
        return Description(config, str(layout) or None, inferences, stated_by=stated_by)

    def image_processor(
        self, config: PlainViTConfig, settings: Mapping[str, Any], preprocessor: Mapping[str, Any], hints: Hints
    ) -> tuple[Any, Sequence[str]]:
        """Return the preprocessing that torchvision publishes with the named file, or else a default."""
        if (file := settings.get("file", hints.architecture)) in published_files():
            return processor_from_torchvision(file), ()
        processor, assumed = super().image_processor(config, settings, preprocessor, hints)
        files = ", ".join(published_files())
        return processor, (*assumed, f"for torchvision's own preprocessing name its file, architecture= one of {files}")

    def rows(self, config: PlainViTConfig, layout: str | None) -> list[Row]:
        """Return the table of tensors."""
        names = Layout.parse(layout)
        mlp_names = OLD_MLP_NAMES if names.linear else MLP_NAMES
        kernel = KERNEL_TO_PIXELS if config.patch_projection == "linear" else IDENTITY
        return [
            *ROWS,
            Row("conv_proj.weight", "vit.embeddings.patch_embeddings.projection.weight", kernel),
            *(
                Row(f"{BLOCK}.{theirs}", f"{LAYER}.mlp.{ours}")
                for theirs, ours in zip(mlp_names, ("fc1", "fc2"), strict=True)
            ),
            Row(names.head, "classifier"),
        ]

    def independent_module(self, description: Description, settings: Mapping[str, Any]) -> nn.Module | None:
        """Build the model with torchvision's builder, if its name is known and the head is in the usual place."""
        named = next((one.value for one in description.inferences if one.field == "architecture"), None)
        config = description.config
        if named is None or not config.num_labels or Layout.parse(description.layout) != Layout():
            return None
        if config.representation_size or config.num_channels != 3:
            return None
        from torchvision import models

        builder = getattr(models, PUBLISHED_NAME.sub("", str(named)))
        return builder(num_classes=config.num_labels, image_size=config.image_size)

    def build_module(self, config: PlainViTConfig, layout: str | None) -> nn.Module:
        """Build torchvision's own model of this config, with random weights.

        Raises:
            ExportError: lists every part of the model that torchvision cannot represent.
        """
        from torchvision.models.vision_transformer import VisionTransformer

        _check_expressible(config)
        module = VisionTransformer(
            **{theirs: getattr(config, ours) for theirs, ours in ARGUMENTS.items()},
            num_classes=config.num_labels or 1,  # without labels, the head is replaced below
            norm_layer=functools.partial(nn.LayerNorm, eps=config.layer_norm_eps),
        )
        place = Layout.parse(layout).head
        if not config.num_labels:
            module.heads = nn.Identity()
        elif place == "heads":
            module.heads = module.heads.head
        elif place != HEAD:  # the classifier of a layout such as "heads.1", after layers without tensors
            name = place.removeprefix("heads.")
            before = {str(i): nn.Identity() for i in range(int(name) if name.isdigit() else 0)}
            module.heads = nn.Sequential(OrderedDict([*before.items(), (name, module.heads.head)]))
        return module

    def write(
        self, config: PlainViTConfig, tensors: StateDict, path: Path, image_processor: Any | None, layout: str | None
    ) -> None:
        """Write the state dict, with `torch.save` or as safetensors; the format stores no processor."""
        _check_expressible(config)
        write_state_dict(revert(self.rows(config, layout), tensors, config), path)


def _read_heads(heads: nn.Module) -> tuple[str | None, float, dict[str, Any]]:
    """Return the layout, the dropout rate and our config fields of the heads."""
    parts = {"heads" + ("." + path if path else ""): part for path, part in heads.named_modules(remove_duplicate=False)}
    leaves = [(path, part) for path, part in parts.items() if type(part) not in (nn.Identity, nn.Sequential)]
    fields: dict[str, Any] = {"num_labels": 0}
    layout, dropout = None, 0.0
    if len(leaves) > 2 and leaves[0][0] == "heads.pre_logits" and type(leaves[1][1]) is nn.Tanh:
        fields["representation_size"] = leaves[0][1].out_features
        leaves = leaves[2:]
    if len(leaves) == 2 and type(leaves[0][1]) is nn.Dropout:
        dropout = leaves[0][1].p
        leaves = leaves[1:]
    if len(leaves) == 1 and type(leaves[0][1]) is nn.Linear and leaves[0][1].bias is not None:
        layout = None if leaves[0][0] == HEAD else leaves[0][0]
        fields["num_labels"] = leaves[0][1].out_features
        leaves = []
    if leaves:
        raise ExportError(
            f"plain-vit does not know this head of torchvision's model: expected dropout, dense with tanh, dense; "
            f"{DROP_HEAD}",
            [f"{path} is a {class_path(part)}" for path, part in leaves],
        )
    return layout, dropout, fields


def _settle_unseen(shapes: Mapping[str, int], hints: Hints) -> tuple[dict[str, Any], list[Inference]]:
    """Return the number of heads and the epsilon, and their origin: a named architecture, or the caller.

    Args:
        shapes: The sizes of the tensors, in the order of `architectures`.
        hints: The caller's hints.

    Raises:
        AmbiguousCheckpointError: Neither determines them.
        CheckpointError: for an architecture that torchvision does not have or that has other shapes.
    """
    fitting: dict[str, int] = {name: heads for name, (*sizes, heads, mlp) in architectures().items()
               if [*sizes, mlp] == list(shapes.values())}  # fmt: skip
    code = [
        Inference("attention_scale", "head_dim**-0.5", "torchvision's MultiheadAttention, the only value there"),
        Inference("hidden_act", "gelu", "torchvision's MLPBlock, the only value there"),
    ]
    if hints.architecture is not None:
        name = PUBLISHED_NAME.sub("", hints.architecture)
        if name not in fitting:
            patch_size, width, depth, _, mlp = architectures()[name]
            expected = {"patch_size": patch_size, "width": width, "depth": depth, "mlp_width": mlp}
            raise CheckpointError(
                f"the tensors are of {dict(shapes)}, and {name} is of {expected}: name another, or none"
            )
        named = Inference("architecture", hints.architecture, "the caller")
        settled = [Inference(field, value, name) for field, value in
                   (("num_attention_heads", fitting[name]), ("layer_norm_eps", EPS))]  # fmt: skip
        return {"num_attention_heads": fitting[name], "layer_norm_eps": EPS}, [named, *settled, *code]
    (heads, settled), eps = hints.heads_in(shapes["width"]), hints.layer_norm_eps
    open_: dict[str, Sequence[object]] = {}
    if heads is None:
        open_["num_attention_heads"] = head_counts(shapes["width"], next(iter(fitting.values()), None))
    if eps is None:
        open_["layer_norm_eps"] = [EPS, 1e-5]
    if open_:
        names = [name for name, count in fitting.items() if heads in (None, count) and eps in (None, EPS)]
        message = "the tensors of torchvision's VisionTransformer do not show its heads and its epsilon; give"
        if names:
            raise AmbiguousCheckpointError(message, {"architecture": names}, open_)
        raise AmbiguousCheckpointError(message, open_)
    return {"num_attention_heads": heads, "layer_norm_eps": eps}, [*settled, *code]


def _name_as_published(config: PlainViTConfig, file: str) -> Inference:
    """Set the class names that torchvision publishes with all its files."""
    from torchvision.models import ViT_B_16_Weights

    names = ViT_B_16_Weights.IMAGENET1K_V1.meta["categories"]  # the same for all files
    vars(config).update(label_fields(names))
    return Inference("id2label", "the classes of imagenet-1k", f"{file}, with which torchvision publishes them")


def _check_expressible(config: PlainViTConfig) -> None:
    """Refuse a config that torchvision's constructor cannot represent."""
    size, patch = config.image_size, config.patch_size
    if not isinstance(size, int) or not isinstance(patch, int):
        raise ExportError("torchvision has square images and patches only:", [f"{size=}", f"{patch=}"])
    kept = (*ARGUMENTS.values(), "head_dim", "layer_norm_eps", "num_labels")
    fields = {**FIXED_FIELDS, **{name: getattr(config, name) for name in kept}}
    if faults := [*uneven_heads(config), *lost_fields(config, lambda: PlainViTConfig(**fields))]:
        raise ExportError("torchvision's VisionTransformer cannot represent this model:", faults)


TORCHVISION = TorchvisionFormat()

"""GGUF files of llama.cpp that hold the vision tower of a multimodal model, called `mmproj`.

Settings are in the file, and the type of the projector names the tower. Source: llama.cpp, `tools/mtmd/clip.cpp`,
`tools/mtmd/models/{llava,siglip,internvl}.cpp` and the converters of `convert_hf_to_gguf.py`.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ...configuration_plain_vit import PlainViTConfig
from ...errors import CheckpointError, ExportError, UnknownFormatError
from ...files.gguf import save_gguf
from ..tables.compare_modules import lost_fields
from ..tables.engine import ADD_TWO_AXES, Row, revert, sources_of
from ..tables.format import Description, FileFormat, Hints, Inference, StateDict
from ..tables.infer import square_grid
from ..tables.pixels import default_processor


class Tower(NamedTuple):
    """The towers of one type of projector.

    Args:
        pixels: What the model's own code does with an image that is not a square of the right size; "" if it stretches
            the image.
        class_token: Whether there is one; None if both occur, in LLaVA's towers, which have no gains of layers.
        pooling: As in the config; None for the class token, or else the mean.
        gelu: What the tower was trained with where the file says "gelu"; None if CLIP's has a class token.
        position_resampling: As in the config.
    """

    pixels: str = ""
    class_token: bool | None = False
    pooling: str | None = None
    gelu: str | None = "gelu_pytorch_tanh"
    position_resampling: str = "bicubic"


TILES, PADS = "cuts larger images into tiles", "pads images to a square"
LLAVA = Tower(f"{PADS}, or {TILES}", None, gelu=None)
TOWERS = {  # by clip.projector_type; for a model without one, the first that represents it is written
    "internvl": Tower(TILES, True, "mean", "gelu"),
    "gemma3": Tower(),
    "idefics3": Tower(TILES, position_resampling="bucketed"),
    "lfm2": Tower(f"keeps the aspect ratio, and {TILES}", position_resampling="bilinear_antialias"),
    "janus_pro": Tower(PADS, gelu="gelu"),
    **dict.fromkeys(("mlp", "mlp_norm", "ldp", "ldpv2", "adapter"), LLAVA),
}
SWAPPED = "swapped"  # in a layout: llama.cpp's first converter called the MLP's layers by each other's names

PATCHES, CLASS, POSITIONS, BLOCK = "v.patch_embd", "v.class_embd", "v.position_embd.weight", "v.blk.{}."
EMBEDDINGS, LAYER = "vit.embeddings", "vit.layers.{}"
ROWS = [
    Row(PATCHES, f"{EMBEDDINGS}.patch_embeddings.projection"),
    Row(CLASS, f"{EMBEDDINGS}.cls_token", ADD_TWO_AXES),
    Row(POSITIONS, f"{EMBEDDINGS}.position_embeddings.weight"),
    Row("v.pre_ln", f"{EMBEDDINGS}.norm"),
    Row(f"{BLOCK}ln1", f"{LAYER}.layernorm_before"),
    Row(f"{BLOCK}attn_q", f"{LAYER}.attention.q_proj"),
    Row(f"{BLOCK}attn_k", f"{LAYER}.attention.k_proj"),
    Row(f"{BLOCK}attn_v", f"{LAYER}.attention.v_proj"),
    Row(f"{BLOCK}attn_q_norm", f"{LAYER}.attention.q_norm"),
    Row(f"{BLOCK}attn_k_norm", f"{LAYER}.attention.k_norm"),
    Row(f"{BLOCK}attn_out", f"{LAYER}.attention.o_proj"),
    Row(f"{BLOCK}ls1.weight", f"{LAYER}.layer_scale1.weight"),
    Row(f"{BLOCK}ln2", f"{LAYER}.layernorm_after"),
    Row(f"{BLOCK}ls2.weight", f"{LAYER}.layer_scale2.weight"),
    Row("v.post_ln", "vit.layernorm"),
]
UP, DOWN = f"{BLOCK}ffn_up", f"{BLOCK}ffn_down"
IGNORED = (
    *((f"{name}*", "of the projector to the language model") for name in ("mm.", "adapter.", "model.", "v.image_")),
    ("a.*", "of the audio tower"),
)

# Settings: what the tensors show too, and the others.
SIZES = tuple(
    f"clip.vision.{name}"
    for name in ("image_size", "patch_size", "embedding_length", "feed_forward_length", "block_count")
)
HEADS, EPS = "clip.vision.attention.head_count", "clip.vision.attention.layer_norm_epsilon"
STATISTICS = ("image_mean", "image_std")
ACTS = {
    "clip.use_gelu": ", as towers of this projector are trained; llama.cpp computes the approximation by tanh for all",
    "clip.use_silu": "",
}
NO_ACT = "llama.cpp, for a file with neither clip.use_gelu nor clip.use_silu"


class GgufFormat(FileFormat):
    """The `mmproj` files of llama.cpp.

    A layout is the type of the projector, and `SWAPPED` if the MLP has the names of the first converter.
    """

    name = "gguf"
    suffixes: tuple[str, ...] = (".gguf",)
    not_opened = "llama.cpp's models are no torch modules: open their .gguf file with from_checkpoint"
    not_built = 'llama.cpp has no torch modules: use to_checkpoint for a file, or to_module(model, "timm")'

    def matches_names(self, names: Collection[str]) -> bool:
        """Return whether the tensors have the names of a vision tower."""
        return f"{PATCHES}.weight" in names and f"{BLOCK.format(0)}ln1.weight" in names

    def names_of_others(self, names: Collection[str]) -> str | None:
        """Return a description of the other files of llama.cpp."""
        if "token_embd.weight" in names:
            return "a language model of llama.cpp: give the mmproj file beside it"
        return "another tower of llama.cpp" if any(name.startswith(("v.", "a.blk.")) for name in names) else None

    def describe_checkpoint(self, tensors: StateDict, settings: Mapping[str, Any], hints: Hints) -> Description:
        """Read the configuration from the settings of the file, and compare it with the tensors.

        Raises:
            CheckpointError: Settings are missing, or contradict the tensors.
            UnknownFormatError: The projector is of a type whose towers do not open.
        """
        kind, shapes = _kind(settings), {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        config = _config(shapes, settings, hints)
        depth, width = config.num_hidden_layers, config.hidden_size
        layout = f"{kind} {SWAPPED}" if shapes[f"{DOWN.format(0)}.weight"][-1] == width else kind
        unused = [(f"{BLOCK.format(n)}*", "after the last block of the tower") for n in range(depth, _depth(shapes))]
        origins = {
            "num_attention_heads": HEADS,
            "layer_norm_eps": EPS,
            "hidden_act": next((f"{key}{note}" for key, note in ACTS.items() if settings.get(key)), NO_ACT),
            "attention_scale": "llama.cpp, the only value in its code",
        }
        inferences = [Inference(field, getattr(config, field), origin) for field, origin in origins.items()
                      if getattr(hints, field) is None]  # fmt: skip
        return Description(config, layout, inferences, [*IGNORED, *unused], stated_by=f"clip.projector_type={kind}")

    def image_processor(
        self, config: PlainViTConfig, settings: Mapping[str, Any], preprocessor: Mapping[str, Any], hints: Hints
    ) -> tuple[Any, Sequence[str]]:
        """Return a processor of the file's size, mean and deviation, which stretches the whole image."""
        mean, std = ([_number(settings, f"clip.vision.{name}", at) for at in range(config.num_channels)]
                     if f"clip.vision.{name}" in settings else getattr(hints, name) for name in STATISTICS)  # fmt: skip
        processor, notes = default_processor(config.image_size, config.num_channels, mean=mean, std=std)
        height, width = config.image_shape
        does = TOWERS[_kind(settings)].pixels or "does the same"
        stretched = f"the whole image is stretched to {height}x{width} pixels, bilinear; the model's own code {does}"
        layers = settings.get("clip.vision.feature_layer") or ()
        joined = [f"the projector reads the tokens after blocks {list(layers)}"] if len(layers) > 1 else []
        return processor, [stretched, *notes[1:], *joined]

    def rows(self, config: PlainViTConfig, layout: str | None) -> list[Row]:
        """Return the table of tensors."""
        up, down = (DOWN, UP) if SWAPPED in (layout or "").split() else (UP, DOWN)
        return [*ROWS, Row(up, f"{LAYER}.mlp.fc1"), Row(down, f"{LAYER}.mlp.fc2")]

    def write(
        self, config: PlainViTConfig, tensors: StateDict, path: Path, image_processor: Any | None, layout: str | None
    ) -> str:
        """Write the tower without a projector, as llama.cpp's converter does: only matrices of blocks in 16 bits.

        Raises:
            ExportError: lists every part that the tower cannot represent.
        """
        lost: dict[str, list[str]] = {}
        fitting = [kind for kind, tower in TOWERS.items() if tower.class_token in (None, config.use_class_token)]
        for named in [layout] if layout else fitting:
            rows, settings = self.rows(config, named), _settings(config, named.partition(" ")[0], image_processor)
            sources = sources_of(rows, tensors)
            shapes = {source: tuple(tensors[ours].shape) for ours, (source,) in sources.items()}
            shapes[POSITIONS] = (math.prod(config.grid_size) + config.use_class_token, config.hidden_size)
            lost[named] = lost_fields(config, partial(_config, shapes, settings, Hints()))
            if not lost[named]:
                save_gguf(
                    settings, {name: _as_stored(name, one) for name, one in revert(rows, tensors, config).items()}, path
                )
                return named
        raise ExportError("llama.cpp's vision towers cannot represent this model:", min(lost.values(), key=len))


def _as_stored(name: str, tensor: torch.Tensor) -> torch.Tensor:
    is_wide = tensor.dtype.itemsize > 2 or (tensor.ndim == 2 and name != POSITIONS)
    return tensor if is_wide else tensor.float()


def _kind(settings: Mapping[str, Any]) -> str:
    """Return the type of the projector; the first files had no other."""
    named = settings.get("clip.projector_type") or settings.get("clip.vision.projector_type")
    kind = named or ("mlp" if settings.get("clip.has_llava_projector") else None)
    if kind in TOWERS:
        return kind
    if not settings:
        raise CheckpointError("the tensors alone do not say which tower of llama.cpp they are: give the .gguf file")
    raise UnknownFormatError(
        f"clip.projector_type is {kind!r}: expected one of {', '.join(TOWERS)}. Others rotate queries and keys, attend "
        "in windows or are no Vision Transformer, which the tensors do not show: give the folder of the model that the "
        "file was made from"
    )


def _number(settings: Mapping[str, Any], key: str, at: int | None = None) -> Any:
    """Return a setting, or one of its numbers; a float32 as the shortest number that is rounded to it."""
    value = settings.get(key)
    value = value[at] if isinstance(value, tuple) and at is not None and at < len(value) else value
    if not isinstance(value, int | float):
        raise CheckpointError(f"{key} is {value!r:.100}: expected a number for each channel, as llama.cpp writes it")
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _depth(shapes: Collection[str]) -> int:
    return len({name.split(".")[2] for name in shapes if name.startswith("v.blk.")})


def _config(shapes: Mapping[str, tuple[int, ...]], settings: Mapping[str, Any], hints: Hints) -> PlainViTConfig:
    """Return our config of a tower.

    Raises:
        CheckpointError: The settings contradict the tensors.
        UnknownFormatError: As from `_kind`.
    """
    kind = _kind(settings)
    tower, has_class = TOWERS[kind], CLASS in shapes
    if tower.class_token is not None and has_class != tower.class_token:
        raise CheckpointError(f"{CLASS} is {'there' if has_class else 'missing'}, unlike in any tower of {kind}")
    width, channels, height, _ = shapes[f"{PATCHES}.weight"]
    first, up = BLOCK.format(0), shapes.get(f"{UP.format(0)}.weight", (0, 0))
    grid = square_grid(shapes.get(POSITIONS, (0,))[0] - has_class)
    if grid is None or up[0] == up[1]:
        raise CheckpointError(
            f"{POSITIONS} of shape {shapes.get(POSITIONS)} and {UP.format(0)}.weight of shape {up}: expected a row for "
            "each patch of a square, and an MLP of another width than the tokens, as converters mixed up its layers"
        )
    stated, inner = [_number(settings, key) for key in SIZES], up[0] if up[1] == width else up[1]
    found = (grid[0] * height, height, width, inner, min(max(depth := stated[-1], 1), _depth(shapes)))
    both = zip(SIZES, stated, found, strict=True)
    if faults := [f"{key} = {said} (the tensors have {size})" for key, said, size in both if said != size]:
        raise CheckpointError(f"the settings contradict the tensors: {', '.join(faults)}")
    if settings.get("clip.use_gelu"):
        act = tower.gelu or ("gelu" if has_class else "gelu_pytorch_tanh")
    else:
        act = "silu" if settings.get("clip.use_silu") else "quick_gelu"
    rms = kind == "internvl" and f"{first}ln1.bias" not in shapes  # InternViT-6B, whose norms of q and k are too
    scaled = tower is not LLAVA and f"{first}ls1.weight" in shapes
    fields: dict[str, Any] = {
        "image_size": found[0],
        "patch_size": height,
        "num_channels": channels,
        "hidden_size": width,
        "intermediate_size": found[3],
        "num_hidden_layers": depth,
        "num_attention_heads": _number(settings, HEADS),
        "layer_norm_eps": hints.layer_norm_eps or _number(settings, EPS),
        "hidden_act": hints.hidden_act or act,
        "norm_type": "rms_norm" if rms else "layer_norm",
        "qk_norm": "rms_all_heads" if rms and f"{first}attn_q_norm.weight" in shapes else None,
        "qkv_bias": f"{first}attn_q.bias" in shapes,
        "patch_bias": f"{PATCHES}.bias" in shapes,
        "embedding_norm": "v.pre_ln.weight" in shapes,
        "use_class_token": has_class,
        "layer_scale_init_value": 0.1 if scaled else None,
        "position_resampling": tower.position_resampling,
        "final_norm": "before_pooling" if "v.post_ln.weight" in shapes else "none",
        "pooling": tower.pooling or ("cls" if has_class else "mean"),
        "num_labels": 0,
    }
    return PlainViTConfig(**fields)


def _settings(config: PlainViTConfig, kind: str, image_processor: Any | None) -> dict[str, Any]:
    """Return the settings of a tower, as llama.cpp's converter names them."""
    inner, depth = config.intermediate_size, config.num_hidden_layers
    sizes = (config.image_shape[0], config.patch_shape[0], config.hidden_size, inner, depth)
    statistics = {f"clip.vision.{name}": list(given) for name in STATISTICS
                  if (given := getattr(image_processor, name, None)) is not None}  # fmt: skip
    return {
        "general.architecture": "clip",
        "clip.has_vision_encoder": True,
        "clip.projector_type": kind,
        **dict(zip(SIZES, sizes, strict=True)),
        HEADS: config.num_attention_heads,
        EPS: float(config.layer_norm_eps),
        "clip.use_gelu": "gelu" in config.hidden_act and config.hidden_act != "quick_gelu",
        "clip.use_silu": config.hidden_act == "silu",
        **statistics,
    }


GGUF = GgufFormat()

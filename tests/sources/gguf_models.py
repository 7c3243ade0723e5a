"""`mmproj` files of small models of transformers, named by the package gguf and typed as llama.cpp's converter does."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from torch import nn
from transformers import CLIPVisionConfig, CLIPVisionModel, SiglipVisionConfig, SiglipVisionModel
from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig
from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionTransformer
from transformers.models.internvl import InternVLVisionConfig, InternVLVisionModel

from tests.conftest import randomize_

SIZE, DEPTH = 28, 3
SIZES = {"image_size": SIZE, "patch_size": 7, "hidden_size": 32, "intermediate_size": 52, "num_hidden_layers": DEPTH,
         "num_attention_heads": 4, "layer_norm_eps": 3e-4}  # fmt: skip
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Case(NamedTuple):
    """A tower of transformers in a file.

    Args:
        projector: The type of the projector.
        model: A class of transformers.
        config: The class of its config, and fields.
        names: Prefix of its tensors, as the converter reads them.
        act: The setting of the activation, if any.
        last: Number of blocks in the file; LLaVA's projector reads the tokens before the last block.
        dropped: Tensors that the converter leaves out.
    """

    projector: str
    model: Any
    config: Any
    names: str
    act: str = ""
    last: int = DEPTH
    dropped: tuple[str, ...] = ()


TOWER = "vision_tower.vision_model."
CASES = {
    "llava": Case("mlp", CLIPVisionModel, CLIPVisionConfig(**SIZES), TOWER, "", DEPTH - 1, ("v.post_ln.",)),
    "llava of another CLIP": Case("mlp", CLIPVisionModel, CLIPVisionConfig(**SIZES, hidden_act="gelu"), TOWER,
                                  "clip.use_gelu", DEPTH - 1, ("v.post_ln.",)),
    "gemma3": Case("gemma3", SiglipVisionModel, SiglipVisionConfig(**SIZES, vision_use_head=False), TOWER,
                   "clip.use_gelu"),
    "idefics3": Case("idefics3", Idefics3VisionTransformer, Idefics3VisionConfig(**SIZES), "model.vision_model.",
                     "clip.use_gelu"),
    "internvl": Case("internvl", InternVLVisionModel, InternVLVisionConfig(**SIZES, attention_bias=True),
                     "model.vision_tower.", "clip.use_gelu"),
    "internvl 6B": Case("internvl", InternVLVisionModel, InternVLVisionConfig(
        **SIZES | {"layer_norm_eps": 1e-6}, norm_type="rms_norm", use_qk_norm=True), "model.vision_tower.",
        "clip.use_gelu"),
}  # fmt: skip


def tower_of(case: Case) -> nn.Module:
    """Return the model of transformers, with random parameters."""
    return randomize_(case.model(case.config)).eval()


@torch.no_grad()
def tokens_of(case: Case, model: nn.Module, pixels: torch.Tensor, **asked: bool) -> list[torch.Tensor]:
    """Return the tokens before each block and after the last one of the file."""
    seen: list[torch.Tensor] = []
    blocks = next(part for name, part in model.named_modules() if name.endswith(("encoder.layers", "encoder.layer")))
    for block in blocks:
        block.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
        block.register_forward_hook(lambda module, given, made: seen.append(made))
    model(pixels, **asked)
    return [*seen[0 : 2 * case.last : 2], seen[2 * case.last - 1]]


def tensors_of(case: Case, model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of the file by their names there."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, DEPTH)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        theirs = case.names + name.removeprefix("vision_model.")
        mapped = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
        if mapped is None:
            assert theirs.endswith(("mask_token", "position_ids")), theirs
            continue
        mapped += ".weight" if mapped.endswith((".ls1", ".ls2", "position_embd")) else ""
        block = mapped.split(".")[2] if mapped.startswith("v.blk.") else "0"
        if int(block) < case.last and not mapped.startswith(case.dropped or ("-",)):
            tensors[mapped] = tensor.squeeze()
    return tensors | {"mm.0.weight": torch.randn(5, 32), "mm.0.bias": torch.randn(5)}


def settings_of(case: Case) -> dict[str, Any]:
    """Return the settings of the file."""
    return {
        "clip.has_vision_encoder": True, "clip.projector_type": case.projector, "clip.vision.image_size": SIZE,
        "clip.vision.patch_size": 7, "clip.vision.embedding_length": 32, "clip.vision.feed_forward_length": 52,
        "clip.vision.projection_dim": 5, "clip.vision.block_count": case.last, "clip.vision.attention.head_count": 4,
        "clip.vision.attention.layer_norm_epsilon": case.config.layer_norm_eps, "clip.vision.image_mean": list(MEAN),
        "clip.vision.image_std": list(STD), **({case.act: True} if case.act else {}),
        "general.languages": ["en", "de"],  # an array of texts
    }  # fmt: skip


def save(path: Path, settings: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], kind: str = "F32") -> Path:
    """Write a file as llama.cpp's converter does: vectors and positions as F32, the others as the type."""
    writer = gguf.GGUFWriter(path, "clip")
    for key, value in settings.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
               list: writer.add_array}[type(value)]  # fmt: skip
        add(key, value)
    for name, tensor in tensors.items():
        one = gguf.GGMLQuantizationType["F32" if tensor.ndim < 2 or "position" in name else kind]
        array = tensor.float().contiguous().numpy()
        if one.name in ("F32", "F16"):
            writer.add_tensor(name, array.astype({"F32": np.float32, "F16": np.float16}[one.name]))
        else:
            can = array.shape[-1] % gguf.GGML_QUANT_SIZES[one][0] == 0
            one = one if can else gguf.GGMLQuantizationType.F32
            writer.add_tensor(name, gguf.quantize(array, one) if can else array, raw_dtype=one)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

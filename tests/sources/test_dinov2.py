"""DINOv2's own checkpoints, compared with timm and transformers with the same weights."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.models.vision_transformer import checkpoint_filter_fn

from plain_vit.conversion import from_checkpoint, to_checkpoint, to_module
from plain_vit.conversion.sources.timm.source import TIMM
from plain_vit.conversion.tables.engine import revert
from plain_vit.errors import AmbiguousCheckpointError, CheckpointError, ExportError, MappingError
from tests.sources.sweep import record
from tests.sources.timm_models import stage_differences
from tests.tiny import difference

WIDTH, DEPTH, SIZE, PATCH = 48, 4, 28, 7
HINTS: dict[str, Any] = {"num_attention_heads": 6, "attention_scale": "head_dim**-0.5", "layer_norm_eps": 1e-6,
                         "pooling": "cls", "image_size": SIZE}  # fmt: skip
# Registers, gated MLP, number of blocks in a chunk.
KINDS: dict[str, tuple[int, bool, int]] = {
    "plain": (0, False, 0), "registers": (3, False, 0), "gated": (0, True, 0), "registers, gated, chunks": (2, True, 2),
    "chunks": (0, False, 3),
}  # fmt: skip


def own_tensors(registers: int, gated: bool, chunk: int) -> dict[str, torch.Tensor]:
    """Return random tensors under the names of DINOv2's `DinoVisionTransformer`."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, scale: float = 0.3, gain: float = 0.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale + gain

    inner = 2 * WIDTH if gated else 3 * WIDTH
    tensors = {
        "cls_token": draw(1, 1, WIDTH), "pos_embed": draw(1, 1 + (SIZE // PATCH) ** 2, WIDTH),
        "mask_token": draw(1, WIDTH), "patch_embed.proj.weight": draw(WIDTH, 3, PATCH, PATCH, scale=0.1),
        "patch_embed.proj.bias": draw(WIDTH), "norm.weight": draw(WIDTH, gain=1.0), "norm.bias": draw(WIDTH),
    }  # fmt: skip
    if registers:
        tensors["register_tokens"] = draw(1, registers, WIDTH)
    first, last = ("w12", "w3") if gated else ("fc1", "fc2")
    for number in range(DEPTH):
        block = f"blocks.{number // chunk}.{number}" if chunk else f"blocks.{number}"
        for name, out, into in (
            ("attn.qkv", 3 * WIDTH, WIDTH),
            ("attn.proj", WIDTH, WIDTH),
            (f"mlp.{first}", inner * (1 + gated), WIDTH),
            (f"mlp.{last}", WIDTH, inner),
        ):
            tensors[f"{block}.{name}.weight"] = draw(out, into, scale=into**-0.5)
            tensors[f"{block}.{name}.bias"] = draw(out, scale=0.1)
        for name in ("norm1", "norm2"):
            tensors |= {f"{block}.{name}.weight": draw(WIDTH, gain=1.0), f"{block}.{name}.bias": draw(WIDTH)}
        tensors |= {f"{block}.{name}.gamma": draw(WIDTH, gain=0.5) for name in ("ls1", "ls2")}
    return tensors


def timms(kind: str) -> Any:
    """Return timm's model with the same weights, converted by timm itself."""
    registers, gated, _ = KINDS[kind]
    name = "vit_giant_patch14_reg4_dinov2" if gated else "vit_small_patch14_reg4_dinov2"
    module = timm.create_model(
        name, img_size=SIZE, patch_size=PATCH, embed_dim=WIDTH, depth=DEPTH, num_heads=6, mlp_ratio=4 if gated else 3,
        reg_tokens=registers, no_embed_class=registers > 0, num_classes=0,
    )  # fmt: skip
    module.load_state_dict(checkpoint_filter_fn(own_tensors(registers, gated, 0), module))
    return module.eval()


def hints(kind: str) -> dict[str, Any]:
    _, gated, _ = KINDS[kind]
    gate = {"mlp_type": "swiglu_packed", "hidden_act": "silu"} if gated else {"hidden_act": "gelu"}
    return {**HINTS, **gate, "rope_type": "none"}


@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_are_timms_and_transformers_and_every_tensor_goes_back(kind: str, tmp_path: Path) -> None:
    tensors, module = own_tensors(*KINDS[kind]), timms(kind)
    torch.save(tensors, tmp_path / "dinov2.pth")
    with pytest.raises(AmbiguousCheckpointError, match="num_attention_heads"):
        from_checkpoint(tmp_path / "dinov2.pth")
    opened = from_checkpoint(tmp_path / "dinov2.pth", **hints(kind), verify=True)
    assert opened.report.differences is not None
    assert max(stage.difference for stage in opened.report.differences) == 0.0
    pixel_values = torch.randn(2, 3, SIZE, SIZE)
    found = stage_differences(module, opened.model, pixel_values)
    assert max(found.values()) == 0.0, found

    named = "Dinov2WithRegistersModel" if KINDS[kind][0] else "Dinov2Model"
    if not KINDS[kind][1]:  # transformers derives the gated width from a ratio
        theirs = to_module(opened.model, "transformers", layout=named).eval()
        with torch.no_grad():
            assert (
                difference(opened.model(pixel_values).last_hidden_state, theirs(pixel_values).last_hidden_state) == 0.0
            )

    config = opened.model.config
    ours = {f"vit.{name}": tensor for name, tensor in opened.model.state_dict().items()}
    back = revert(TIMM.rows(config, opened.report.layout), ours, config)
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())
    halves = opened.model.bfloat16()(pixel_values.bfloat16()).pooler_output
    rounded = difference(halves.float(), module.bfloat16()(pixel_values.bfloat16()).float())
    # With registers, timm adds the class token's position before rounding; DINOv2 and plain-vit add rounded values.
    assert rounded <= (2**-6 if KINDS[kind][0] else 0.0)
    record({"source": f"timm DINOv2's own file, {kind}", "logits": found["logits"], "way_back_bit_exact": True,
            "blocks": max(value for stage, value in found.items() if stage != "logits"), "bfloat16": rounded,
            "timm": timm.__version__, "torch": torch.__version__})  # fmt: skip


def test_registers_are_resampled_as_in_timm_and_others_as_in_transformers(tmp_path: Path) -> None:
    pixel_values = torch.randn(2, 3, 35, 56)
    for kind, source in (("registers", "timm"), ("plain", "transformers")):
        torch.save(own_tensors(*KINDS[kind]), tmp_path / "dinov2.pth")
        model = from_checkpoint(tmp_path / "dinov2.pth", **hints(kind)).model
        if source == "timm":
            module = timms(kind)
            module.set_input_size((35, 56))
            expected = module(pixel_values)
        else:
            expected = to_module(model, "transformers", layout="Dinov2Model").eval()(pixel_values).pooler_output
        assert difference(model(pixel_values).pooler_output, expected) == 0.0


@pytest.mark.slow(quick=["vit_small_patch14_dinov2"])
@pytest.mark.parametrize("name", ["vit_small_patch14_dinov2", "vit_base_patch14_reg4_dinov2"])
def test_timms_name_of_a_published_model_settles_everything(name: str, tmp_path: Path) -> None:
    with torch.device("meta"):
        module: Any = timm.create_model(name)
    state = {key: torch.zeros(tensor.shape) for key, tensor in module.state_dict().items()}
    if "reg_token" in state:
        state["register_tokens"] = state.pop("reg_token")
        state["pos_embed"] = torch.zeros(1, state["pos_embed"].shape[1] + 1, state["pos_embed"].shape[2])
    torch.save({**state, "mask_token": torch.zeros(1, module.embed_dim)}, tmp_path / "dinov2_pretrain.pth")
    config = from_checkpoint(tmp_path / "dinov2_pretrain.pth", architecture=name).model.config
    assert (config.image_size, config.num_register_tokens) == (518, 4 if "reg4" in name else 0)
    assert config.use_mask_token


def test_the_encoder_of_a_training_checkpoint_opens_by_its_key(tmp_path: Path) -> None:
    tensors = own_tensors(*KINDS["chunks"])
    teacher = {f"backbone.{name}": tensor for name, tensor in tensors.items()}
    teacher |= {"dino_head.mlp.0.weight": torch.ones(5, WIDTH), "ibot_head.mlp.0.weight": torch.ones(5, WIDTH)}
    torch.save({"teacher": teacher}, tmp_path / "teacher_checkpoint.pth")
    with pytest.raises(CheckpointError, match="key='teacher.backbone'"):
        from_checkpoint(tmp_path / "teacher_checkpoint.pth", **hints("chunks"))
    opened = from_checkpoint(tmp_path / "teacher_checkpoint.pth", key="teacher.backbone", **hints("chunks"))
    assert opened.report.layout == "dinov2 3"


def test_uneven_chunks_strange_tensors_and_a_folder_of_these_names_are_refused(tmp_path: Path) -> None:
    tensors = own_tensors(*KINDS["chunks"])
    uneven = {name.replace("blocks.1.3.", "blocks.2.3."): tensor for name, tensor in tensors.items()}
    torch.save(uneven, tmp_path / "uneven.pth")
    with pytest.raises(CheckpointError, match="unequal"):
        from_checkpoint(tmp_path / "uneven.pth", **hints("chunks"))
    torch.save({**own_tensors(*KINDS["plain"]), "extra": torch.ones(3)}, tmp_path / "extra.pth")
    with pytest.raises((MappingError, CheckpointError), match="extra"):
        from_checkpoint(tmp_path / "extra.pth", **hints("plain"))
    torch.save(own_tensors(*KINDS["plain"]), tmp_path / "plain.pth")
    model = from_checkpoint(tmp_path / "plain.pth", **hints("plain")).model
    with pytest.raises(ExportError, match="omit the layout"):
        to_checkpoint(model, tmp_path / "out", format="timm", layout="dinov2")
    to_checkpoint(model, tmp_path / "out", format="timm", drop=["mask_token"])

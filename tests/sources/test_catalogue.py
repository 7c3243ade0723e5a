"""Models by name: the names, the configs and image processors behind them, and weights from a Hub on this machine."""

import hashlib
import json
from pathlib import Path
from typing import Any

import open_clip
import pytest
import timm
import torch
import torchvision
import transformers
from open_clip.model import _build_vision_tower
from safetensors.torch import save_file
from timm.data import resolve_model_data_config

import plain_vit
from plain_vit import PlainViTConfig, PlainViTForImageClassification, PlainViTModel
from plain_vit.configuration_plain_vit import PRESETS
from plain_vit.conversion import catalogue, from_checkpoint, from_module
from plain_vit.conversion.catalogue import HUB, PREFIXES, SOURCES, find, list_models, names
from plain_vit.conversion.create import config_named
from plain_vit.conversion.registry import FORMATS, NAMED, located
from plain_vit.conversion.sources.timm.pixels import processor_from_timm
from plain_vit.conversion.tables.format import Hints
from plain_vit.errors import CheckpointError, HubError, UnknownFormatError
from tests.conftest import randomize_
from tests.hub.endpoint import HubEndpoint
from tests.sizes import few
from tests.tiny import difference
from tools import tabulate_models

from .test_timm_architectures import Unfilled, skip_other_releases

TAGGED = "vit_tiny_patch16_224.augreg_in21k"


# Names


def test_names_are_listed_by_pattern_source_and_weights() -> None:
    assert "timm:vit_small_patch16_dinov3" in plain_vit.list_models("*dinov3*", source="timm")
    assert "timm:vit_small_patch16_dinov3.lvd1689m" in plain_vit.list_models("*dinov3*", pretrained=True)
    assert plain_vit.list_models("timm:vit_tiny*224") == ["timm:vit_tiny_patch16_224", "timm:vit_tiny_r_s16_p8_224"]
    assert plain_vit.list_models(source="hf") == plain_vit.list_models(source="transformers", pretrained=True)
    everything = {*list_models(), *list_models(pretrained=True)}
    assert {name.partition(":")[0] for name in everything} == set(PREFIXES)
    assert all(str(find(name)) == name for name in everything)
    with pytest.raises(ValueError, match="source is 'tim': expected one of .*; did you mean 'timm'"):
        list_models(source="tim")


def test_what_follows_the_dot_is_of_weights() -> None:
    for prefix in SOURCES.keys() - {HUB}:
        models = {name.partition(".")[0] for name in names(prefix)}
        assert models <= set(names(prefix)), "weights of a model that is not listed"
    assert catalogue.PRESETS.keys() == PRESETS.keys()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vit_bse_patch16_224", "did you mean 'vit_base_patch16_224' or"),
        ("timm:vit_base_patch16_24", "no model of timm: .*did you mean 'vit_base_patch16_224' or"),
        ("vit-bse-patch16-224", "did you mean 'vit-base-patch16-224' or"),
        ("tim:vit_base_patch16_224", "'tim' in 'tim:vit_base_patch16_224' is no source: expected one of timm, "),
        ("hf:vit-base-patch16-224", r"expected the id of a repository \(user/name\)"),
        # Of these weights, only the model with QuickGELU has the numbers: open_clip warns of the other one.
        ("open_clip:ViT-B-32.openai", "did you mean 'ViT-B-32-quickgelu.openai' or"),
        ("vit_relpos_medium_patch16_cls_224", "timm and open_clip have .*: give timm:vit.* or open_clip:vit"),
    ],
)
def test_an_unknown_name_suggests_near_ones(name: str, message: str) -> None:
    for function in (plain_vit.create_model, plain_vit.create_image_processor, PlainViTConfig.from_name):
        with pytest.raises(ValueError, match=message):
            function(name)


def test_a_source_of_weights_that_is_nearly_a_name_is_refused_with_the_name(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match="vit_bse_patch16_224 does not exist.*did you mean 'vit_base_patch16_224'"
    ):
        from_checkpoint("vit_bse_patch16_224")
    with pytest.raises(CheckpointError, match="a model without weights: .*--from-scratch"):
        from_checkpoint("plain_vit:vit-base-patch16-224")
    with pytest.raises(CheckpointError, match="without weights: name some: torchvision:vit_b_16.IMAGENET1K_V1, "):
        from_checkpoint("vit_b_16")
    with pytest.raises(CheckpointError, match=r"not on the Hub: download https://\S+, and give the file"):
        from_checkpoint("vit_huge_patch14_gap_224.in1k_ijepa")
    assert located("google/vit-base-patch16-224") == ("google/vit-base-patch16-224", None)
    assert located("hf:google/vit-base-patch16-224") == ("google/vit-base-patch16-224", None)
    assert located(f"timm:{TAGGED}") == (f"timm/{TAGGED}", "timm")
    assert located("vit_tiny_patch16_224") == ("timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k", "timm")
    assert located("vit_tiny_patch16_224_in21k") == (f"timm/{TAGGED}", "timm")  # timm's earlier name
    assert located("ViT-B-32-quickgelu.openai") == ("timm/vit_base_patch32_clip_224.openai", "open_clip")


def test_a_path_is_never_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("vit_base_patch16_224").mkdir()
    assert located("vit_base_patch16_224") == ("vit_base_patch16_224", None)


# Configs and image processors


def theirs(name: str) -> Any:
    """Return the model that a source's own package builds, on the meta device."""
    prefix, _, own = name.partition(":")
    model, _, tag = own.partition(".")
    with torch.device("meta"), Unfilled():
        if prefix == "timm":
            return timm.create_model(own)
        if prefix == "torchvision":
            builder: Any = getattr(torchvision.models, model)
            weights = getattr(torchvision.models.get_model_weights(model), tag) if tag else None
            return builder() if weights is None else builder(image_size=weights.meta["min_size"][0])
        cfg: Any = open_clip.get_model_config(model)
        return _build_vision_tower(cfg["embed_dim"], cfg["vision_cfg"], bool(cfg.get("quick_gelu")))


NAMES = (
    *("timm:test_vit.r160_in1k", f"timm:{TAGGED}", "timm:vit_tiny_r_s16_p8_224", "timm:vit_small_patch16_dinov3"),
    *("timm:vit_small_patch14_reg4_dinov2.lvd142m", "timm:beit_base_patch16_224", "timm:naflexvit_base_patch16_siglip"),
    *("torchvision:vit_b_32", "torchvision:vit_b_16.IMAGENET1K_SWAG_E2E_V1", "open_clip:ViT-S-32"),
    *("open_clip:ViT-B-16-SigLIP2-384.webli", "open_clip:PE-Core-T-16-384.meta"),
)
OTHERS = [
    name for name in (*list_models(), *list_models(pretrained=True))
    if name.partition(":")[0] in ("timm", "torchvision", "open_clip") and name not in NAMES
]  # fmt: skip


@pytest.mark.slow(quick=NAMES)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*NAMES, *few(OTHERS, 24)])
def test_a_model_by_name_is_what_its_package_builds(name: str) -> None:
    prefix = name.partition(":")[0]
    skip_other_releases(prefix)
    module = theirs(name)
    live, ours = FORMATS[prefix].describe_module(module, Hints()).config.to_dict(), config_named(name).to_dict()
    # A live tower does not show its initial LayerScale, and shows a rate that torch rounded.
    ours["layer_scale_init_value"] = ours["layer_scale_init_value"] and live["layer_scale_init_value"]
    live["drop_path_rate"] = round(live["drop_path_rate"], 6)
    assert ours == live
    if prefix == "timm":
        expected = processor_from_timm(resolve_model_data_config(module))
        assert plain_vit.create_image_processor(name).to_dict() == expected.to_dict()


@pytest.mark.parametrize("weights", ["vit_b_16.IMAGENET1K_V1", "vit_h_14.IMAGENET1K_SWAG_E2E_V1"])
def test_pixels_of_torchvisions_weights_are_those_of_their_transform(weights: str) -> None:
    builder, _, tag = weights.partition(".")
    transform = getattr(torchvision.models.get_model_weights(builder), tag).transforms()
    processor = plain_vit.create_image_processor(weights)
    assert processor.size["shortest_edge"] == transform.resize_size[0]
    assert processor.crop_size["height"] == transform.crop_size[0]


def test_pixels_of_open_clips_weights_are_those_of_its_record() -> None:
    cfg = open_clip.get_pretrained_cfg("ViT-B-16-SigLIP-256", "webli")
    processor = plain_vit.create_image_processor("open_clip:ViT-B-16-SigLIP-256.webli")
    assert (tuple(processor.image_mean), tuple(processor.image_std)) == (cfg["mean"], cfg["std"])
    assert dict(processor.size).items() >= {"height": 256, "width": 256}.items()
    assert not processor.do_center_crop


# Models


def test_a_model_without_weights_is_drawn_by_our_initialization_with_any_fields() -> None:
    model = plain_vit.create_model("timm:test_vit", num_labels=7, drop_path_rate=0.2, image_size=(32, 48))
    assert isinstance(model, PlainViTForImageClassification)
    assert model.training
    assert (model.config.num_labels, model.config.image_shape, model.config.drop_path_rate) == (7, (32, 48), 0.2)
    assert model(torch.zeros(1, 3, 32, 48)).logits.shape == (1, 7)
    assert isinstance(plain_vit.create_model("test_vit", num_labels=0), PlainViTModel)
    assert plain_vit.create_model("test_vit", num_attention_heads=4).config.head_dim == 16
    assert plain_vit.create_model("vit-tiny-patch16-32", num_hidden_layers=1).config.patch_size == 16
    assert PlainViTConfig.from_name("test_vit", num_labels=5).num_labels == 5
    with pytest.raises(ValueError, match="no field 'drop_path_rat': did you mean drop_path_rate"):
        plain_vit.create_model("test_vit", drop_path_rat=0.1)


def fields_of(config: PlainViTConfig) -> dict[str, Any]:
    """Return the fields of a config without what weights add: their names of classes, their dtype."""
    added = ("architectures", "dtype", "id2label", "label2id")
    return {name: value for name, value in config.to_dict().items() if name not in added}


def save_timm(module: Any, folder: Path) -> dict[str, bytes]:
    """Return the files of a model of timm as its own `push_to_hf_hub` uploads them."""
    timm.models.save_for_hf(module, folder, safe_serialization=True)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.slow
def test_weights_of_timm_come_from_its_repository(hub: HubEndpoint, tmp_path: Path) -> None:
    name = "test_vit.r160_in1k"
    module = randomize_(timm.create_model(name)).eval()
    hub.add_repository(f"timm/{name}", files=save_timm(module, tmp_path / "timm"))
    images = torch.randn(2, 3, 160, 160)
    model = plain_vit.create_model(f"timm:{name}", pretrained=True)
    assert not model.training
    assert difference(model(images).logits, module(images)) == 0
    assert fields_of(model.config) == fields_of(config_named(name))
    by_default = plain_vit.create_model("test_vit", pretrained=True, num_labels=3, drop_path_rate=0.1)
    assert by_default(images).logits.shape == (2, 3)
    assert torch.equal(by_default.vit(images).pooler_output, model.vit(images).pooler_output)
    larger = plain_vit.create_model("test_vit", pretrained=True, image_size=192)
    assert torch.equal(larger.classifier.weight, model.classifier.weight)
    resampled = torch.randn(1, 3, 192, 192)
    assert difference(larger(resampled).logits, model(resampled).logits) <= 1e-6
    with pytest.raises(ValueError, match="with hidden_size the weights have other shapes"):
        plain_vit.create_model("test_vit", pretrained=True, hidden_size=128)
    with pytest.raises(HubError, match="timm/vit_tiny_patch16_224.augreg_in21k is neither"):
        plain_vit.create_model(TAGGED, pretrained=True)


@pytest.mark.slow
def test_weights_of_open_clip_are_read_beside_those_of_timm(
    hub: HubEndpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vision_cfg = {"image_size": 48, "layers": 2, "width": 96, "head_width": 32, "patch_size": 16, "mlp_ratio": 3.0}
    model_cfg = {"embed_dim": 40, "quick_gelu": True, "vision_cfg": vision_cfg}
    tower = randomize_(_build_vision_tower(40, vision_cfg, quick_gelu=True)).eval()
    save_file({f"visual.{key}": value.contiguous() for key, value in tower.state_dict().items()}, tmp_path / "clip")
    files = {
        "open_clip_model.safetensors": (tmp_path / "clip").read_bytes(),
        "open_clip_config.json": json.dumps({"model_cfg": model_cfg, "preprocess_cfg": {}}).encode(),
    }
    files |= save_timm(timm.create_model("test_vit.r160_in1k"), tmp_path / "timm")
    hub.add_repository("timm/vit_base_patch32_clip_224.openai", files=files)
    name = "open_clip:ViT-B-32-quickgelu.openai"
    model = plain_vit.create_model(name, pretrained=True)
    images = torch.randn(2, 3, 48, 48)
    assert difference(model(images).pooler_output, tower(images)) <= 1e-6
    assert from_checkpoint(name).image_processor.to_dict()["size"] == {"shortest_edge": 48}
    assert from_checkpoint("timm/vit_base_patch32_clip_224.openai").report.format == "timm"


@pytest.mark.slow
def test_weights_of_torchvision_are_downloaded_once_and_checked(
    hub: HubEndpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from plain_vit.conversion.sources.torchvision import downloads, source

    sizes: dict[str, Any] = {"num_layers": 2, "num_heads": 4, "hidden_dim": 128, "mlp_dim": 80}
    monkeypatch.setitem(source.architectures(), "vit_b_32", (32, 128, 2, 4, 80))
    module = randomize_(torchvision.models.VisionTransformer(image_size=224, patch_size=32, **sizes)).eval()
    torch.save(module.state_dict(), tmp_path / "vit.pth")
    content = (tmp_path / "vit.pth").read_bytes()
    file = f"vit_b_32-{hashlib.sha256(content).hexdigest()[:8]}"
    monkeypatch.setitem(source.published_files(), file, (256, 224, "bilinear"))
    name = "torchvision:vit_b_32.IMAGENET1K_V1"
    monkeypatch.setitem(NAMED["torchvision"].models, name.partition(":")[2], {"file": file})
    hub.add_repository("models/vit", files={f"{file}.pth": content, "vit_b_32-00000000.pth": content})
    monkeypatch.setattr(downloads, "address", lambda: f"{hub.url}/models/vit/resolve/main")
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path / "torch"))
    for _ in range(2):
        model = plain_vit.create_model(name, pretrained=True)
    assert sum(path.endswith(f"{file}.pth") for _, path, status in hub.requests if status in (200, 302)) == 1
    images = torch.randn(2, 3, 224, 224)
    assert difference(model(images).logits, module(images)) <= 1e-6
    monkeypatch.setitem(NAMED["torchvision"].models, name.partition(":")[2], {"file": "vit_b_32-00000000"})
    with pytest.raises(HubError, match="invalid hash value"):
        plain_vit.create_model(name, pretrained=True)
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match=r"HF_HUB_OFFLINE forbids .*: save http\S+/vit_b_32-00000000.pth there"):
        plain_vit.create_model(name, pretrained=True)


@pytest.mark.slow
def test_a_repository_of_transformers_gives_its_config_without_its_weights(hub: HubEndpoint, tmp_path: Path) -> None:
    stock = transformers.ViTForImageClassification(
        transformers.ViTConfig(
            image_size=(32, 48), patch_size=8, hidden_size=24, num_hidden_layers=2, num_attention_heads=3,
            intermediate_size=40, num_labels=5, layer_norm_eps=1e-12,
        )
    )  # fmt: skip
    randomize_(stock.eval())
    stock.save_pretrained(tmp_path)
    transformers.ViTImageProcessor(size={"height": 32, "width": 48}).save_pretrained(tmp_path)
    hub.add_repository("alice/vit", files={path.name: path.read_bytes() for path in tmp_path.glob("*.*")})
    fresh = plain_vit.create_model("hf:alice/vit", num_labels=3)
    assert not any("safetensors" in path for _, path, _ in hub.requests)
    assert fresh.config.num_labels == 3
    ours = from_module(stock)
    assert config_named("alice/vit").to_dict() == ours.config.to_dict()
    assert plain_vit.create_image_processor("alice/vit").size["width"] == 48
    images = torch.randn(2, 3, 32, 48)
    model = plain_vit.create_model("hf:alice/vit", pretrained=True)
    assert difference(model(images).logits, ours(images).logits) == 0
    model.save_pretrained(tmp_path / "ours")
    hub.add_repository("alice/ours", files={path.name: path.read_bytes() for path in (tmp_path / "ours").iterdir()})
    assert plain_vit.create_model("hf:alice/ours").config.hidden_size == 24
    hub.add_repository("alice/bert", files={"config.json": b'{"model_type": "bert"}'})
    hub.add_repository("alice/nothing", files={"README.md": b"nothing"})
    with pytest.raises(UnknownFormatError, match="bert"):
        plain_vit.create_model("alice/bert")
    whole = transformers.LlavaConfig(vision_config=transformers.CLIPVisionConfig(hidden_size=96), architectures=["x"])
    hub.add_repository("alice/llava", files={"config.json": whole.to_json_string().encode()})
    assert config_named("alice/llava").hidden_size == 96  # of the only encoder in it, as from_checkpoint opens
    hub.add_repository("alice/wrong", files={"config.json": b'{"architecture": "test_vit", "num_classes": "x"}'})
    with pytest.raises(CheckpointError, match="alice/wrong: its settings and the hints describe no model"):
        plain_vit.create_model("alice/wrong")
    with pytest.raises(UnknownFormatError, match="alice/nothing has no config.json that describes a model"):
        plain_vit.create_model("alice/nothing")


# The page


def test_the_page_lists_every_name() -> None:
    page = tabulate_models.PAGE.read_text(encoding="utf-8")
    missing = [name for prefix in PREFIXES for name in tabulate_models.listed(prefix) if f"`{name}`" not in page]
    assert missing == [], "run `python -m tools.tabulate_models`"


ROWS = [name for prefix in PREFIXES if prefix != HUB for name in tabulate_models.listed(prefix)]


@pytest.mark.slow
@pytest.mark.parametrize("name", few(ROWS, 12))
def test_a_row_of_the_page_is_what_the_model_is(name: str) -> None:
    page = tabulate_models.PAGE.read_text(encoding="utf-8")
    assert f"\n{tabulate_models.row(name)}\n" in page, "run `python -m tools.tabulate_models`"
    config = config_named(name)
    with torch.device("meta"):
        model = PlainViTForImageClassification(config)
    assert tabulate_models.size_of(config).parameters == sum(one.numel() for one in model.parameters())

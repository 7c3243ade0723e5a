"""Live modules: modifications and wrappers are converted, or the error names them; nothing is dropped silently."""

import copy
import functools
from collections.abc import Callable
from typing import Any, cast

import pytest
import timm
import torch
import transformers
import vit_pytorch
from timm.models.deit import VisionTransformerDistilled
from timm.utils import ModelEmaV3
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm
from vit_pytorch.mae import MAE

from plain_vit.conversion import from_module, to_module
from plain_vit.errors import CheckpointError, ExportError, PlainViTError, UnknownFormatError
from tests.conftest import randomize_
from tests.sources import test_torchvision as torchvision_tests
from tests.sources.test_torchvision import output
from tests.sources.timm_models import pixels_for, tiny_timm
from tests.sources.transformers_models import tiny_transformers
from tests.tiny import difference

TOLERANCE = 1e-5


def simple(**arguments: Any) -> Any:
    """Return vit-pytorch's SimpleViT, which needs no hints."""
    sizes = {"image_size": (15, 28), "patch_size": (5, 7), "num_classes": 11, "dim": 20, "depth": 3, "heads": 3}
    return randomize_(vit_pytorch.SimpleViT(**{**sizes, "mlp_dim": 29, "dim_head": 13, **arguments})).eval()


def plain() -> Any:
    """Return a plain ViT of timm."""
    return tiny_timm("vit_tiny_patch16_224")


def same(one: nn.Module, other: nn.Module) -> bool:
    """Tell whether two models of ours have the same tensors."""
    return all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in one.state_dict().items())


# Distilled models


def distilled(**arguments: Any) -> Any:
    sizes = {"img_size": (32, 48), "patch_size": 16, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}
    return randomize_(VisionTransformerDistilled(**{**sizes, **arguments})).eval()


def test_a_norm_that_the_distilled_head_never_applies_is_refused() -> None:
    module = distilled(fc_norm=True)
    with pytest.raises(ExportError, match="fc_norm"):
        from_module(module)
    pixel_values = torch.randn(2, 3, 32, 48)
    before = output(module, pixel_values)
    module.fc_norm = nn.Identity()  # as the message says
    assert torch.equal(output(module, pixel_values), before)
    assert difference(output(from_module(module), pixel_values), before) == 0.0


def test_another_pooling_than_the_two_tokens_is_refused() -> None:
    module = distilled()
    module.global_pool = "avg"  # its heads still read both tokens
    with pytest.raises(ExportError, match="global_pool"):
        from_module(module)


@pytest.mark.parametrize("arguments", [
    {"final_norm": False}, {"num_classes": 0}, {"pre_norm": True, "init_values": 0.1}, {"dynamic_img_size": True},
    {"qkv_bias": False, "pool_include_prefix": True},
], ids=str)  # fmt: skip
def test_distilled_models_are_timms(arguments: dict[str, Any]) -> None:
    module, pixel_values = distilled(**arguments), torch.randn(2, 3, 32, 48)
    module.set_distilled_training()
    assert difference(output(from_module(module), pixel_values), output(module, pixel_values)) == 0.0


# Activations and norms


TANH = functools.partial(nn.GELU, approximate="tanh")


def test_the_approximate_gelu_of_torch_is_read() -> None:
    module = tiny_timm("vit_so400m_patch14_siglip_384", act_layer=TANH)
    model = from_module(module)
    assert model.config.hidden_act == "gelu_pytorch_tanh"
    assert difference(output(model, pixels_for(module)), output(module, pixels_for(module))) == 0.0


@pytest.mark.parametrize("place", ["blocks.1.mlp.act", "attn_pool.mlp.act"])
def test_one_exchanged_gelu_of_timm_is_named(place: str) -> None:
    module = tiny_timm("vit_tiny_patch16_224", global_pool="map")
    module.set_submodule(place, nn.GELU(approximate="tanh"))
    with pytest.raises(ExportError, match=place):
        from_module(module)


def test_an_exchanged_gelu_of_torchvision_is_named() -> None:
    module = torchvision_tests.tiny()
    for block in module.encoder.layers:
        block.mlp[1] = nn.GELU(approximate="tanh")
    with pytest.raises(ExportError, match=r"encoder_layer_0.mlp.1.class is .*GELU\(tanh\)"):
        from_module(module)


@pytest.mark.parametrize("norm", [nn.RMSNorm(56), nn.Identity(), nn.RMSNorm(56, eps=1e-6)])
def test_an_exchanged_first_norm_is_named(norm: nn.Module) -> None:
    module = torchvision_tests.tiny()
    module.encoder.layers[0].ln_1 = norm
    with pytest.raises(PlainViTError, match=type(norm).__name__ if isinstance(norm, nn.RMSNorm) else "layer_norm_eps"):
        from_module(module)


def test_a_function_inside_an_activation_is_compared() -> None:
    module = tiny_transformers("ViTForImageClassification")
    part = module.get_submodule("vit.layers.1.mlp.activation_fn")
    part.act = functools.partial(nn.functional.gelu, approximate="tanh")
    with pytest.raises(ExportError, match=r"vit.layers.1.mlp.activation_fn.act is torch\.?.*gelu with .*tanh"):
        from_module(module)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_epsilon_that_torch_chooses_for_a_root_mean_square_is_read(dtype: torch.dtype) -> None:
    module = tiny_timm("vit_tiny_patch16_224", norm_layer=nn.RMSNorm).to(dtype)
    assert module.norm.eps is None
    with torch.no_grad():
        for block in module.blocks:
            block.attn.proj.weight.mul_(1e-4)
            block.mlp.fc2.weight.mul_(1e-4)
        for tensor in (module.pos_embed, module.cls_token, *module.patch_embed.proj.parameters()):
            tensor.mul_(1e-3)  # tokens so small that the epsilon has an effect
    pixel_values = pixels_for(module).to(dtype)
    model = from_module(module)
    assert difference(output(model, pixel_values), output(module, pixel_values)) == 0.0
    again = to_module(model, "timm")
    assert difference(output(again, pixel_values), output(module, pixel_values)) == 0.0


# Wrappers


class Backbone(nn.Module):
    """A custom classifier on the features of another model."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = tiny_timm("vit_tiny_patch16_224", num_classes=0)
        self.head = nn.Linear(56, 5)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(pixel_values))


class Doubled(nn.Module):
    """A wrapper with its own forward pass but no parts of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = simple()

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return 2 * self.vit(pixel_values)


class Scaled(nn.Module):
    """A wrapper with a parameter of its own, outside any submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = simple()
        self.temperature = nn.Parameter(torch.ones(1))


def segmenter() -> nn.Module:
    sizes = {"hidden_size": 40, "num_hidden_layers": 4, "num_attention_heads": 5, "intermediate_size": 52}
    config = transformers.BeitConfig(**sizes, image_size=56, patch_size=14, out_indices=[1, 2, 3, 4])
    return transformers.BeitForSemanticSegmentation(config)


@pytest.mark.parametrize(
    ("make", "named", "key"),
    [
        (lambda: nn.Sequential(tiny_timm("vit_tiny_patch16_224", num_classes=0), nn.Linear(56, 5)),
         "contains 1, a torch.nn.modules.linear.Linear", "0"),
        (lambda: nn.Sequential(simple(), nn.Softmax(dim=-1)), "contains 1, a torch.nn.modules.activation.Softmax", "0"),
        (Backbone, "contains head", "backbone"),
        (Doubled, "its own forward, tests.sources.test_from_module.Doubled.forward", "vit"),
        (Scaled, r"contains temperature \(1,\)", "vit"),
        (lambda: nn.ModuleDict({"backbone": simple(), "head": nn.Linear(3, 4)}), "contains head", "backbone"),
        (lambda: nn.Sequential(nn.BatchNorm2d(3, affine=False), simple()), "contains 0, .*BatchNorm2d", "1"),
        (segmenter, "BeitForSemanticSegmentation", "beit"),
        (lambda: nn.DataParallel(Backbone()), "module contains head", "module.backbone"),
    ],
)  # fmt: skip
def test_what_computes_around_a_model_is_refused_and_the_model_itself_opens(
    make: Callable[[], nn.Module], named: str, key: str
) -> None:
    module = make()
    with pytest.raises(ExportError, match=named) as caught:
        from_module(module)
    assert f"key={key!r}" in str(caught.value)
    inside = module.get_submodule(key)
    assert same(from_module(module, key=key), from_module(inside))


class LightningModule(nn.Module):
    """Replacement for Lightning's class; only its name and package matter."""


LightningModule.__module__ = "lightning.pytorch.core.module"


class Training(LightningModule):
    """A module as in a training script."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.criterion = nn.CrossEntropyLoss(weight=torch.ones(11))

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.model(pixel_values)


@pytest.mark.parametrize(
    "wrap",
    [
        nn.DataParallel,
        torch.compile,
        torch.optim.swa_utils.AveragedModel,
        ModelEmaV3,
        Training,
        nn.Sequential,
        lambda model: nn.ModuleDict({"vit": model}),
        lambda model: MAE(encoder=model, decoder_dim=17),
        lambda model: nn.DataParallel(cast(nn.Module, torch.compile(Training(model)))),
    ],
)
def test_known_wrappers_are_unwrapped(wrap: Callable[[nn.Module], nn.Module]) -> None:
    module = simple()
    assert same(from_module(wrap(module)), from_module(module))


def test_a_wrapped_head_next_to_a_known_wrapper_is_not_dropped() -> None:
    training = Training(simple())
    training.head = nn.Linear(11, 3)
    with pytest.raises(ExportError, match="contains head"):
        from_module(training)


def test_parts_in_another_mode_that_does_not_matter_pass() -> None:
    module = plain()
    module.head.train()
    module.blocks[0].train()
    assert not from_module(module).training


def test_class_names_of_a_wrapper_of_transformers_are_kept() -> None:
    names = {0: "ant", 1: "bee", 2: "cat"}
    config = transformers.TimmWrapperConfig(architecture="test_vit", num_labels=3, id2label=names)
    wrapper = transformers.TimmWrapperForImageClassification(config)
    assert from_module(wrapper).config.id2label == names
    assert from_module(wrapper.timm_model).config.id2label[0] == "LABEL_0"


def test_models_of_timm_inside_transformers_give_the_same_logits() -> None:
    sizes = {"img_size": 32, "embed_dim": 56, "depth": 2, "num_heads": 7}
    config = transformers.TimmWrapperConfig(architecture="vit_tiny_patch16_224", num_labels=11, model_args=sizes)
    pixel_values = torch.randn(2, 3, 32, 32)
    classifier = randomize_(transformers.TimmWrapperForImageClassification(config)).eval()
    logits = classifier(pixel_values).logits
    assert difference(output(from_module(classifier), pixel_values), logits) == 0.0
    encoder = randomize_(transformers.TimmWrapperModel(config)).eval()
    pooled = encoder(pixel_values).pooler_output
    assert difference(output(from_module(encoder), pixel_values), pooled) == 0.0


# Modified models


def _forward_hook(module: Any) -> None:
    module.blocks[1].register_forward_hook(lambda part, args, result: result * 2)


def _pre_hook(module: Any) -> None:
    module.register_forward_pre_hook(lambda part, args: (args[0] + 1,))


def _patched(module: Any) -> None:
    forward = module.blocks[0].mlp.forward
    module.blocks[0].mlp.forward = lambda x: 2 * forward(x)


def _patched_head(module: Any) -> None:
    module.forward_head = lambda x, pre_logits=False: x[:, 0]


def _accelerated(module: Any) -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module

    add_hook_to_module(module.blocks[0], ModelHook())


def _mixed_precision(module: Any) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # shared by the whole process, and set by earlier tests
    Accelerator(mixed_precision="bf16", cpu=True).prepare_model(module)
    AcceleratorState._reset_state(reset_partial_state=True)


def _pruned(module: Any) -> None:
    prune.l1_unstructured(module.blocks[0].attn.proj, "weight", amount=0.3)


def _weight_normed(module: Any) -> None:
    weight_norm(module.blocks[0].attn.proj)


def _spectral_normed(module: Any) -> None:
    spectral_norm(module.head)


def _parametrized(module: Any) -> None:
    parametrizations.orthogonal(module.blocks[0].attn.proj)


def _quantized(module: Any) -> None:
    module.blocks[0].mlp.fc1 = torch.ao.nn.quantized.dynamic.Linear(56, 224)


def _lora(module: Any) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    inject_adapter_in_model(LoraConfig(target_modules=["qkv"]), module)


class Packed(torch.Tensor):
    """Replacement for the tensor classes of quantised and sharded weights."""


def _packed(module: Any) -> None:
    module.head.weight = nn.Parameter(module.head.weight.detach().as_subclass(Packed))


def _shared(module: Any) -> None:
    module.blocks[1].mlp.fc1 = module.blocks[0].mlp.fc1


def _hidden(module: Any) -> None:
    vars(module.head)["weight"] = 2 * module.head.weight.detach()


def _other_mode(module: Any) -> None:
    module.blocks[1].attn.train()
    module.blocks[1].attn.attn_drop.p = 0.1


def _tied(module: Any) -> None:
    module.blocks[1].norm1.weight = module.blocks[0].norm1.weight


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_forward_hook, "blocks.1 has a forward hook"),
        (_pre_hook, "the model itself has a forward pre-hook"),
        (_patched, "blocks.0.mlp has a forward that replaces"),
        (_patched_head, "the model itself has a forward_head that replaces"),
        (_accelerated, "unwrap_model"),
        (_mixed_precision, "unwrap_model"),
        (_pruned, "torch.nn.utils.prune.remove"),
        (_weight_normed, "torch.nn.utils.remove_weight_norm"),
        (_spectral_normed, "head has .*SpectralNorm"),
        (_parametrized, "blocks.0.attn.proj has a parametrization of its weight"),
        (_quantized, "blocks.0.mlp.fc1 is a torch.ao.nn.quantized"),
        (_lora, "merge_and_unload"),
        (_packed, "head.weight is a tests.sources.test_from_module.Packed"),
        (_shared, "blocks.0.mlp.fc1.weight and blocks.1.mlp.fc1.weight are one parameter"),
        (_hidden, "head has an attribute that hides its weight"),
        (_other_mode, "blocks.1.attn is in training mode"),
        (_tied, "blocks.0.norm1.weight and blocks.1.norm1.weight are one parameter"),
    ],
)  # fmt: skip
def test_attachments_of_a_model_are_refused_by_name(change: Callable[[Any], None], named: str) -> None:
    module = plain()
    change(module)
    with pytest.raises(ExportError, match=named):
        from_module(module)


def test_hooks_that_change_no_number_pass() -> None:
    module = plain()
    module.register_full_backward_hook(lambda part, got, gave: None)
    module.head.weight.register_hook(lambda gradient: gradient)
    from_module(module)
    capturing = tiny_transformers("Dinov2Model")
    capturing(torch.zeros(1, 3, 56, 56), output_hidden_states=True)  # leaves hooks that record outputs
    from_module(capturing)


def test_a_model_compiled_in_place_opens() -> None:
    module = simple()
    module.compile()
    assert same(from_module(module), from_module(simple()))


# Tensors


@pytest.mark.parametrize("frozen", ["blocks", "head", "pos_embed"])
def test_frozen_parameters_stay_frozen_there_and_back(frozen: str) -> None:
    module = plain()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    again = to_module(from_module(module), "timm")
    assert {name: one.requires_grad for name, one in again.named_parameters()} == {
        name: one.requires_grad for name, one in module.named_parameters()
    }


def test_a_model_without_a_classifier_stays_frozen() -> None:
    module = tiny_timm("vit_tiny_patch16_224", num_classes=0).requires_grad_(False)
    model = from_module(module)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not any(parameter.requires_grad for parameter in to_module(model, "timm").parameters())


def test_a_part_of_a_parameter_cannot_be_frozen() -> None:
    model = from_module(plain())
    model.vit.layers[0].attention.q_proj.weight.requires_grad_(False)
    with pytest.raises(ExportError, match=r"blocks.0.attn.qkv.weight combines .*q_proj"):
        to_module(model, "timm")


@pytest.mark.parametrize("make", [plain, simple, torchvision_tests.tiny, lambda: tiny_transformers("ViTModel")])
def test_several_dtypes_become_the_one_that_holds_them_exactly_and_a_warning_says_so(make: Any) -> None:
    module = make()
    for part in module.modules():
        if isinstance(part, nn.Linear):
            part.half()
    with pytest.warns(UserWarning, match=r"the tensors are of float16 \(\d+\) and float32 .*: the model is in float32"):
        model = from_module(module)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert same(model, from_module(module.float()))


def test_tensors_of_unknown_dtypes_and_of_several_devices_are_refused() -> None:
    module = plain()
    module.blocks[1].to("meta")
    with pytest.raises(CheckpointError, match=r"several devices .*meta as blocks.1"):
        from_module(module)
    with pytest.raises(CheckpointError, match="float8"):
        from_module(plain().to(torch.float8_e4m3fn))


@pytest.mark.parametrize("make", [plain, simple, torchvision_tests.tiny, lambda: tiny_transformers("CLIPModel")])
def test_a_model_on_the_meta_device_opens(make: Callable[[], nn.Module]) -> None:
    model = from_module(make().to("meta"))
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


# Objects that are not models, and models of other packages


@pytest.mark.parametrize(
    ("thing", "says"),
    [
        ("vit.pt", "from_checkpoint"),
        ({"head.weight": torch.ones(2, 3)}, "from_checkpoint"),
        (vit_pytorch.ViT, "pass an instance of it"),
        (None, "NoneType is not a torch.nn.Module"),
        (nn.Linear(2, 3), "give format="),
        (nn.Sequential(), "give format="),
    ],
)
def test_non_models_raise_an_error_of_ours(thing: Any, says: str) -> None:
    with pytest.raises(UnknownFormatError, match=says):
        from_module(thing)


MODELS: dict[str, Callable[[], Any]] = {
    "timm": plain,
    "vit_pytorch": simple,
    "torchvision": torchvision_tests.tiny,
    "transformers": lambda: tiny_transformers("ViTForImageClassification"),
}


@pytest.mark.parametrize("format", [*MODELS, "google"])
@pytest.mark.parametrize("name", MODELS)
def test_a_format_of_another_kind_is_named(name: str, format: str) -> None:
    module = MODELS[name]()
    if name == format:
        from_module(module, format=format)
        return
    with pytest.raises(UnknownFormatError, match=f"a model of {name}, and format='{format}' was given"):
        from_module(module, format=format)


@pytest.mark.parametrize("format", [*MODELS, "google"])
@pytest.mark.parametrize("thing", [nn.Linear(2, 3), nn.Sequential(nn.Linear(2, 3)), nn.TransformerEncoderLayer(8, 2)])
def test_what_is_no_copy_of_a_class_gets_an_error_of_ours(thing: nn.Module, format: str) -> None:
    with pytest.raises(PlainViTError):
        from_module(thing, format=format)


def test_hints_that_there_are_not_are_listed() -> None:
    with pytest.raises(TypeError, match=r"no hint 'foo': it has num_attention_heads, .*layout"):
        from_module(plain(), foo=1)
    with pytest.raises(ValueError, match="expected one of timm"):
        from_module(plain(), format="foo")


def test_models_without_blocks_are_refused() -> None:
    module = plain()
    module.blocks = nn.Sequential()
    with pytest.raises(ExportError, match="no blocks"):
        from_module(module)
    for module in (simple(depth=0), torchvision_tests.tiny(num_layers=0)):
        with pytest.raises(PlainViTError):
            from_module(module)


# Copies and derived classes


class Tuned(vit_pytorch.SimpleViT):
    """A forward pass of its own."""

    def forward(self, img: torch.Tensor) -> torch.Tensor:
        return super().forward(img) * 2


def test_a_derived_class_with_a_forward_of_its_own_is_refused() -> None:
    module = simple()
    module.__class__ = Tuned
    with pytest.raises(ExportError, match="Tuned.forward"):
        from_module(module)


def test_a_copied_class_is_compared_with_the_original() -> None:
    copied = type("SimpleViT", (nn.Module,), dict(vars(vit_pytorch.SimpleViT)) | {"__module__": "my_models"})
    module: Any = nn.Module.__new__(copied)
    module.__dict__.update(simple().__dict__)
    assert same(from_module(module, format="vit_pytorch"), from_module(simple()))
    module.transformer = copy.deepcopy(module.transformer)
    module.transformer.norm.eps = 1e-6
    with pytest.raises(ExportError, match="transformer.norm.eps is 1e-06"):
        from_module(module, format="vit_pytorch")


def test_other_positions_than_sines_and_cosines_are_refused() -> None:
    module = simple()
    module.pos_embedding = module.pos_embedding * 2
    with pytest.raises(ExportError, match="pos_embedding"):
        from_module(module)


def test_positions_in_another_order_are_refused() -> None:
    module = tiny_transformers("CLIPVisionModel")
    module.embeddings.position_ids = module.embeddings.position_ids.flip(1)
    with pytest.raises(ExportError, match="position_ids"):
        from_module(module)


def test_an_entrypoint_of_another_family_is_refused_by_name() -> None:
    module = timm.create_model("swin_tiny_patch4_window7_224", embed_dim=24, depths=(1, 1), num_heads=(1, 2))
    with pytest.raises(ExportError, match="timm.models.swin_transformer.SwinTransformer .*does not open yet.*timm"):
        from_module(module)

"""Models under the names of known packages with an extra computation that no tensor shows.

Each draw takes a model of a package, adds a secret computation, and saves its tensors. Opened with true answers, the
file must give the same tokens, be refused, ask a question without a true answer, or report the setting as unproven.
"""

import json
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import transformers
import vit_pytorch
from open_clip.transformer import VisionTransformer as OpenClipTower
from torch import nn
from torch.nn import functional as F
from torchvision.models import VisionTransformer as TorchvisionTransformer

from plain_vit.conversion import from_checkpoint
from plain_vit.conversion.tables.format import NO_TENSOR, UNSEEN
from plain_vit.errors import PlainViTError
from tests.conftest import randomize_
from tests.sizes import draws
from tests.sources.truthful import open_truthfully
from tests.tiny import difference

TOLERANCE = 1e-5
Pair = tuple[torch.Tensor, torch.Tensor | None]


def unchanged(x: torch.Tensor, *others: object) -> torch.Tensor:
    return x


@dataclass(frozen=True)
class Secret:
    """An extra computation beside the plain model's; all functions take tokens or scores first, then the grid."""

    setting: str = ""
    pixels: Callable[..., torch.Tensor] = unchanged
    tokens: Callable[..., torch.Tensor] = unchanged
    heads: Callable[..., torch.Tensor] = unchanged  # queries and keys, (B, heads, L, d)
    scores: Callable[..., torch.Tensor] = unchanged
    branch: Callable[..., torch.Tensor] = unchanged
    between: Callable[..., torch.Tensor] = unchanged
    act: Callable[[torch.Tensor], torch.Tensor] | None = None
    eps: float | None = None
    stride: int = 0  # in pixels, for overlapping patches; 0 for the patch size


def places(x: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    """Return row and column of each token, (L, 2); tokens before the patches are at 0."""
    rows, columns = grid
    of_patches = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).float()
    return torch.cat((torch.zeros(x.shape[-2] - len(of_patches), 2), of_patches))


def sines(x: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    rates = 1 / 100 ** torch.linspace(0, 1, x.shape[-1] // 4)
    angles = (places(x, grid)[:, :, None] * rates).flatten(1)
    return F.pad(torch.cat((angles.sin(), angles.cos()), 1), (0, x.shape[-1] - 4 * len(rates)))


def rotated(x: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    half = x.shape[-1] // 2
    angles = places(x, grid).sum(1)[:, None] / 10 ** torch.linspace(0, 1, half)
    first, second = x[..., :half], x[..., half : 2 * half]
    turned = (first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos())
    return torch.cat((*turned, x[..., 2 * half :]), -1)


def distance(x: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    return torch.cdist(places(x, grid), places(x, grid))


def within(scores: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    return scores.masked_fill(distance(scores, grid) > 1.5, -torch.inf)


def causal(scores: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    return scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)


def merged(x: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    return torch.cat((x[:, :-2], x[:, -2:].mean(1, keepdim=True).expand(-1, 2, -1)), 1)


SECRETS = [
    Secret("rope_type", heads=rotated),
    Secret("computed_positions", tokens=lambda x, grid: x + sines(x, grid)),
    Secret("overlapping_patches", stride=2),
    Secret("attention_mask", scores=within),
    Secret("attention_mask", scores=causal),
    Secret("attention_bias", scores=lambda scores, grid: scores - distance(scores, grid)),
    Secret("attention_cap", scores=lambda scores, grid: torch.tanh(scores)),
    Secret("scaling", tokens=lambda x, grid: x * x.shape[-1] ** 0.5),
    Secret("scaling", branch=lambda x: x * 0.5),
    Secret("scaling", pixels=lambda x: (x - 0.4) / 0.2),
    Secret("token_mixing", between=lambda x, grid: torch.cat((x[:, :1], x[:, 1:].roll(1, 1)), 1)),
    Secret("token_mixing", between=merged),
    Secret("norms_without_weights", heads=lambda x, grid: F.normalize(x, dim=-1) * 3),
    Secret("norms_without_weights", between=lambda x, grid: F.layer_norm(x, x.shape[-1:])),
    Secret("attention_scale", scores=lambda scores, grid: scores * 3),
    Secret("hidden_act", act=F.relu),
    Secret("layer_norm_eps", eps=0.1),
]


@dataclass
class Plain:
    """The parts of a plain ViT under the same names for every package; pairs are weight and bias."""

    embed: Callable[[torch.Tensor, int], torch.Tensor]  # pixels and stride -> (B, D, rows, columns)
    layers: list[dict[str, Any]]
    heads: int
    eps: float
    norm: Pair | None
    cls: torch.Tensor | None = None
    positions: torch.Tensor | None = None  # (L, D)
    before: Pair | None = None  # a norm before the layers
    act: Callable[[torch.Tensor], torch.Tensor] = F.gelu

    def __call__(self, pixels: torch.Tensor, secret: Secret, stride: int) -> torch.Tensor:
        """Return the tokens after the last norm, (B, L, D)."""
        eps, act = secret.eps or self.eps, secret.act or self.act

        def norm(x: torch.Tensor, pair: Pair | None) -> torch.Tensor:
            return x if pair is None else F.layer_norm(x, x.shape[-1:], *pair, eps=eps)

        cut = self.embed(secret.pixels(pixels), stride)
        grid, x = cut.shape[2:], cut.flatten(2).mT
        if self.cls is not None:
            x = torch.cat((self.cls.reshape(1, 1, -1).expand(len(x), -1, -1), x), 1)
        x = norm(secret.tokens(x if self.positions is None else x + self.positions, grid), self.before)
        for layer in self.layers:
            qkv = F.linear(norm(x, layer["norm1"]), *layer["qkv"]).unflatten(-1, (3, self.heads, -1))
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            scores = secret.heads(q, grid) @ secret.heads(k, grid).mT * q.shape[-1] ** -0.5
            mixed = (secret.scores(scores, grid).softmax(-1) @ v).transpose(1, 2).flatten(2)
            x = x + secret.branch(F.linear(mixed, *layer["out"]) * layer.get("scale1", 1))
            hidden = act(F.linear(norm(x, layer["norm2"]), *layer["fc1"]))
            x = x + secret.branch(F.linear(hidden, *layer["fc2"]) * layer.get("scale2", 1))
            x = secret.between(x, grid)
        return norm(x, self.norm)


@dataclass
class Case:
    """A model of a package: its parts, how its file is written, and the true answers."""

    plain: Plain
    module: nn.Module
    tokens: Callable[[torch.Tensor], torch.Tensor]  # computed by the package
    save: Callable[[Path], Path]
    truth: dict[str, object]
    patch: int
    grid: tuple[int, int]
    given: dict[str, object] = field(default_factory=dict)
    logits: Callable[[torch.Tensor], torch.Tensor] = unchanged  # from tokens


def convolution(weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[[torch.Tensor, int], torch.Tensor]:
    return lambda pixels, stride: F.conv2d(pixels, weight, bias, stride=stride)


def pairs(state: Mapping[str, torch.Tensor], names: Mapping[str, str], number: int) -> dict[str, Any]:
    """Return the weights and biases of one layer."""
    found = {ours: name.format(number) for ours, name in names.items()}
    return {ours: (state[f"{name}.weight"], state.get(f"{name}.bias")) for ours, name in found.items()}


def saved(state: Mapping[str, torch.Tensor]) -> Callable[[Path], Path]:
    def write(path: Path) -> Path:
        torch.save(dict(state), path / "x.pth")
        return path / "x.pth"

    return write


TRUTH: dict[str, object] = {"attention_scale": "head_dim**-0.5", "pool_prefix_tokens": False, "pooling": "cls",
                            "block_type": "sequential", "num_channels": 3, "key": None}  # fmt: skip


def timm_case(draw: random.Random) -> Case:
    heads, patch, grid = draw.choice([2, 3]), draw.choice([4, 6]), draw.choice([(3, 3), (2, 4), (4, 4)])
    prefix, table, gain = draw.random() < 0.7, draw.random() < 0.7, draw.random() < 0.4
    module = timm.models.VisionTransformer(
        img_size=(grid[0] * patch, grid[1] * patch), patch_size=patch, embed_dim=12 * heads, depth=2, num_heads=heads,
        mlp_ratio=2, num_classes=0, class_token=prefix, global_pool="token" if prefix else "avg",
        pos_embed="learn" if table else "none", init_values=0.3 if gain else None,
    )  # fmt: skip
    state = randomize_(module, draw.randrange(999)).state_dict()
    names = {name: f"blocks.{{}}.{path}" for name, path in
             {"norm1": "norm1", "qkv": "attn.qkv", "out": "attn.proj", "norm2": "norm2", "fc1": "mlp.fc1",
              "fc2": "mlp.fc2"}.items()}  # fmt: skip
    layers = [pairs(state, names, number) for number in range(2)]
    for number, layer in enumerate(layers):
        if gain:
            layer |= {f"scale{i}": state[f"blocks.{number}.ls{i}.gamma"] for i in (1, 2)}
    last = "norm" if prefix else "fc_norm"
    plain = Plain(
        convolution(state["patch_embed.proj.weight"], state["patch_embed.proj.bias"]), layers, heads, 1e-6,
        (state["norm.weight"], state["norm.bias"]) if prefix else None, state.get("cls_token"),
        state["pos_embed"][0] if table else None,
    )  # fmt: skip
    renamed = state
    if gain and draw.random() < 0.5:  # DeiT III's own names
        renamed = {name.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2"): state[name] for name in state}
    truth = {
        **TRUTH,
        "num_attention_heads": heads,
        "layer_norm_eps": 1e-6,
        "hidden_act": "gelu",
        "pooling": "cls" if prefix else "mean",
        "position_embedding_type": "none",
        "rope_type": "none",
    }

    def tokens(pixels: torch.Tensor) -> torch.Tensor:
        return module.forward_features(pixels)

    def pooled(x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(1)
        return (
            x[:, 0] if prefix else F.layer_norm(mean, mean.shape[-1:], *pairs(state, {"norm": last}, 0)["norm"], 1e-6)
        )

    return Case(plain, module, tokens, saved(renamed), truth, patch, grid, logits=pooled)


def vit_pytorch_case(draw: random.Random) -> Case:
    heads, patch, grid = draw.choice([2, 3]), 4, draw.choice([(3, 3), (2, 4), (4, 4)])
    module = vit_pytorch.ViT(
        image_size=(grid[0] * patch, grid[1] * patch), patch_size=patch, num_classes=5, dim=32, depth=2, heads=heads,
        mlp_dim=40, dim_head=12,
    )  # fmt: skip
    state = randomize_(module, draw.randrange(999)).state_dict()
    names = {name: f"transformer.layers.{{}}.{path}" for name, path in
             {"norm1": "0.norm", "qkv": "0.to_qkv", "out": "0.to_out.0", "norm2": "1.net.0", "fc1": "1.net.1",
              "fc2": "1.net.4"}.items()}  # fmt: skip
    stages = pairs(state, {name: f"to_patch_embedding.{name}" for name in "123"}, 0)

    def embed(pixels: torch.Tensor, stride: int) -> torch.Tensor:
        side = [(pixels.shape[axis] - patch) // stride + 1 for axis in (2, 3)]
        columns = F.unfold(pixels, patch, stride=stride).mT.unflatten(-1, (3, patch * patch)).mT.flatten(2)
        x = F.layer_norm(columns, columns.shape[-1:], *stages["1"])
        x = F.linear(x, *stages["2"])
        return F.layer_norm(x, x.shape[-1:], *stages["3"]).mT.unflatten(-1, side)

    plain = Plain(
        embed, [pairs(state, names, number) for number in range(2)], heads, 1e-5,
        (state["transformer.norm.weight"], state["transformer.norm.bias"]), state["cls_token"], state["pos_embedding"],
    )  # fmt: skip
    truth = {**TRUTH, "num_attention_heads": heads, "patch_size": (patch, patch), "layer_norm_eps": 1e-5,
             "hidden_act": "gelu"}  # fmt: skip

    def tokens(pixels: torch.Tensor) -> torch.Tensor:
        found: dict[str, torch.Tensor] = {}
        handle = module.transformer.register_forward_hook(lambda part, inputs, output: found.update(x=output))
        module(pixels)
        handle.remove()
        return found["x"]

    given = {"layout": "vit 1.16.1"} if draw.random() < 0.2 else {}
    return Case(plain, module, tokens, saved(state), truth, patch, grid, given, lambda x: module.mlp_head(x[:, 0]))


def transformers_case(draw: random.Random) -> Case:
    heads, patch, side = draw.choice([2, 3]), 4, draw.choice([3, 4])
    config = transformers.ViTConfig(
        hidden_size=12 * heads, num_hidden_layers=2, num_attention_heads=heads, intermediate_size=40, patch_size=patch,
        image_size=side * patch, layer_norm_eps=1e-6,
    )  # fmt: skip
    module = transformers.ViTModel(config, add_pooling_layer=False)
    state = randomize_(module, draw.randrange(999)).state_dict()
    names = {
        name: f"layers.{{}}.{path}"
        for name, path in {
            "norm1": "layernorm_before",
            "q": "attention.q_proj",
            "k": "attention.k_proj",
            "v": "attention.v_proj",
            "out": "attention.o_proj",
            "norm2": "layernorm_after",
            "fc1": "mlp.fc1",
            "fc2": "mlp.fc2",
        }.items()
    }
    layers = [pairs(state, names, number) for number in range(2)]
    for layer in layers:
        layer["qkv"] = tuple(torch.cat(parts) for parts in zip(*(layer[name] for name in "qkv"), strict=True))
    projection = "embeddings.patch_embeddings.projection"
    plain = Plain(
        convolution(state[f"{projection}.weight"], state[f"{projection}.bias"]), layers, heads, 1e-6,
        (state["layernorm.weight"], state["layernorm.bias"]), state["embeddings.cls_token"],
        state["embeddings.position_embeddings"][0],
    )  # fmt: skip
    named = draw.choice([["ViTModel"], None, ["MyOwnViT"]])

    def save(folder: Path) -> Path:
        module.save_pretrained(folder)
        settings = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**settings, "architectures": named}))
        return folder

    def tokens(pixels: torch.Tensor) -> torch.Tensor:
        return module(pixels).last_hidden_state

    return Case(plain, module, tokens, save, {**TRUTH, "layout": "ViTModel"}, patch, (side, side))


def packed_layers(state: Mapping[str, torch.Tensor], block: str, attention: str, fc1: str, fc2: str) -> list[Any]:
    """Return the parts of two blocks with packed queries, keys and values, as in torch's own attention."""
    names = {"norm1": "ln_1", "out": f"{attention}.out_proj", "norm2": "ln_2", "fc1": fc1, "fc2": fc2}
    layers = [pairs(state, {key: f"{block}.{name}" for key, name in names.items()}, number) for number in range(2)]
    for number, layer in enumerate(layers):
        packed = f"{block.format(number)}.{attention}.in_proj"
        layer["qkv"] = state[f"{packed}_weight"], state[f"{packed}_bias"]
    return layers


def torchvision_case(draw: random.Random) -> Case:
    heads, patch, side = draw.choice([2, 3]), 4, draw.choice([3, 4])
    module = TorchvisionTransformer(side * patch, patch, 2, heads, 12 * heads, 40)
    state = randomize_(module, draw.randrange(999)).state_dict()
    layers = packed_layers(state, "encoder.layers.encoder_layer_{}", "self_attention", "mlp.0", "mlp.3")
    plain = Plain(
        convolution(state["conv_proj.weight"], state["conv_proj.bias"]), layers, heads, 1e-6,
        (state["encoder.ln.weight"], state["encoder.ln.bias"]), state["class_token"], state["encoder.pos_embedding"][0],
    )  # fmt: skip

    def tokens(pixels: torch.Tensor) -> torch.Tensor:
        x = module._process_input(pixels)
        return module.encoder(torch.cat((module.class_token.expand(len(x), -1, -1), x), 1))

    truth = {**TRUTH, "num_attention_heads": heads, "layer_norm_eps": 1e-6}
    return Case(plain, module, tokens, saved(state), truth, patch, (side, side))


def open_clip_case(draw: random.Random) -> Case:
    heads, patch, grid = draw.choice([2, 3]), 4, draw.choice([(3, 3), (2, 4)])
    size = (grid[0] * patch, grid[1] * patch)
    module = OpenClipTower(size, patch, 12 * heads, 2, heads, 2.0, output_dim=10)
    state = randomize_(module, draw.randrange(999)).state_dict()
    layers = packed_layers(state, "transformer.resblocks.{}", "attn", "mlp.c_fc", "mlp.c_proj")
    plain = Plain(
        convolution(state["conv1.weight"], None), layers, heads, 1e-5, (state["ln_post.weight"], state["ln_post.bias"]),
        state["class_embedding"], state["positional_embedding"], (state["ln_pre.weight"], state["ln_pre.bias"]),
    )  # fmt: skip

    def tokens(pixels: torch.Tensor) -> torch.Tensor:
        found: dict[str, torch.Tensor] = {}
        handle = module.ln_post.register_forward_hook(lambda part, inputs, output: found.update(x=output))
        module(pixels)
        handle.remove()
        return found["x"]

    truth = {**TRUTH, "num_attention_heads": heads, "layer_norm_eps": 1e-5, "hidden_act": "gelu",
             "final_norm": "before_pooling"}  # fmt: skip
    return Case(plain, module, tokens, saved(state), truth, patch, grid)


CASES = {
    "timm": timm_case,
    "vit_pytorch": vit_pytorch_case,
    "transformers": transformers_case,
    "torchvision": torchvision_case,
    "open_clip": open_clip_case,
}


def stride_and_size(case: Case, secret: Secret) -> tuple[int, tuple[int, int]]:
    """Return the stride of the patches, and the image size that gives the case's grid."""
    stride = case.patch - secret.stride
    return stride, ((case.grid[0] - 1) * stride + case.patch, (case.grid[1] - 1) * stride + case.patch)


@torch.no_grad()
def outcome_of(case: Case, secret: Secret, folder: Path) -> str:
    """Open the file of a model with a secret, and return the outcome."""
    stride, size = stride_and_size(case, secret)
    truth = {**case.truth, "image_size": size}
    if secret.setting in truth:
        truth[secret.setting] = None

    def oracle(name: str, candidates: Sequence[object]) -> object | None:
        said = truth.get(name)
        return said if name == "image_size" or said in candidates else None  # not every size is offered

    images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(3))
    expected = case.plain(images, secret, stride)
    opened = open_truthfully(case.save(folder), oracle, **case.given).converted
    if opened is None:
        return "refused or asked"
    model = opened.model
    ours = getattr(model, "vit", model)
    if not secret.stride:  # with a stride, our patches differ or the images are refused
        found = ours(images).last_hidden_state
        if found.shape == expected.shape and difference(found, expected) <= TOLERANCE:
            return "same"
    settings = {one.field for one in opened.report.unproven}
    assert secret.setting in settings, f"{secret.setting} is not among {sorted(settings)}:\n{opened.report}"
    assert NO_TENSOR.get(secret.setting, secret.setting) in str(opened.report)
    return "unproven"


@pytest.mark.parametrize("kind", CASES)
@torch.no_grad()
def test_the_plain_parts_are_those_of_the_package(kind: str) -> None:
    for seed in range(4):
        case = CASES[kind](random.Random(seed))
        stride, size = stride_and_size(case, Secret())
        images = torch.randn(2, 3, *size)
        case.module.eval()
        assert difference(case.plain(images, Secret(), stride), case.tokens(images)) <= TOLERANCE


@pytest.mark.slow(quick=["transformers"])
@pytest.mark.parametrize("kind", CASES)
def test_without_a_secret_a_file_opens_with_the_same_tokens(kind: str, tmp_path: Path) -> None:
    found: Counter[str] = Counter()
    for seed in range(6):
        folder = tmp_path / str(seed)
        folder.mkdir()
        found[outcome_of(CASES[kind](random.Random(seed)), Secret(), folder)] += 1
    assert found["same"] >= 3
    assert not found["unproven"]


@pytest.mark.slow(quick=["open_clip"])
@pytest.mark.parametrize("kind", CASES)
def test_a_secret_is_refused_asked_about_or_named_as_unproven(kind: str, tmp_path: Path) -> None:
    found: Counter[str] = Counter()
    count = draws(1, nightly=12) * len(SECRETS)
    for seed in range(count):  # one file for each
        place = tmp_path / str(seed)
        place.mkdir()
        found[outcome_of(CASES[kind](random.Random(seed)), SECRETS[seed % len(SECRETS)], place)] += 1
    assert found["unproven"] >= count // 4
    assert found["same"] <= count // 10  # secrets without effect prove nothing


KNOWN = ("layer_norm_eps", "patch_size", "num_attention_heads", "hidden_act", "block_type", "pooling")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["timm", "vit_pytorch"])
@torch.no_grad()
def test_a_reference_finds_every_secret_and_proves_that_there_is_none(kind: str, tmp_path: Path) -> None:
    refused = 0
    for number, secret in enumerate([Secret(), *SECRETS]):
        case = CASES[kind](random.Random(number))
        stride, size = stride_and_size(case, secret)
        images = torch.randn(4, 3, *size, generator=torch.Generator().manual_seed(number))
        reference = images, case.logits(case.plain(images, secret, stride))
        given = {name: value for name, value in case.truth.items() if name in KNOWN}
        path = case.save(tmp_path)
        if secret.setting:
            try:
                opened = from_checkpoint(path, reference=reference, **given)
            except PlainViTError:
                refused += 1
                continue
            outputs = opened.model(images)  # a secret without effect on the pooled tokens
            got = outputs.logits if "logits" in outputs else outputs.pooler_output
            assert difference(got, reference[1]) <= TOLERANCE
        else:
            report = from_checkpoint(path, reference=reference, **given).report
            assert {one.field for one in report.unproven} <= {"layer_norm_eps", "hidden_act"}
            assert NO_TENSOR["attention_mask"] not in str(report)
    assert refused >= len(SECRETS) - 3


def test_every_secret_is_of_the_list() -> None:
    assert {secret.setting for secret in SECRETS} == {*NO_TENSOR, *UNSEEN} - {"num_attention_heads"}

"""An additional source of checkpoints needs only one class and one entry in the registry."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from plain_vit import PlainViTConfig
from plain_vit.conversion import from_checkpoint, from_module, to_checkpoint, to_module
from plain_vit.conversion.registry import FORMATS
from plain_vit.conversion.tables.compare_modules import differences, lost_fields
from plain_vit.conversion.tables.engine import DROP_FIRST_AXIS, SPLIT_QKV, Row, revert
from plain_vit.conversion.tables.format import Description, Format, Hints, Inference, StateDict, write_state_dict
from plain_vit.conversion.tables.infer import head_counts, square_grid
from plain_vit.errors import AmbiguousCheckpointError, ExportError
from tests.conftest import randomize_
from tests.tiny import difference

TOLERANCE = 1e-5


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after, self.act = nn.LayerNorm(width), nn.LayerNorm(width), nn.GELU()
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.mix(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
        x = x + self.out((scores @ v).transpose(1, 2).flatten(2))
        return x + self.down(self.act(self.up(self.after(x))))


class Sixth(nn.Module):
    """The model of a fictional package that exists only in this file."""

    def __init__(
        self, side: int = 24, patch: int = 8, width: int = 24, depth: int = 2, heads: int = 3, classes: int = 5
    ) -> None:
        super().__init__()
        self.side = side
        self.cut = nn.Conv2d(3, width, patch, patch)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.zeros(1, 1 + (side // patch) ** 2, width))
        self.body = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.last, self.answer = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        x = self.cut(pixels).flatten(2).mT
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.places
        for block in self.body:
            x = block(x)
        return self.answer(self.last(x)[:, 0])


# What the constructor takes, in our words. All else is fixed in its code, and so in `config_of`.
ARGUMENTS = "image_size", "patch_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_labels"


def config_of(**arguments: Any) -> PlainViTConfig:
    """Return our config of the package's model with these arguments."""
    return PlainViTConfig(**arguments, intermediate_size=3 * arguments["hidden_size"], layer_norm_eps=1e-5)


def check_represented(config: PlainViTConfig) -> None:
    """Refuse a model that the package would compute otherwise, although its tensors may fit."""
    if lost := lost_fields(config, lambda: config_of(**{name: getattr(config, name) for name in ARGUMENTS})):
        raise ExportError("sixth cannot represent this model:", lost)


class SixthFormat(Format):
    name = "sixth"
    suffixes = (".pt", ".safetensors")

    def matches_names(self, names: Collection[str]) -> bool:
        return "cut.weight" in names and "body.0.mix.weight" in names

    def matches_module(self, module: nn.Module) -> bool:
        return isinstance(module, Sixth)

    def describe_module(self, module: nn.Module, hints: Hints) -> Description:
        known = Hints(num_attention_heads=module.get_submodule("body.0").heads)
        described = self.describe_checkpoint(module.state_dict(), {}, known)
        with torch.device("meta"):
            rebuilt = self.build_module(described.config, None)
        if faults := differences(module, rebuilt, {}, ()):  # a layer that was replaced, another epsilon
            raise ExportError("plain-vit does not know parts of this sixth model:", faults)
        return described

    def describe_checkpoint(self, tensors: StateDict, settings: Mapping[str, Any], hints: Hints) -> Description:
        width, _, patch, _ = tensors["cut.weight"].shape
        if hints.num_attention_heads is None:
            raise AmbiguousCheckpointError("sixth shows no heads; give", {"num_attention_heads": head_counts(width)})
        grid = square_grid(tensors["places"].shape[1] - 1)
        assert grid is not None
        config = config_of(
            hidden_size=width,
            num_hidden_layers=len({name.split(".")[1] for name in tensors if name.startswith("body.")}),
            num_attention_heads=hints.num_attention_heads,
            image_size=grid[0] * patch,
            patch_size=patch,
            num_labels=tensors["answer.weight"].shape[0],
        )
        code = [Inference(field, getattr(config, field), "sixth, the only value in this code")
                for field in ("attention_scale", "layer_norm_eps", "hidden_act")]  # fmt: skip
        return Description(config, inferences=code)

    def rows(self, config: PlainViTConfig, layout: str | None) -> list[Row]:
        attention = "vit.layers.{}.attention"
        return [
            Row("cut", "vit.embeddings.patch_embeddings.projection"),
            Row("first", "vit.embeddings.cls_token"),
            Row("places", "vit.embeddings.position_embeddings.weight", DROP_FIRST_AXIS),
            Row("body.{}.before", "vit.layers.{}.layernorm_before"),
            Row("body.{}.mix", tuple(f"{attention}.{name}_proj" for name in "qkv"), SPLIT_QKV),
            Row("body.{}.out", f"{attention}.o_proj"),
            Row("body.{}.after", "vit.layers.{}.layernorm_after"),
            Row("body.{}.up", "vit.layers.{}.mlp.fc1"),
            Row("body.{}.down", "vit.layers.{}.mlp.fc2"),
            Row("last", "vit.layernorm"),
            Row("answer", "classifier"),
        ]

    def build_module(self, config: PlainViTConfig, layout: str | None) -> nn.Module:
        check_represented(config)
        return Sixth(
            config.image_shape[0],
            config.patch_shape[0],
            config.hidden_size,
            config.num_hidden_layers,
            config.num_attention_heads,
            config.num_labels or 0,
        )

    def write(
        self, config: PlainViTConfig, tensors: StateDict, path: Path, image_processor: Any | None, layout: str | None
    ) -> None:
        check_represented(config)
        write_state_dict(revert(self.rows(config, layout), tensors, config), path)


@pytest.fixture
def sixth(monkeypatch: pytest.MonkeyPatch) -> Sixth:
    """Register the package while a test runs, and return a model of it."""
    monkeypatch.setitem(FORMATS, "sixth", SixthFormat())
    module = Sixth()
    randomize_(module)
    return module.eval()


def test_a_sixth_source_goes_in_and_out_live(sixth: Sixth) -> None:
    images = torch.randn(2, 3, 24, 24)
    model = from_module(sixth)
    assert difference(model(images).logits, sixth(images)) <= TOLERANCE
    back = to_module(model, "sixth")
    assert type(back) is Sixth
    assert all(torch.equal(tensor, back.state_dict()[name]) for name, tensor in sixth.state_dict().items())


def test_a_sixth_source_goes_in_and_out_as_a_file(sixth: Sixth, tmp_path: Path) -> None:
    path, images = tmp_path / "sixth.pt", torch.randn(2, 3, 24, 24)
    torch.save(sixth.state_dict(), path)
    with pytest.raises(AmbiguousCheckpointError, match="--num-attention-heads 4"):
        from_checkpoint(path)
    converted = from_checkpoint(path, num_attention_heads=3, verify=True)
    assert converted.report.format == "sixth"
    assert converted.report.differences is not None  # compared with the module that the source builds
    assert difference(converted.model(images).logits, sixth(images)) <= TOLERANCE
    found = from_checkpoint(path, reference=(images, sixth(images).detach())).report.config
    assert found.num_attention_heads == 3
    to_checkpoint(converted.model, tmp_path / "again.pt", format="sixth")
    again = torch.load(tmp_path / "again.pt")
    assert all(torch.equal(tensor, again[name]) for name, tensor in sixth.state_dict().items())


@pytest.mark.parametrize("fields", [{"hidden_act": "relu"}, {"layer_norm_eps": 1e-3}, {"intermediate_size": 96}])
def test_a_sixth_source_does_not_take_another_model(fields: dict[str, Any], sixth: Sixth, tmp_path: Path) -> None:
    model = from_module(sixth)
    other = type(model)(PlainViTConfig(**{**model.config.to_dict(), **fields}))  # the same names of tensors
    for export in (lambda: to_module(other, "sixth"), lambda: to_checkpoint(other, tmp_path / "x.pt", format="sixth")):
        with pytest.raises(ExportError, match=f"{next(iter(fields))}={next(iter(fields.values()))!r}"):
            export()
    assert not [*tmp_path.iterdir()]
    changed = {"hidden_act": ("act", nn.ReLU()), "layer_norm_eps": ("after", nn.LayerNorm(24, 1e-3))}
    if changing := changed.get(next(iter(fields))):
        setattr(sixth.body[1], *changing)
        with pytest.raises(ExportError, match=f"body.1.{changing[0]}"):
            from_module(sixth)


def test_a_source_that_lacks_a_method_cannot_be_made() -> None:
    half = type("Half", (SixthFormat,), {"write": Format.write})
    with pytest.raises(TypeError, match="abstract method '?write'?"):
        half()

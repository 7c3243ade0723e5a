"""Convert a Vision Transformer that you wrote yourself, with one table of names that is checked in both directions.

    python examples/convert_your_own.py weights.pt converted/

`weights.pt` is a state dict of `HomeGrownViT` below, a typical tutorial model: separate query, key and value with
biases, patches flattened channel by channel, a tanh on the logits. Replace it with your own class, describe the class
in `config_of`, and edit `ROWS` until no tensor is missing or left over; one error lists all problems. The output folder
then holds an ordinary plain ViT, which the Auto classes open.

A plain ViT has no tanh: it returns the logits before it, which rank the classes in the same order and, better for a
loss, are unbounded. If you need exactly the original numbers, `TanhClassifier` opens the same folder with the tanh.
"""

if __name__ == "__main__":  # answer --help and mistakes first: importing torch takes seconds
    from plain_vit_command import argument, read_words

    WORDS = read_words(
        __doc__,
        argument("weights", "state dict of a HomeGrownViT, saved with torch.save or safetensors"),
        argument("out", "folder to write; it must not exist"),
    )

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_outputs import ImageClassifierOutput
from transformers.utils.generic import can_return_tuple

from plain_vit import PlainViTConfig, PlainViTForImageClassification
from plain_vit.conversion.tables.engine import ADD_FIRST_AXIS, Row, convert, each, revert
from plain_vit.files.reading import read_checkpoint
from plain_vit.files.staging import staged_folder

# The trained model. Replace it with your own.


class HomeGrownBlock(nn.Module):
    """Attention and MLP, each after a norm."""

    def __init__(self, width: int, heads: int, mlp_width: int):
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.widen = nn.Linear(width, mlp_width)
        self.narrow = nn.Linear(mlp_width, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        normed = self.norm_1(tokens)
        query, key, value = (
            layer(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        weights = (query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5).softmax(dim=-1)
        tokens = tokens + self.out((weights @ value).transpose(1, 2).flatten(2))
        return tokens + self.narrow(F.gelu(self.widen(self.norm_2(tokens))))


class HomeGrownViT(nn.Module):
    """A small Vision Transformer in the style of tutorials; the defaults are for handwritten digits."""

    def __init__(
        self,
        image: tuple[int, int] = (28, 28),
        patch: tuple[int, int] = (7, 7),
        channels: int = 1,
        width: int = 16,
        depth: int = 2,
        heads: int = 2,
        mlp_width: int = 64,
        classes: int = 10,
    ):
        super().__init__()
        self.image, self.patch, self.channels = image, patch, channels
        patches = (image[0] // patch[0]) * (image[1] // patch[1])
        self.to_tokens = nn.Linear(channels * patch[0] * patch[1], width)
        self.class_token = nn.Parameter(torch.randn(1, width))
        self.positions = nn.Parameter(torch.randn(patches + 1, width))
        self.blocks = nn.ModuleList([HomeGrownBlock(width, heads, mlp_width) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        patches = F.unfold(pixels, self.patch, stride=self.patch).transpose(1, 2)  # (batch, patches, c p1 p2)
        class_token = self.class_token.expand(len(pixels), 1, -1)
        tokens = torch.cat((class_token, self.to_tokens(patches)), dim=1) + self.positions
        for block in self.blocks:
            tokens = block(tokens)
        return torch.tanh(self.head(self.norm(tokens[:, 0])))


# The same model as a PlainViTConfig.


def config_of(model: HomeGrownViT) -> PlainViTConfig:
    """Return the config; check the settings that tensors do not show (heads, epsilon, activation, pooling)."""
    block: Any = model.blocks[0]
    fields: dict[str, Any] = {
        "image_size": model.image,
        "patch_size": model.patch,
        "num_channels": model.channels,
        "hidden_size": model.head.in_features,
        "num_hidden_layers": len(model.blocks),
        "num_attention_heads": block.heads,
        "intermediate_size": block.widen.out_features,
        "hidden_act": "gelu",
        "layer_norm_eps": model.norm.eps,
        "pooling": "cls",
        "num_labels": model.head.out_features,
    }
    return PlainViTConfig(**fields)


# A dense layer over the pixels of a patch, ordered by channel, row and column, is a reshaped convolution kernel.
CHANNELS_ROWS_COLUMNS = each(
    "CHANNELS_ROWS_COLUMNS",
    lambda weight, config: weight.unflatten(1, (config.num_channels, *config.patch_shape)),
    lambda kernel, config: kernel.flatten(1),
)

# Source module, plain-vit module, transform. `{}` is the layer number; a module stands for its weight and bias.
ROWS = [
    Row("to_tokens.weight", "vit.embeddings.patch_embeddings.projection.weight", CHANNELS_ROWS_COLUMNS),
    Row("to_tokens.bias", "vit.embeddings.patch_embeddings.projection.bias"),
    Row("class_token", "vit.embeddings.cls_token", ADD_FIRST_AXIS),
    Row("positions", "vit.embeddings.position_embeddings.weight"),
    Row("blocks.{}.norm_1", "vit.layers.{}.layernorm_before"),
    Row("blocks.{}.query", "vit.layers.{}.attention.q_proj"),
    Row("blocks.{}.key", "vit.layers.{}.attention.k_proj"),
    Row("blocks.{}.value", "vit.layers.{}.attention.v_proj"),
    Row("blocks.{}.out", "vit.layers.{}.attention.o_proj"),
    Row("blocks.{}.norm_2", "vit.layers.{}.layernorm_after"),
    Row("blocks.{}.widen", "vit.layers.{}.mlp.fc1"),
    Row("blocks.{}.narrow", "vit.layers.{}.mlp.fc2"),
    Row("norm", "vit.layernorm"),
    Row("head", "classifier"),
]


class TanhClassifier(PlainViTForImageClassification):
    """A plain ViT with a tanh on its logits, like the home-grown model."""

    @can_return_tuple
    def forward(
        self, pixel_values: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any
    ) -> ImageClassifierOutput:
        """Classify images like the plain model, with a tanh on the logits."""
        outputs = super().forward(pixel_values, return_dict=True, **kwargs)
        outputs.logits = torch.tanh(outputs.logits)
        outputs.loss = None if labels is None else self.loss_function(labels, outputs.logits, self.config, **kwargs)
        return outputs


def to_plain_vit(model: HomeGrownViT) -> TanhClassifier:
    """Return a plain-vit model with the same tensors; `revert` with the same rows goes back."""
    converted = TanhClassifier(config_of(model)).eval()
    converted.load_state_dict(convert(ROWS, model.state_dict(), converted.state_dict(), converted.config))
    return converted


def from_plain_vit(converted: PlainViTForImageClassification, model: HomeGrownViT) -> None:
    """Load the tensors of a plain-vit model into a home-grown model of the same size."""
    model.load_state_dict(revert(ROWS, converted.state_dict(), converted.config))


@torch.no_grad()
def largest_difference(model: HomeGrownViT, converted: TanhClassifier) -> float:
    """Return the largest difference between logits on a few images, relative to the largest logit."""
    pixels = torch.randn(8, model.channels, *model.image, generator=torch.Generator().manual_seed(0))
    theirs, ours = model.eval()(pixels), converted(pixels).logits
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def main(weights: str, out: str) -> None:
    """Convert a weights file, and save the result only if both models give the same logits."""
    model = HomeGrownViT()
    model.load_state_dict(dict(read_checkpoint(weights).tensors))
    converted = to_plain_vit(model)
    difference = largest_difference(model, converted)
    print(f"largest difference of the logits: {difference:.1e}, relative to the largest logit")
    if difference > 1e-5:
        raise SystemExit("the models differ: compare config_of with the forward of the model")
    plain = PlainViTForImageClassification(converted.config)
    plain.load_state_dict(converted.state_dict())
    with staged_folder(out) as folder:
        plain.save_pretrained(folder)
    print(f"saved to {out}; its logits do not include the tanh")


if __name__ == "__main__":
    main(WORDS.weights, WORDS.out)

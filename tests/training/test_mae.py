"""Masked autoencoders equal those of transformers and of the authors, and go on from both."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, ViTImageProcessor, ViTMAEConfig, ViTMAEForPreTraining
from transformers.models.vit_mae.modeling_vit_mae import build_2d_sinusoidal_position_embedding

from plain_vit import PlainViTModel
from plain_vit.errors import TrainingError
from plain_vit.training.arguments import PretrainArguments
from plain_vit.training.tasks.mae import place_tokens
from tests.conftest import randomize_
from tests.training.runs import finetune, open_script, pretrain, save_plain_vit, weights_of

SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 28, "patch_size": 8,
         "image_size": [32, 32], "decoder_hidden_size": 20, "decoder_num_hidden_layers": 3,
         "decoder_num_attention_heads": 5, "decoder_intermediate_size": 36}  # fmt: skip
SHORT = {"dataset": "digits", "steps": 2, "batch_size": 6, "validation_fraction": 0.01, "evaluations": 1,
         "method": "mae"}  # fmt: skip


# Some of our parameters, and theirs.
NAMES = {
    "decoder.vit.embeddings.mask_token": "decoder.mask_token",
    "decoder.vit.embeddings.patch_embeddings.projection.weight": "decoder.decoder_embed.weight",
    "decoder.vit.layers.0.attention.k_proj.weight": "decoder.decoder_layers.0.attention.k_proj.weight",
    "decoder.vit.layernorm.weight": "decoder.decoder_norm.weight",
    "decoder.classifier.weight": "decoder.decoder_pred.weight",
    "vit.embeddings.cls_token": "vit.embeddings.cls_token",
    "vit.embeddings.patch_embeddings.projection.weight": "vit.embeddings.patch_embeddings.projection.weight",
    "vit.layers.1.mlp.fc1.bias": "vit.layers.1.mlp.fc1.bias",
}


def theirs(**fields: Any) -> Any:
    """Return a masked autoencoder of transformers with random weights, and with a mask token that is not zero."""
    model = randomize_(ViTMAEForPreTraining(ViTMAEConfig(**{**SIZES, **fields})))
    return model.eval()


def authors_tensors(model: ViTMAEForPreTraining) -> dict[str, torch.Tensor]:
    """Return the weights by the names of facebookresearch/mae."""
    state: dict[str, Any] = {}
    for ours, name, blocks in ((model.vit, "", "blocks"), (model.decoder, "decoder_", "decoder_blocks")):
        for number, layer in enumerate(getattr(ours, f"{name}layers")):
            block, attention = f"{blocks}.{number}", layer.attention
            for kind in ("weight", "bias"):
                parts = [getattr(getattr(attention, f"{part}_proj"), kind) for part in "qkv"]
                state |= {f"{block}.attn.qkv.{kind}": torch.cat(parts)}
                for theirs_, module in (("norm1", layer.layernorm_before), ("norm2", layer.layernorm_after),
                                        ("attn.proj", attention.o_proj), ("mlp.fc1", layer.mlp.fc1),
                                        ("mlp.fc2", layer.mlp.fc2)):  # fmt: skip
                    state[f"{block}.{theirs_}.{kind}"] = getattr(module, kind)
    embeddings, decoder = model.vit.embeddings, model.decoder
    state |= {"cls_token": embeddings.cls_token, "pos_embed": embeddings.position_embeddings,
              "mask_token": decoder.mask_token, "decoder_pos_embed": decoder.decoder_pos_embed}  # fmt: skip
    for name, module in (("patch_embed.proj", embeddings.patch_embeddings.projection), ("norm", model.vit.layernorm),
                         ("decoder_embed", decoder.decoder_embed), ("decoder_norm", decoder.decoder_norm),
                         ("decoder_pred", decoder.decoder_pred)):  # fmt: skip
        state |= {f"{name}.weight": module.weight, f"{name}.bias": module.bias}
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def save_theirs(model: ViTMAEForPreTraining, folder: Path) -> Path:
    model.save_pretrained(folder)
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder


def opened(folder: Path, **options: Any) -> Any:
    """Return the task that a run from this checkpoint has."""
    script = open_script("pretrain")
    arguments = PretrainArguments(model=str(folder), dataset="digits", output_dir="run", method="mae", **options)
    return script.METHODS["mae"](arguments, script.open_encoder(arguments))


@pytest.mark.parametrize("norm_pix_loss", [False, True])
def test_loss_and_gradients_are_those_of_transformers(norm_pix_loss, tmp_path):
    model = theirs(norm_pix_loss=norm_pix_loss)
    module = opened(save_theirs(model, tmp_path), norm_pix_loss=norm_pix_loss).module
    pixels, noise = torch.randn(5, 3, 32, 32), torch.rand(5, 16)
    for dtype, limit in ((torch.float32, 1e-6), (torch.float64, 1e-14)):
        module.to(dtype).zero_grad(), model.to(dtype).zero_grad()
        expected = model(pixels.to(dtype), noise=noise)
        masked = expected.mask.view(5, 4, 4).bool()
        loss, _ = module(pixels.to(dtype), masked)
        torch.testing.assert_close(loss, expected.loss, rtol=limit, atol=0)
        torch.testing.assert_close(module(pixels.to(dtype), masked, each=True)[0].mean(), loss)
        loss.backward(), expected.loss.backward()
        ours, others = trained(module), trained(model)
        assert len(ours) == len(others)
        largest = max(float(gradient.abs().max()) for gradient in others.values())
        for name, other in NAMES.items():
            assert (ours[name] - others[other]).abs().max() <= limit * largest, name


def trained(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the gradients of the parameters that are trained."""
    return {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}


def test_positions_are_those_of_transformers():
    table = torch.full((17, 24), 7.0)
    place_tokens(table, (4, 4), 1)
    expected = build_2d_sinusoidal_position_embedding(4, 4, 24, cls_token=True)
    assert torch.equal(table, torch.cat((expected[:, 12:], expected[:, :12]), dim=1))  # "swapped h and w"
    rows = torch.full((7, 24), 7.0)
    place_tokens(rows, (2, 3), 1)  # the upper left corner of the square above
    assert torch.equal(rows[1:].view(2, 3, 24), table[1:].view(4, 4, 24)[:2, :3])


def test_checkpoint_of_the_authors_has_the_same_decoder(tmp_path):
    model = theirs(decoder_num_attention_heads=4)
    module = opened(save_theirs(model, tmp_path / "transformers")).module
    torch.save({"model": authors_tensors(model), "ema": authors_tensors(theirs())}, tmp_path / "mae_visualize.pth")
    hints = ["num_attention_heads=2", "image_size=32", "layer_norm_eps=1e-12", "pooling=cls", "hidden_act=gelu",
             "attention_scale=head_dim**-0.5", "block_type=sequential", "rope_type=none", "image_mean=[0.5,0.5,0.5]",
             "image_std=[0.5,0.5,0.5]", "key=model"]  # fmt: skip
    again = opened(tmp_path / "mae_visualize.pth", decoder_num_heads=4, model_hints=hints).module
    expected = module.decoder.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.decoder.state_dict().items())
    assert again.decoder.config.to_dict() == {**module.decoder.config.to_dict(), "initialization": "timm"}
    with pytest.raises(TrainingError, match="not 17 tokens and {'decoder_depth': 2}: omit these options"):
        opened(tmp_path / "transformers", decoder_depth=2)


@pytest.mark.slow
def test_encoder_is_fine_tuned_and_the_decoder_goes_on(tmp_path):
    source = save_plain_vit(tmp_path / "source", use_class_token=True, num_register_tokens=3, register_tokens_last=True,
                            pooling="mean", final_norm="after_pooling")  # fmt: skip
    sizes = {"decoder_embed_dim": 20, "decoder_depth": 2, "decoder_num_heads": 5}
    first, second = tmp_path / "first", tmp_path / "second"
    pretrain(model=source, output_dir=first, from_scratch=True, **SHORT, **sizes, norm_pix_loss=True)
    vit = AutoModel.from_pretrained(first)
    assert isinstance(vit, PlainViTModel)
    before = weights_of(first)
    assert all(torch.equal(tensor, before[name]) for name, tensor in vit.state_dict().items())
    table = before["embeddings.position_embeddings.weight"]
    place_tokens(expected := torch.empty_like(table), (4, 3), 1)
    assert torch.equal(table, expected)
    card = (first / "README.md").read_text()
    assert all(line in card for line in ("| mask_ratio | 0.75 |", "| decoder_depth | 2 |", "masked autoencoder"))
    pretrain(model=first, output_dir=second, **{**SHORT, "steps": 1, "learning_rate": 0.0})
    for folder in (".", "decoder"):
        before, after = weights_of(first / folder), weights_of(second / folder)
        assert before.keys() == after.keys()
        assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    finetune(model=second, output_dir=tmp_path / "tuned", dataset="digits", shots_per_class=1, steps=1, report=False)
    assert not (tmp_path / "tuned" / "decoder").exists()


def test_what_cannot_be_a_masked_autoencoder_is_refused(tmp_path):
    biased = save_plain_vit(tmp_path / "biased", relative_position_bias={"type": "table", "shared": False})
    with pytest.raises(TrainingError, match="attention of the model needs all patches"):
        opened(biased)
    source = save_plain_vit(tmp_path / "plain")
    with pytest.raises(TrainingError, match="mask_ratio 0.99 leaves none of 12 patches to see"):
        opened(source, mask_ratio=0.99)
    with pytest.raises(TrainingError, match="Positions of width 30: sines and cosines need a multiple of 4"):
        opened(source, decoder_embed_dim=30, decoder_num_heads=5)

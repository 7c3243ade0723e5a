"""vit-pytorch's NaViT: packed images of many sizes."""

import copy
import importlib.metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForImageClassification
from vit_pytorch.na_vit import NaViT
from vit_pytorch.na_vit_nested_tensor import NaViT as NestedNaViT

from plain_vit.conversion import from_checkpoint, from_module, to_checkpoint, to_module
from plain_vit.errors import AmbiguousCheckpointError, ExportError, MappingError
from plain_vit.packed_plain_vit import cut_patches
from tests.conftest import randomize_
from tests.peers import vit_pytorch_release
from tests.sources.sweep import record
from tests.tiny import difference

SETTINGS: dict[str, Any] = {
    "image_size": (40, 56), "patch_size": 8, "num_classes": 5, "dim": 24, "depth": 2, "heads": 3, "dim_head": 10,
    "mlp_dim": 36, "channels": 2,
}  # fmt: skip
SIZES = ((24, 56), (40, 16), (8, 8), (40, 56), (16, 24))


def navit(kind: Any = NaViT, **changes: Any) -> nn.Module:
    """Return a random model; shifts of its norms, which are buffers, are also random."""
    module = kind(**{**SETTINGS, **changes}).eval()
    randomize_(module)
    for name, buffer in module.named_buffers():
        if name.endswith("beta"):
            nn.init.normal_(buffer)
    return module


def nested(kind: Any = NestedNaViT, **changes: Any) -> nn.Module:
    """Return a random model of nested tensors."""
    return navit(kind, token_dropout_prob=0.0, **changes)


both = pytest.mark.parametrize("make", [navit, nested])


def measured(file: str, release: str, **found: Any) -> None:
    """Record a line of the table in the docs."""
    version = importlib.metadata.version("vit-pytorch") if release == "installed" else release
    source = f"vit-pytorch {file} of release {version}"
    record({"source": source, "vit-pytorch": version, "torch": torch.__version__, **found})


def images() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(2, *size, generator=generator) for size in SIZES]


def packed(pictures: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the inputs of our model: the concatenated patches of all images."""
    cut = [cut_patches(picture[None], 8, 8).reshape(-1, 128) for picture in pictures]
    return {"pixel_values": torch.cat(cut), "spatial_shapes": shapes(pictures)}


def goes_back(ours: Any, theirs: nn.Module) -> bool:
    """Return whether an exported model has the tensors of the original."""
    back, state = to_module(ours, "vit_pytorch").state_dict(), theirs.state_dict()
    return back.keys() == state.keys() and all(torch.equal(back[name], state[name]) for name in state)


def padded(pictures: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the inputs of our model: a row of patches for each image."""
    cut = [cut_patches(picture[None], 8, 8).reshape(-1, 128) for picture in pictures]
    return {"pixel_values": nn.utils.rnn.pad_sequence(cut, batch_first=True), "spatial_shapes": shapes(pictures)}


def shapes(pictures: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([[side // 8 for side in picture.shape[1:]] for picture in pictures])


@pytest.mark.parametrize("arrange", [packed, padded])
def test_images_of_many_sizes_have_the_logits_of_the_package(arrange: Any) -> None:
    theirs = navit()
    ours = from_module(theirs)
    assert ours.config.image_size == (40, 56)
    off = difference(ours(**arrange(images())).logits, theirs(images()))
    if arrange is packed:
        measured("na_vit", "installed", logits=off)
    assert off <= 1e-5
    groups = [images()[:3], images()[3:]]
    assert difference(ours(**arrange(images())).logits, theirs(groups)) <= 1e-5


def test_images_of_one_size_have_the_logits_of_the_package() -> None:
    theirs = navit()
    pictures = torch.randn(3, 2, 16, 40, generator=torch.Generator().manual_seed(3))
    assert difference(from_module(theirs)(pictures).logits, theirs(list(pictures))) <= 1e-5


@both
def test_a_file_opens_and_goes_back_bit_for_bit(make: Any, tmp_path: Path) -> None:
    theirs = make()
    torch.save(theirs.state_dict(), tmp_path / "vit.pt")
    with pytest.raises(AmbiguousCheckpointError) as caught:
        from_checkpoint(tmp_path / "vit.pt")
    layouts = {"layout": ("na_vit 1.6.7", "na_vit 1.2.6")} if make is navit else {}
    assert caught.value.candidates.keys() == {"patch_size", "image_size", *layouts}
    assert caught.value.candidates.items() >= layouts.items()
    said = {name: titles[0] for name, titles in layouts.items()}
    ours = from_checkpoint(tmp_path / "vit.pt", patch_size=8, **said).model
    assert (ours.config.num_attention_heads, ours.config.head_dim, ours.config.image_size) == (3, 10, (40, 56))
    assert difference(ours(**packed(images())).logits, theirs(images())) <= 1e-5
    to_checkpoint(ours, tmp_path / "back.pt", format="vit_pytorch")
    back, state = torch.load(tmp_path / "back.pt"), theirs.state_dict()
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)
    again = to_module(ours, "vit_pytorch")
    assert type(again) is type(theirs)
    assert torch.equal(again.eval()(images()), theirs(images()))
    again.train()(images()).sum().backward()  # with the model's patch dropout
    if make is navit:
        measured("na_vit", "installed", way_back_bit_exact=True)


@both
def test_a_saved_folder_opens_with_the_same_logits(make: Any, tmp_path: Path) -> None:
    ours = from_module(make())
    ours.save_pretrained(tmp_path)
    again = AutoModelForImageClassification.from_pretrained(tmp_path)
    assert torch.equal(again(**packed(images())).logits, ours(**packed(images())).logits)


def test_logits_of_one_size_find_the_patch_size_and_the_release(tmp_path: Path) -> None:
    theirs = navit()
    torch.save(theirs.state_dict(), tmp_path / "vit.pt")
    pictures = torch.randn(2, 2, 40, 56)
    ours = from_checkpoint(tmp_path / "vit.pt", reference=(pictures, theirs(list(pictures)).detach())).model
    assert ours.config.patch_size == 8


@pytest.mark.parametrize("image_size", [(56, 40), (80, 28), (40, 40)])
def test_another_image_size_than_that_of_the_tables_is_refused(tmp_path: Path, image_size: tuple[int, int]) -> None:
    torch.save(navit().state_dict(), tmp_path / "vit.pt")
    with pytest.raises(MappingError, match=r"image_size.*(does not fit|positions are of 35)"):
        from_checkpoint(tmp_path / "vit.pt", patch_size=8, image_size=image_size, layout="na_vit 1.6.7")


@both
def test_gradients_are_those_of_the_package(make: Any) -> None:
    theirs = make().double().train(make is nested)
    ours = from_module(copy.deepcopy(theirs)).train(theirs.training)
    pictures = [picture.double() for picture in images()]
    weights = torch.randn(len(SIZES), 5, generator=torch.Generator().manual_seed(4))
    (theirs(pictures) * weights).sum().backward()
    (ours(**packed(pictures)).logits * weights).sum().backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters() if parameter.grad is not None}
    theirs.load_state_dict(gradients, strict=False)
    expected = from_module(theirs).state_dict()  # gradients are converted in place of the weights
    trained = {name: parameter for name, parameter in ours.named_parameters() if parameter.requires_grad}
    assert all(parameter.grad is not None for parameter in trained.values())
    if make is navit:
        assert len(trained) == len(gradients) + 3  # theirs has one tensor for keys and values
        assert len(gradients) == sum(1 for _ in theirs.parameters())
    else:
        # The package detaches inputs of nested tensors: its embeddings and query get no gradients.
        assert {name.partition(".")[0] for name in gradients} == {"transformer", "attn_pool", "mlp_head"}
        without = ("vit.embeddings.", "vit.pooler.query")
        trained = {name: parameter for name, parameter in trained.items() if not name.startswith(without)}
        assert len(trained) == len(gradients)
    for name, parameter in trained.items():
        assert difference(parameter.grad, expected[name]) <= 1e-10, name


def test_images_beyond_the_tables_are_refused_as_in_the_package() -> None:
    theirs = navit()
    picture = torch.randn(2, 48, 16)
    with pytest.raises(IndexError):
        theirs([picture])
    with pytest.raises(ValueError, match="truncate"):
        from_module(theirs)(**packed([picture]))


def test_rates_of_training_are_kept() -> None:
    theirs = navit(dropout=0.1, emb_dropout=0.2, token_dropout_prob=0.25)
    config = from_module(theirs).config
    assert (config.hidden_dropout_prob, config.attention_probs_dropout_prob) == (0.1, 0.1)
    assert (config.embedding_dropout_prob, config.patch_dropout_prob) == (0.2, 0.25)
    assert to_module(from_module(theirs), "vit_pytorch").calc_token_dropout(40, 56) == 0.25


def test_a_rate_that_depends_on_the_size_is_refused() -> None:
    with pytest.raises(ExportError, match="calc_token_dropout"):
        from_module(navit(token_dropout_prob=lambda height, width: 0.1))


@pytest.mark.parametrize("release", ["1.2.9", "1.5.3"])
def test_releases_whose_attention_reads_padding_are_refused(release: str, tmp_path: Path) -> None:
    theirs = navit(vit_pytorch_release(release, "na_vit").NaViT)
    with pytest.raises(ExportError, match="reads the padding"):
        from_module(theirs)
    torch.save(theirs.state_dict(), tmp_path / "vit.pt")
    with pytest.raises(ExportError, match="reads the padding"):
        from_checkpoint(tmp_path / "vit.pt", patch_size=8, layout=f"na_vit {release}")


@pytest.mark.parametrize("release", ["1.15.7", "1.16.2"])
def test_the_releases_after_them_open(release: str) -> None:
    theirs = navit(vit_pytorch_release(release, "na_vit").NaViT)
    ours = from_module(theirs)
    off = difference(ours(**packed(images())).logits, theirs([images()]))
    assert off <= 1e-5
    measured("na_vit", release, logits=off, way_back_bit_exact=goes_back(ours, theirs))


def test_models_that_it_does_not_represent_are_not_exported() -> None:
    ours = from_module(navit())
    ours.config.position_embedding_type = "none"
    with pytest.raises(match="position_embedding_type"):
        to_module(ours, "vit_pytorch")


# NaViT of nested tensors


@pytest.mark.slow(quick=["packed-1.15.7", "padded-1.16.0", "packed-installed", "padded-installed"])
@pytest.mark.parametrize("release", ["1.15.7", "1.16.0", "1.16.2", "installed"])
@pytest.mark.parametrize("arrange", [packed, padded])
def test_nested_images_have_the_logits_of_the_package(release: str, arrange: Any) -> None:
    installed = release == "installed"
    theirs = nested(NestedNaViT if installed else vit_pytorch_release(release, "na_vit_nested_tensor").NaViT)
    ours = from_module(theirs)
    assert (ours.config.image_size, ours.config.head_dim) == ((40, 56), 10)
    off = difference(ours(**arrange(images())).logits, theirs(images()))
    assert off <= 1e-5
    back = goes_back(ours, theirs)
    if arrange is packed:
        measured("na_vit_nested_tensor", release, logits=off, way_back_bit_exact=back)
    assert back


def test_rates_of_nested_training_are_kept_or_refused() -> None:
    config = from_module(navit(NestedNaViT, dropout=0.1, emb_dropout=0.2, token_dropout_prob=0.25)).config
    assert (config.hidden_dropout_prob, config.attention_probs_dropout_prob) == (0.1, 0.1)
    assert (config.embedding_dropout_prob, config.patch_dropout_prob) == (0.2, 0.25)
    assert from_module(navit(NestedNaViT)).config.patch_dropout_prob == 0
    with pytest.raises(ExportError, match="no constant"):
        from_module(navit(NestedNaViT, token_dropout_prob=lambda height, width: 0.1))


def test_nested_tensors_without_norms_of_queries_are_refused_by_name(tmp_path: Path) -> None:
    torch.save(NestedNaViT(**SETTINGS, qk_rmsnorm=False).state_dict(), tmp_path / "vit.pt")
    with pytest.raises(MappingError, match="na_vit_nested_tensor.NaViT with qk_rmsnorm=False"):
        from_checkpoint(tmp_path / "vit.pt", patch_size=8)

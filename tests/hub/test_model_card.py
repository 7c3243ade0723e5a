"""Model cards pass the Hub's validators, contain only known facts, and keep manual edits."""

import ast
import json
import os
import random
import re
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import timm
import yaml
from huggingface_hub import EvalResult, ModelCard
from huggingface_hub.errors import HFValidationError
from markdown_it import MarkdownIt
from PIL import Image

from plain_vit import PlainViTForImageClassification, PlainViTImageProcessor, PlainViTModel
from plain_vit.conversion.parity import StageDifference
from plain_vit.errors import AmbiguousCheckpointError, CheckpointError
from plain_vit.files.marks import is_untouched
from plain_vit.hub.card import ModelFacts, addressed, source_facts, write_card
from plain_vit.hub.markdown import code, one_line, plain
from plain_vit_command import main
from tests.hub.endpoint import HubEndpoint, metadata_faults
from tests.sizes import draws
from tests.tiny import tiny_config

LABELS = dict(enumerate(["ant", "bee", "cat", "dog", "eel", "fox", "gnu"]))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "insects vit"
    PlainViTForImageClassification(tiny_config(id2label=LABELS)).save_pretrained(folder)
    PlainViTImageProcessor(
        size={"shortest_edge": 64}, crop_size={"height": 24, "width": 56}, do_center_crop=True, resample=3
    ).save_pretrained(folder)
    Image.new("RGB", (5, 7)).save(folder / "curves.png")
    return folder


FACTS = ModelFacts(
    origin="Fine-tuned from [the teacher](https://example.org/teacher) on insects.",
    differences=[StageDifference("layer 1", 1e-7, 1.0), StageDifference("logits", 0.0, 3.0)],
    license="cc-by-nc-4.0",
    base_model="timm/vit_tiny_patch16_224",
    base_model_relation="finetune",
    datasets=["alice/insects"],
    results=[
        EvalResult("image-classification", "alice/insects", "Insects", "accuracy", 0.875, dataset_split="test"),
        EvalResult("image-classification", "alice/insects", "Insects", "f1", 0.5, dataset_split="test"),
    ],
    curves={"Loss and accuracy": "curves.png"},
    recipe={"optimizer": "sgd", "peak learning rate": 0.03, "mixed": "a | b"},
    environment={"torch": "2.15.0"},
    limits=["It has never seen a spider."],
    citations=["@misc{insects, title = {Insects}}"],
    tags=["insects"],
)


def card_of(folder: Path) -> str:
    return (folder / "README.md").read_text()


def change(file: Path, **settings: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))


def untouched(card: str) -> bool:
    return is_untouched(card.encode())


def test_the_metadata_says_everything_that_is_known_and_the_validators_take_it(folder: Path, hub: HubEndpoint) -> None:
    assert write_card(folder, FACTS)
    card = ModelCard.load(folder / "README.md", ignore_metadata_errors=False)
    huggingface_hub.create_repo("alice/model")
    huggingface_hub.upload_file(  # asks the Hub whether the metadata are valid
        path_or_fileobj=folder / "README.md", path_in_repo="README.md", repo_id="alice/model"
    )
    assert ("POST", "/api/validate-yaml", 200) in hub.requests
    data = card.data.to_dict()
    assert metadata_faults(data) == []
    expected: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "image-classification",
        "license": "cc-by-nc-4.0",
        "base_model": "timm/vit_tiny_patch16_224",
        "base_model_relation": "finetune",
        "datasets": ["alice/insects"],
        "metrics": ["accuracy", "f1"],
        "tags": ["vision", "vit", "plain-vit", "insects"],
    }
    assert {name: data[name] for name in expected} == expected
    assert card.data.eval_results == list(FACTS.results)
    assert data["model-index"][0]["name"] == "insects vit"


@pytest.mark.slow
def test_the_model_card_describes_architecture_origin_usage_and_results(folder: Path) -> None:
    write_card(folder, FACTS)
    card = card_of(folder)
    for said in (
        "# insects vit\n",
        "3 layers of width 40 and 5 heads, for images of 24 x 56 pixels and patches of 8 x 14 pixels",
        "7 labels: ant, bee, cat, dog, eel, fox, gnu.",
        "on insects.",
        "0.0e+00 for the logits, and over all stages at most 1.0e-07 (layer 1)",
        "`size = {'shortest_edge': 64}`, `resample = bicubic`, `crop_size = {'height': 24, 'width': 56}`",
        "`image_mean = (0.5, 0.5, 0.5)`",
        "| Insects | test | accuracy | 0.8750 |",
        "![Loss and accuracy](curves.png)",
        "| peak learning rate | 0.03 |",
        "| mixed | a \\| b |",
        "| torch | 2.15.0 |",
        "never seen a spider",
        "one of the 7 labels",
        "The weights are under `cc-by-nc-4.0`",
        "code in this repository (`*.py`) is under the Apache License 2.0",
        "@misc{insects",
        "dosovitskiy2021image",
    ):
        assert said in card, said
    total = sum(p.numel() for p in PlainViTForImageClassification(tiny_config()).parameters())
    assert f"It has {total:,} parameters, stored as float32" in card
    blocks = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    assert len(blocks) == 3  # test_hub.py runs them
    for block in blocks:
        ast.parse(block)


def test_unknown_facts_are_omitted(folder: Path) -> None:
    write_card(folder, ModelFacts())
    data = ModelCard.load(folder / "README.md").data.to_dict()
    assert set(data) == {"library_name", "pipeline_tag", "tags"}
    card = card_of(folder)
    for title in ("Where the weights come from", "Results", "Training", "Environment"):
        assert title not in card
    assert "> **No licence of the weights is stated.**" in card
    assert "None" not in card


def test_a_model_without_a_classifier_is_a_feature_extractor(tmp_path: Path) -> None:
    PlainViTModel(tiny_config()).save_pretrained(tmp_path / "features")
    write_card(tmp_path / "features", ModelFacts())
    assert ModelCard.load(tmp_path / "features" / "README.md").data.pipeline_tag == "image-feature-extraction"
    card = card_of(tmp_path / "features")
    assert "AutoModel.from_pretrained" in card
    assert "It has no classifier" in card
    assert "labels" not in card
    assert "Preprocessing" not in card


@pytest.mark.parametrize("do_pad, size", [(False, "many sizes"), (True, "24 x 56 pixels")])
def test_images_that_are_padded_have_one_size(do_pad: bool, size: str, folder: Path) -> None:
    padding: dict[str, Any] = {"do_pad": do_pad, "pad_size": {"height": 24, "width": 56}}
    PlainViTImageProcessor(size={"longest_edge": 56}, **padding).save_pretrained(folder)
    write_card(folder, ModelFacts())
    assert size in card_of(folder)


def test_an_edited_page_is_never_overwritten(folder: Path) -> None:
    write_card(folder, FACTS)
    assert untouched(card_of(folder))
    assert write_card(folder, ModelFacts(name="again"))
    assert "# again" in card_of(folder)
    edited = card_of(folder).replace("# again", "# Again")
    (folder / "README.md").write_text(edited)
    assert not untouched(edited)
    assert not write_card(folder, FACTS)
    assert card_of(folder) == edited
    (folder / "README.md").write_text("# Mine\n")
    assert not write_card(folder, FACTS)


def test_a_page_that_another_tool_saved_again_or_with_other_line_ends_counts_as_untouched(folder: Path) -> None:
    write_card(folder, FACTS)
    assert untouched(str(ModelCard(card_of(folder))))
    assert untouched(card_of(folder).replace("\n", "\r\n"))


def test_the_placeholder_becomes_the_repository(folder: Path) -> None:
    write_card(folder, FACTS)
    card = addressed(card_of(folder).encode(), "alice/model-1.5").decode()
    assert untouched(card)
    assert "your-name" not in card
    assert 'from_checkpoint("alice/model-1.5")' in card
    assert addressed(card.encode(), "bob/other") == card.encode()
    edited = card_of(folder).encode() + b"\xff"
    assert addressed(edited, "alice/model") == edited


@pytest.mark.parametrize(
    "wrong, error",
    [
        ({"base_model": "no/such/id"}, HFValidationError),
        ({"datasets": ["bad name"]}, HFValidationError),
        ({"base_model_relation": "copy"}, ValueError),
    ],
)
def test_facts_that_cannot_be_are_refused(wrong: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        ModelFacts(**wrong)


def test_missing_images_and_folders_without_a_model_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        write_card(folder, ModelFacts(curves={"Loss": "gone.png"}))
    with pytest.raises(AmbiguousCheckpointError, match="holds no weights itself"):
        write_card(tmp_path, ModelFacts())
    assert not (tmp_path / "README.md").exists()


def test_the_license_of_a_source_is_read_from_its_model_card(folder: Path) -> None:
    for text, expected in [
        (
            "---\nlicense: mit\ndatasets: [imagenet-1k, 3, a b]\n---\n# x",
            {"license": "mit", "datasets": ["imagenet-1k"]},
        ),
        (
            "---\nlicense: other\nlicense_name: fair\nlicense_link: LICENSE\n---\n",
            {"license": "other", "license_name": "fair", "datasets": []},
        ),
        ("---\nlicense: [mit]\n---\n", {"datasets": []}),
        ("---\n{ no yaml\n---\n", {}),
        ("---\nlicense: " + "[" * 5000 + "\n---\n", {}),
        ("---\nlicense: 2020-99-99\n---\n", {}),
        ("# no metadata", {}),
    ]:
        (folder / "README.md").write_text(text)
        assert source_facts(folder) == expected
    (folder / "README.md").unlink()
    assert source_facts(folder) == {}


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({"architecture": "x", "pretrained_cfg": {"license": "Apache-2.0"}}, {"license": "apache-2.0"}),
        ({"architecture": "x", "license": "cc-by-nc-4.0"}, {"license": "cc-by-nc-4.0"}),
        ({"pretrained_cfg": {"license": "nvidia-model"}}, {"license": "other", "license_name": "nvidia-model"}),
        ({"pretrained_cfg": {"license": None}}, {}),
        ({"pretrained_cfg": 3}, {}),
        ([], {}),
    ],
)
def test_without_a_page_the_license_is_what_timm_notes(
    settings: object, expected: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert source_facts(tmp_path) == expected
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n")
    assert source_facts(tmp_path)["license"] == "mit"


def test_license_and_citations_of_a_timm_folder_are_in_the_converted_model_card(tmp_path: Path) -> None:
    module = timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=24, num_heads=3, depth=1, num_classes=2)
    timm.models.save_for_hf(module, tmp_path / "source", safe_serialization=True)
    entry = "@misc{rw2019timm,\n  author = {Ross Wightman},\n  title = {PyTorch Image Models}\n}"
    page = timm.models._hub.generate_readme({"license": "cc-by-nc-4.0", "citation": [entry]}, "source")
    (tmp_path / "source" / "README.md").write_text(page)
    assert main(["convert", str(tmp_path / "source"), str(tmp_path / "out"), "--no-verify"]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "\nlicense: cc-by-nc-4.0\n" in card
    assert entry in card
    assert "@inproceedings{dosovitskiy2021image" in card
    assert main(["convert", str(tmp_path / "out"), str(tmp_path / "again"), "--no-verify"]) == 0
    again = (tmp_path / "again" / "README.md").read_text()
    assert "\nlicense: cc-by-nc-4.0\n" in again
    assert again.count("@misc{rw2019timm") == again.count("@inproceedings{dosovitskiy2021image") == 1


# ---- what others have written ----

HOSTILE = (
    "cat\n\n## License\n\nThe weights are under mit", "<img src=x onerror=alert(1)>", "<script>alert(1)</script>",
    "![](https://evil.example/track.png)", "[text](javascript:alert(1))", "[text](https://evil.example)",
    "https://evil.example/x", "www.evil.example", "<https://evil.example>", "bob@evil.example", "`code`", "``` \n# x",
    "| a | b |", "a | b\n|---|---|", "$$x$$", "\x1b[31mred\x1b]0;title\x07", "\u202egnp.exe", "\ud800", "x" * 5000,
    "# heading", "- item", "1. item", "> quote", "---", "***", "&lt;b&gt;", "&#60;b&#62;", "\\", "\\`", "a_b_c", "_x_",
    "*x*", "~~x~~", "[^1]: note", "[x]: https://evil.example", "line\r# x", "line\u2028# x", "line\x0b# x", "\u0000",
    "---\nlicense: mit\n---", "\n---\n", "{{ x }}", "<!-- ", "-->", "::: x", "@octocat", "tab\tx", "</code>", "  ",
    "é花", "license: mit #", "`\n\n# x",
)  # fmt: skip
TITLES = {
    "Where the weights come from", "How to load it", "Preprocessing", "Results", "Training", "Environment", "Limits",
    "License", "Citation",
}  # fmt: skip
KEYS = {
    "library_name", "pipeline_tag", "tags", "license", "license_name", "license_link", "base_model", "datasets",
    "metrics", "model-index", "base_model_relation",
}  # fmt: skip
ADDRESSES = ("https://example.org/", "https://huggingface.co/", "curves.png", "https://licenses.example/")


def check_page(card: str, title: str) -> None:
    """Hold a page to what only plain-vit writes into one, as a reader of Markdown sees it."""
    assert all(char.isprintable() or char == "\n" for char in card)
    assert len(card) < 60_000
    head, _, body = card.removeprefix("---\n").partition("\n---\n")
    assert set(yaml.safe_load(head)) <= KEYS
    assert is_untouched(card.encode())
    tokens = MarkdownIt("gfm-like", {"linkify": False}).parse(body)
    headings = [tokens[i + 1] for i, token in enumerate(tokens) if token.type == "heading_open"]
    names = ["".join(child.content for child in token.children) for token in headings]
    assert names[0] == title
    assert set(names[1:]) <= TITLES
    assert len(names) == len(set(names))
    assert [token.content.startswith("<!-- written by") for token in tokens if token.type == "html_block"] == [True]
    assert {token.info for token in tokens if token.type == "fence"} <= {"python", "bibtex"}
    lists = [token for token in tokens if token.type in ("bullet_list_open", "ordered_list_open", "hr", "code_block")]
    assert len(lists) == 1
    for child in (child for token in tokens for child in token.children or []):
        assert child.type != "html_inline"
        for place in (child.attrs.get("href"), child.attrs.get("src")):
            assert place is None or str(place).startswith(ADDRESSES), place
    for token in tokens:  # what GitHub and the Hub turn into links by themselves, outside of code
        if token.type == "inline":
            text = token.content
            for child in token.children or []:
                if child.type == "code_inline":
                    text = text.replace(child.content, "", 1)
            assert not re.search(r"(https?://|www\.)evil|(?<!\\)@", text), text


def draw_page(folder: Path, draw: random.Random) -> None:
    """Write a page in which everything that others name is hostile, and hold it to `check_page`."""

    def hostile() -> str:
        return " ".join(draw.choices(HOSTILE, k=draw.choice((1, 1, 2, 3))))

    # a config with half a character is refused before
    labels = {str(number): hostile().replace("\ud800", "?") for number in LABELS}
    change(folder / "config.json", id2label=labels, label2id={})
    name = hostile()
    facts = ModelFacts(
        name=name,
        origin=f"Converted from {code(hostile())}, and {plain(hostile())}.",
        license=draw.choice([None, hostile()]),
        license_name=hostile(),
        license_link=draw.choice(
            ["[x](https://evil.example)", "javascript:alert(1)", "https://licenses.example/x", "http://a b"]
        ),
        results=[EvalResult("image-classification", hostile(), hostile(), "accuracy", 0.5, dataset_split=hostile())],
        curves={hostile(): "curves.png"},
        recipe={hostile(): hostile()},
        environment={hostile(): hostile()},
        citations=[hostile(), "@misc{x}\n```\n# x\n````"],
        tags=[hostile()],
    )
    write_card(folder, facts)
    title = MarkdownIt().parse(f"# {plain(one_line(name) or 'model')}")[1].children
    check_page(card_of(folder), "".join(child.content for child in title))
    (folder / "README.md").unlink()


@pytest.mark.slow
def test_untrusted_text_stays_text(folder: Path) -> None:
    for seed in range(draws(40, nightly=1000)):
        draw_page(folder, random.Random(seed))


def test_each_hostile_text_is_shown_as_it_is_and_no_longer_than_a_name() -> None:
    for text in HOSTILE:
        table = f"| {plain(text)} |\n|---|\n| {plain(text)} |"
        for written in (f"x {plain(text)}", table, f"x {code(text)}"):
            tokens = MarkdownIt("gfm-like", {"linkify": False}).parse(written)
            inline = [child for token in tokens for child in token.children or []]
            assert {child.type for child in inline} <= {"text", "code_inline", "text_special"}
        shown = "".join(child.content for child in MarkdownIt().parse(f"x {plain(text)}")[1].children)
        assert shown.strip() == f"x {one_line(text)}".strip()
        assert len(one_line(text)) <= 100
        assert one_line(one_line(text)) == one_line(text)


def test_a_source_s_page_gives_a_license_only_in_the_form_of_one(tmp_path: Path) -> None:
    def said(page: object) -> dict[str, Any]:
        (tmp_path / "README.md").write_text(f"---\n{yaml.safe_dump(page)}---\n")
        return {key: value for key, value in source_facts(tmp_path).items() if key.startswith("license")}

    assert said({"license": "apache-2.0\n\n## Hacked"}) == {}
    assert said({"license": "mit", "license_link": "javascript:alert(1)"}) == {"license": "mit"}
    assert said({"license": "MIT", "license_link": "https://example.org/x"}) == {
        "license": "mit", "license_link": "https://example.org/x",
    }  # fmt: skip
    assert said({"license": "other", "license_name": "x\n# y"}) == {"license": "other", "license_name": "unnamed"}
    for link in (
        "http://a b",
        "https://",
        "ftp://example.org",
        "https://bob:pw@example.org",
        "https://x/)[",
        3,
        "LICENSE",
    ):
        assert said({"license": "mit", "license_link": link}) == {"license": "mit"}


def test_the_page_says_who_states_the_license(folder: Path) -> None:
    write_card(folder, ModelFacts(license="mit"))
    assert "under `mit`. The code" in card_of(folder)
    write_card(folder, ModelFacts(license="mit", license_from="whoever trained them"))
    assert "under `mit`, as whoever trained them says. The code" in card_of(folder)


def test_labels_that_share_a_name_are_named(folder: Path) -> None:
    labels = ["crane", "bee", "crane", "dog", "eel", "fox", "gnu"]
    change(folder / "config.json", id2label={str(number): name for number, name in enumerate(labels)})
    write_card(folder, ModelFacts())
    assert "Several labels share a name and differ only in their numbers: crane." in card_of(folder)


@pytest.mark.parametrize(
    "settings",
    [
        {"size": {"height": "x", "width": 3}}, {"resample": 99}, {"image_mean": "x"}, {"image_mean": None},
        {"resize_mode": "x"}, {"size": {"height": 24}},
    ],
)  # fmt: skip
def test_odd_settings_of_the_image_processor_get_an_error_of_our_own(folder: Path, settings: dict[str, Any]) -> None:
    change(folder / "preprocessor_config.json", **settings)
    with pytest.raises(CheckpointError, match="describe no model"):
        write_card(folder, ModelFacts())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"size": 3}, "`size = {'height': 3, 'width': 3}`"),
        ({"size": [1, 2]}, "`size = {'height': 1, 'width': 2}`"),
        ({"crop_size": 7}, "`crop_size = {'height': 7, 'width': 7}`"),
        ({"pad_color": [9, 8, 7]}, "`pad_color = (9, 8, 7)`"),
        ({"rescale_factor": 0.5}, "`rescale_factor = 0.5`"),
    ],
)
def test_every_form_of_a_setting_that_the_image_processor_takes_is_described(
    folder: Path, settings: dict[str, Any], said: str
) -> None:
    change(folder / "preprocessor_config.json", **settings)
    write_card(folder, ModelFacts())
    assert said in card_of(folder)


@pytest.mark.parametrize("measured", [True, False])
def test_the_calibration_is_unknown_unless_it_was_measured(folder: Path, measured: bool) -> None:
    result = EvalResult("image-classification", "digits", "digits", "calibration_error", 0.02, dataset_split="test")
    write_card(folder, ModelFacts(results=[result] * measured))
    assert ("calibration of the scores is unknown" in card_of(folder)) != measured


@pytest.mark.slow
def test_names_that_are_no_utf_8_convert_and_push(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=24, num_heads=3, depth=1, num_classes=2)
    source = tmp_path / os.fsdecode(b"so\xffurce")
    timm.models.save_for_hf(model, source, safe_serialization=True)
    labels = tmp_path / "labels.json"
    labels.write_text('["\\u202eant", "bee\\u001b[31m"]')
    out = tmp_path / os.fsdecode(b"ou\xfft")
    assert main(["convert", str(source), str(out), "--no-verify", "--labels", str(labels)]) == 0
    assert capsys.readouterr().out.replace("\n", "").isprintable()
    card = card_of(out)
    assert "udcff" in card
    assert "u202eant" in card
    assert main(["push", str(out), "alice/model", "--dry-run"]) == 0
    (out / os.fsdecode(b"no\xfftes.txt")).write_text("x")
    assert main(["push", str(out), "alice/model", "--dry-run"]) == 0
    assert "left out no\\udcfftes.txt" in capsys.readouterr().out

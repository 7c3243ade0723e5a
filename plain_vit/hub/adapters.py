"""Adapters saved by peft: the base model, which must be on the Hub, and the model card."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.repocard import REGEX_YAML_BLOCK

from ..errors import CheckpointError, shortened
from ..files.marks import is_untouched, marked
from ..files.safetensors import open_safetensors
from ..files.texts import parse_json
from .card import CARD, PLACEHOLDER, is_repo_id, metadata_of
from .markdown import code, fenced, one_line, plain

TEMPLATE = Path(__file__).with_name("adapter_card.md")
SETTINGS, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
SNAPSHOT = re.compile(r"models--([\w.-]+?)--([\w.-]+)[\\/]snapshots[\\/]")  # a folder of the Hub's cache
HEAD = re.compile(r"(?:base_model\.model\.)?(?:classifier|head|fc)\.weight")
CLASSIFIER = "AutoModelForImageClassification"
AUTO_CLASS = re.compile(r"(?:[A-Z]\w*)?For([A-Z]\w{0,50})")
TAG_OF_BASE = "base_model:"
# What peft adds to its model card template: versions, and how the base was quantised.
ADDED_BY_PEFT = re.compile(
    r"^(?:### Framework versions|- PEFT [\w.+-]+|## Training procedure|"
    r"The following `bitsandbytes` quantization config was used during training:|- \w*(?:bit|quant|llm_int8)\w*: .*)$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Adapter:
    """A saved adapter.

    Args:
        settings: Contents of `adapter_config.json`.
        shapes: Shape of each tensor, by name.
        base_model: Hub id of the base model.
    """

    settings: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    base_model: str

    def page(self, written: str | None, more_tags: Sequence[str] = ()) -> str:
        """Return the model card to upload: the existing one if a person wrote it, else ours with its metadata.

        Args:
            written: The card in the folder.
            more_tags: Further tags, for a card of ours.

        Raises:
            CheckpointError: A card written by a person names no base model, or a different one.
        """
        metadata = metadata_of(written) if written is not None else {}
        if written is not None and not _is_template(written) and not is_untouched(written.encode()):
            bases = metadata.get("base_model")
            bases = bases if isinstance(bases, list) else [bases]
            tagged = {tag.rpartition(":")[2] for tag in _tags(metadata) if tag.startswith(TAG_OF_BASE)}
            if self.base_model not in bases or not tagged <= {self.base_model} or not all(map(is_repo_id, bases)):
                raise CheckpointError(
                    f"{CARD} and {SETTINGS} name different base models, or {CARD} names none: set base_model: "
                    f"{self.base_model} in its metadata, and remove the others and their tags."
                )
            return written
        rank, auto_class = self.settings.get("r"), self._auto_class()
        tags = [one_line(tag) for tag in (*_tags(metadata), *more_tags) if not tag.startswith(TAG_OF_BASE)]
        kept = {key: value for key, value in metadata.items() if key not in ("base_model", "tags", "library_name")}
        known: dict[str, Any] = {
            "pipeline_tag": "image-classification" if auto_class == CLASSIFIER else "image-feature-extraction",
            **kept,
            "base_model": self.base_model, "base_model_relation": "adapter", "library_name": "peft",
            "tags": list(dict.fromkeys([*tags, f"{TAG_OF_BASE}adapter:{self.base_model}", "vision", "plain-vit"])),
        }  # fmt: skip
        card = ModelCard.from_template(
            ModelCardData(**known),
            str(TEMPLATE),
            name=self.base_model.rpartition("/")[2],
            kind=self.settings["peft_type"],
            rank=rank if type(rank) is int and 0 < rank < 10**6 else None,
            parameters=sum(map(prod, self.shapes.values())),
            shapes=self.shapes,
            num_labels=self._own_head(),
            loading=self._loading(auto_class),
            license=kept.get("license"),
            code=code, fenced=fenced, plain=plain,
        )  # fmt: skip
        return marked(str(card))

    def _loading(self, auto_class: str) -> str:
        options = [json.dumps(self.base_model)]
        if isinstance(revision := self.settings.get("revision"), str):
            options.append(f"revision={json.dumps(revision)}")
        if (count := self._own_head()) is not None:
            options += [f"num_labels={count}", "ignore_mismatched_sizes=True"]
        is_ours = self._class_of_base()[0].rpartition(".")[2] == "modeling_plain_vit"
        return "\n".join([
            *(["import plain_vit"] * is_ours), "from peft import PeftModel", f"from transformers import {auto_class}",
            "", f"base = {auto_class}.from_pretrained({', '.join(options)})",
            f'model = PeftModel.from_pretrained(base, "{PLACEHOLDER}/adapter")',
        ])  # fmt: skip

    def _auto_class(self) -> str:
        """Return the Auto class that opens the base model."""
        if match := AUTO_CLASS.fullmatch(self._class_of_base()[1]):
            return f"AutoModelFor{match[1]}"
        return "AutoModel" if self._own_head() is None else CLASSIFIER

    def _class_of_base(self) -> tuple[str, str]:
        """Return the module and class of the base model as recorded by peft, which omits them if a task was given."""
        noted = self.settings.get("auto_mapping")
        noted = noted if isinstance(noted, dict) else {}
        return str(noted.get("parent_library")), str(noted.get("base_model_class"))

    def _own_head(self) -> int | None:
        """Return the number of labels of the adapter's own classifier; None if it has none."""
        heads = [shape[0] for name, shape in self.shapes.items() if HEAD.fullmatch(name) and len(shape) == 2]
        return heads[0] if heads else None


def open_adapter(folder: Path) -> Adapter:
    """Read an adapter saved by peft, without building the model, which would need the base model.

    Raises:
        CheckpointError: The adapter is incomplete, or its base model is not on the Hub.
    """
    if not (folder / WEIGHTS).is_file():
        raise CheckpointError(f"{folder} has {SETTINGS} but no {WEIGHTS}: save the adapter as safetensors.")
    settings = parse_json((folder / SETTINGS).read_bytes(), str(folder / SETTINGS))
    if not isinstance(settings.get("peft_type"), str):
        raise CheckpointError(f"{folder / SETTINGS} has no peft_type: save the adapter with peft.")
    base = settings.get("base_model_name_or_path")
    if not isinstance(base, str) or not is_repo_id(base) or Path(base).exists():
        cached = SNAPSHOT.search(str(base))
        remedy = f"write '{cached[1]}/{cached[2]}'" if cached else "push the base model, and write its id (user/name)"
        raise CheckpointError(
            f"{folder / SETTINGS} has base_model_name_or_path = {shortened(repr(base))}, which is a local folder or "
            f"not a Hub id, so others cannot load it: {remedy} there."
        )
    tensors = open_safetensors(folder / WEIGHTS)[0]
    return Adapter(settings, {name: tuple(tensor.shape) for name, tensor in tensors.meta().items()}, base)


def _tags(metadata: Mapping[str, Any]) -> list[str]:
    tags = metadata.get("tags")
    return [tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else []


def _is_template(page: str) -> bool:
    """Return whether a card is the unmodified template of peft, apart from its metadata."""
    return _words(REGEX_YAML_BLOCK.sub("", page, count=1)) == _words(ModelCard.from_template(ModelCardData()).text)


def _words(text: str) -> list[str]:
    return ADDED_BY_PEFT.sub("", text).split()

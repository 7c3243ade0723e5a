"""Adapters saved by peft: a base model that others can load, and a model card that says how."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.repocard import REGEX_YAML_BLOCK

from ..errors import CheckpointError
from ..files.marks import is_untouched, marked
from ..files.safetensors import open_safetensors
from ..files.texts import parse_json
from ..markdown import code, fenced, one_line, plain
from ..model_card import CARD, PLACEHOLDER, is_repo_id, metadata_of

SETTINGS, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
SNAPSHOT = re.compile(r"models--([\w.-]+?)--([\w.-]+)[\\/]snapshots[\\/]")  # a folder of the Hub's cache
HEAD = re.compile(r"(?:base_model\.model\.)?(?:classifier|head|fc)\.weight")
AUTO_CLASS = re.compile(r"(?:[A-Z]\w*)?For([A-Z]\w{0,50})")
TAG_OF_BASE = "base_model:"
# What peft adds to its template of a page: versions, and how the base was quantised.
ADDED_BY_PEFT = re.compile(
    r"^(?:### Framework versions|- PEFT [\w.+-]+|## Training procedure|"
    r"The following `bitsandbytes` quantization config was used during training:|- \w*(?:bit|quant|llm_int8)\w*: .*)$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Adapter:
    """A saved adapter.

    Args:
        settings: Of peft.
        shapes: Of its tensors.
        base_model: Hub id of the model that it is for.
    """

    settings: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    base_model: str

    def page(self, written: str | None, more_tags: Sequence[str] = ()) -> str:
        """Return the page to send: what a person wrote, or else ours with the metadata that is there.

        Args:
            written: The page in the folder.
            more_tags: Words to find it by, for a page of ours.

        Raises:
            CheckpointError: What a person wrote names no base model, or another one.
        """
        said = metadata_of(written) if written is not None else {}
        if written is not None and not _is_template(written) and not is_untouched(written.encode()):
            bases = said.get("base_model")
            bases = bases if isinstance(bases, list) else [bases]
            tagged = {tag.rpartition(":")[2] for tag in _tags(said) if tag.startswith(TAG_OF_BASE)}
            if self.base_model not in bases or not tagged <= {self.base_model} or not all(map(is_repo_id, bases)):
                raise CheckpointError(
                    f"{CARD} names other base models than {SETTINGS}, or none: write base_model: {self.base_model} at "
                    "its top, and remove the others and the tags that name them."
                )
            return written
        tags = [one_line(tag) for tag in (*_tags(said), *more_tags) if not tag.startswith(TAG_OF_BASE)]
        kept = {key: value for key, value in said.items() if key not in ("base_model", "tags", "library_name")}
        known = {
            "base_model": self.base_model, "base_model_relation": "adapter", "library_name": "peft",
            "tags": list(dict.fromkeys([*tags, f"{TAG_OF_BASE}adapter:{self.base_model}", "vision", "plain-vit"])),
        }  # fmt: skip
        head = ModelCardData(**{"pipeline_tag": self._task(), **kept, **known}).to_yaml()
        return marked(str(ModelCard(f"---\n{head}\n---\n\n{self._body(kept.get('license'))}\n")))

    def _body(self, license: object) -> str:
        base = f"[{self.base_model}](https://huggingface.co/{self.base_model})"
        kind, rank = self.settings["peft_type"], self.settings.get("r")
        of_rank = f" of rank {rank}" if type(rank) is int and 0 < rank < 10**6 else ""
        count = sum(map(prod, self.shapes.values()))
        head = self._own_head()
        own = f" It has its own classifier for {head} labels, whose names it does not store." if head else ""
        stated = (
            f"The adapter is under {code(license)}; its base model has its own licence."
            if license
            else "> **No licence of the adapter is stated.** Without one nobody else may use it: ask its owner, or "
            "state it as `license` at the top of this page. Its base model has its own licence."
        )
        return (
            f"# {PLACEHOLDER}/{plain(self.base_model.rpartition('/')[2])}-adapter\n\n"
            f"An adapter ({code(kind)}{of_rank}) for {base}, with {count:,} parameters in {len(self.shapes)} tensors. "
            f"It is loaded into that model and cannot be used without it.{own}\n\n"
            f"## How to load it\n\n{fenced(self._loading(), 'python')}\n\n"
            "Use the image processor of the base model, unless this repository has one.\n\n"
            f"## License\n\n{stated}"
        )

    def _loading(self) -> str:
        options = [json.dumps(self.base_model)]
        if isinstance(revision := self.settings.get("revision"), str):
            options.append(f"revision={json.dumps(revision)}")
        if (count := self._own_head()) is not None:
            options += [f"num_labels={count}", "ignore_mismatched_sizes=True"]
        name = self._auto_class()
        return "\n".join([
            *(["import plain_vit"] * self._is_ours()), "from peft import PeftModel", f"from transformers import {name}",
            "", f"base = {name}.from_pretrained({', '.join(options)})",
            f'model = PeftModel.from_pretrained(base, "{PLACEHOLDER}/adapter")',
        ])  # fmt: skip

    def _own_head(self) -> int | None:
        """Return for how many labels the adapter brings a classifier."""
        heads = [shape[0] for name, shape in self.shapes.items() if HEAD.fullmatch(name) and len(shape) == 2]
        return heads[0] if heads else None

    def _class_of_base(self) -> tuple[str, str]:
        """Return the module and the class that peft has noted; nothing where it was given a task instead."""
        noted = self.settings.get("auto_mapping")
        noted = noted if isinstance(noted, dict) else {}
        return str(noted.get("parent_library")), str(noted.get("base_model_class"))

    def _is_ours(self) -> bool:
        return self._class_of_base()[0].rpartition(".")[2] == "modeling_plain_vit"

    def _auto_class(self) -> str:
        match = AUTO_CLASS.fullmatch(self._class_of_base()[1])
        if match:
            return f"AutoModelFor{match[1]}"
        return "AutoModelForImageClassification" if self._own_head() is not None else "AutoModel"

    def _task(self) -> str:
        classifies = self._auto_class() == "AutoModelForImageClassification"
        return "image-classification" if classifies else "image-feature-extraction"


def open_adapter(folder: Path) -> Adapter:
    """Read what peft saved; without the base model it cannot be built.

    Raises:
        CheckpointError: It is not whole, or for a base model that nobody else has.
    """
    if not (folder / WEIGHTS).is_file():
        raise CheckpointError(f"{folder} holds {SETTINGS} and no {WEIGHTS}: save the adapter as safetensors.")
    settings = parse_json((folder / SETTINGS).read_bytes(), str(folder / SETTINGS))
    if not isinstance(settings.get("peft_type"), str):
        raise CheckpointError(f"{folder / SETTINGS} names no peft_type: save it with peft.")
    base = settings.get("base_model_name_or_path")
    if not isinstance(base, str) or not is_repo_id(base) or Path(base).exists():
        cached = SNAPSHOT.search(str(base))
        do = f"write '{cached[1]}/{cached[2]}'" if cached else "push the base model, and write its id (user/name)"
        raise CheckpointError(
            f"{folder / SETTINGS} names {str(base)!r:.200} as base_model_name_or_path, which is a folder of this "
            f"machine or no id of the Hub, and nobody else can open: {do} there."
        )
    tensors = open_safetensors(folder / WEIGHTS)[0]
    return Adapter(settings, {name: tuple(tensor.shape) for name, tensor in tensors.meta().items()}, base)


def _tags(said: Mapping[str, Any]) -> list[str]:
    tags = said.get("tags")
    return [tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else []


def _is_template(page: str) -> bool:
    """Return whether a page is the one that peft writes, with nothing filled in below its metadata."""
    return _words(REGEX_YAML_BLOCK.sub("", page, count=1)) == _template()


@cache
def _template() -> list[str]:
    return _words(ModelCard.from_template(ModelCardData()).text)


def _words(text: str) -> list[str]:
    return ADDED_BY_PEFT.sub("", text).split()

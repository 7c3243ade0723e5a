"""Model cards for the Hub: architecture, origin, usage, results.

Unknown facts are omitted. A card edited by hand is never overwritten.
"""

import copy
import re
import urllib.parse
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import transformers
import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from huggingface_hub.utils import validate_repo_id
from transformers.image_utils import PILImageResampling

from ..configuration_plain_vit import PlainViTConfig
from ..conversion.parity import StageDifference
from ..conversion.report import Report
from ..conversion.sources.transformers.pixels import processor_from_transformers
from ..errors import CheckpointError, UnsafeFileError, counted, few
from ..files.marks import MARK, is_untouched, marked
from ..files.reading import read_checkpoint
from ..files.texts import parse_json, read_small_file
from ..system.environment import version
from .licenses import license_files
from .markdown import LONGEST, address, code, fenced, one_line, plain

CARD = "README.md"
TEMPLATE = Path(__file__).with_name("model_card.md")
PLACEHOLDER = "your-name"  # the owner of a model that is not on the Hub yet; replaced when pushing
RELATIONS = ("finetune", "adapter", "merge", "quantized")  # the Hub's relations to a base model
IMAGE_PROCESSOR = "PlainViTImageProcessor"
# Settings of an image processor that the card names, each with the setting that switches its step on.
STEPS = {
    "size": "do_resize",
    "resize_mode": "do_resize",
    "max_num_patches": "do_resize",
    "resample": "do_resize",
    "crop_size": "do_center_crop",
    "pad_color": "do_center_crop",
    "rescale_factor": "do_rescale",
    "image_mean": "do_normalize",
    "image_std": "do_normalize",
    "pad_size": "do_pad",
}
LONGEST_CITATION, MOST_CITATIONS = 5000, 10
ORIGIN = "Where the weights come from"  # title of a section
LONGEST_ORIGIN = 1000  # characters of a source's origin
WRITTEN = re.compile(r"\\(\W|_)|\[([^\]]*)\]\([^)]*\)|`")  # escapes, links and code spans
LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]{0,63}")  # the Hub's spelling
LICENSE_NAME = re.compile(r"[\w .,+()/:-]{1,100}")
MAX_CARD = 1_000_000  # characters of a source's model card that are read
BIBTEX = re.compile(r"^```bibtex\r?\n(.*?)\r?\n```", re.MULTILINE | re.DOTALL)
# Licences in timm's table of models that the Hub has under the same name; for others it uses "other".
LICENSES_OF_TIMM = {"apache-2.0", "mit", "cc-by-nc-4.0", "apple-ascl", "apple-amlr"}


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Facts about a model that its folder does not contain; whatever is not given is omitted from the card.

    Args:
        name: Title of the card (default: the name of the folder).
        origin: Origin of the weights, as Markdown sentences; untrusted text in it must be escaped with `markdown`.
        differences: Differences from the source's own model, stage by stage.
        license: Licence of the weights, not of the code, in the Hub's spelling ("apache-2.0", "other").
        license_name: Name of a licence that the Hub does not know, together with license "other".
        license_link: Link to the licence.
        license_from: Who stated the licence, such as "their source".
        base_model: Hub id of the model that this one was made from.
        base_model_relation: One of `RELATIONS`.
        datasets: Hub ids of the datasets that the weights were trained on.
        results: Evaluation results, for the table and for the Hub's leaderboards.
        curves: Figures in the folder, as paths relative to it, by caption.
        recipe: Training settings and their values.
        environment: Versions and hardware, by name.
        limits: Sentences about limitations, in addition to those that follow from the folder.
        citations: BibTeX entries, in addition to the paper's.
        tags: Tags, in addition to the tags of all plain-vit models.

    Raises:
        ValueError: An id is invalid, or the relation is not one of `RELATIONS`.
    """

    name: str | None = None
    origin: str | None = None
    differences: Sequence[StageDifference] | None = None
    license: str | None = None
    license_name: str | None = None
    license_link: str | None = None
    license_from: str | None = None
    base_model: str | None = None
    base_model_relation: str | None = None
    datasets: Sequence[str] = ()
    results: Sequence[EvalResult] = ()
    curves: Mapping[str, str] = field(default_factory=dict)
    recipe: Mapping[str, object] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    limits: Sequence[str] = ()
    citations: Sequence[str] = ()
    tags: Sequence[str] = ()

    def __post_init__(self) -> None:
        for repo_id in filter(None, (self.base_model, *self.datasets)):
            validate_repo_id(repo_id)
        if self.base_model_relation is not None and self.base_model_relation not in RELATIONS:
            raise ValueError(
                f"base_model_relation is {self.base_model_relation!r}: expected one of {', '.join(RELATIONS)}"
            )


def write_card(folder: Path, facts: ModelFacts) -> bool:
    """Write the model card `README.md` of a saved model, unless the existing one was edited by hand.

    A training script calls it after `save_pretrained`:

        write_card(folder, ModelFacts(
            origin="Fine-tuned from [google/vit-base-patch16-224](...) on the handwritten digits of scikit-learn.",
            base_model="google/vit-base-patch16-224", base_model_relation="finetune",
            results=[EvalResult("image-classification", "digits", "scikit-learn digits", "accuracy", 0.98,
                                dataset_split="test")],
            curves={"Loss and accuracy": "report/curves.png"},
            recipe={"optimizer": "sgd", "learning_rate": 0.01}, environment=environment(),
        ))

    Args:
        folder: A plain-vit folder, with `config.json` and weights.
        facts: Facts that the folder does not contain.

    Returns:
        Whether the card was written; False if an edited one was kept.

    Raises:
        CheckpointError: The folder contains no model.
        ValueError: A figure is missing from the folder.
    """
    path = folder / CARD
    if path.exists() and not is_untouched(path.read_bytes()):
        return False
    path.write_text(card_text(folder, facts), encoding="utf-8")
    return True


def card_text(folder: Path, facts: ModelFacts) -> str:
    """Return the model card without writing it; arguments and errors are those of `write_card`."""
    for name in facts.curves.values():
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name} does not exist: give figures by their paths in the folder.")
    text = _card(folder, facts).encode("utf-8", "backslashreplace").decode()  # a file name may not be valid UTF-8
    return marked(text)


def addressed(card: bytes, repo_id: str) -> bytes:
    """Return a generated card with its repository's id instead of the placeholder, and an edited card unchanged."""
    if not is_untouched(card):
        return card
    text = MARK.sub("", card.decode())
    return marked(re.sub(rf"\b{PLACEHOLDER}/[\w.-]*\w", repo_id, text)).encode()


def facts_of_conversion(report: Report, name: str, revision: str | None = None) -> ModelFacts:
    """Return the facts about a converted model.

    Args:
        report: Report of the conversion. If its source is a folder or on the Hub, the licence is read from its card.
        name: Title of the card.
        revision: Revision of the source on the Hub.
    """
    source = Path(report.source)
    on_hub = not source.exists()
    layout = f", layout {report.layout}" if report.layout else ""
    at = f" at {code(revision)}" if revision else ""
    link = f"[{report.source}](https://huggingface.co/{report.source}){at}"
    place = link if on_hub else code(source.resolve().name)  # its full path is private
    folder = source_folder(report, revision)
    said = {} if folder is None else source_facts(folder)
    sentences = [f"Converted from {place}, a checkpoint of {report.format}{layout}."]
    hints = dict(report.given_hints)
    dropped = hints.pop("drop", None)
    if given := ", ".join(code(f"{name} = {value!r}") for name, value in hints.items()):
        sentences.append(f"Settings that the checkpoint does not contain were given at conversion: {given}.")
    if dropped:
        sentences.append("Its classifier was left out.")
    return ModelFacts(
        name=name,
        origin=" ".join(sentences),
        differences=report.differences,
        base_model=report.source if on_hub else None,
        environment={package: version(package) for package in ("plain-vit", "torch", "transformers")},
        license_from="their source",
        **said,
    )


def source_folder(report: Report, revision: str | None = None) -> Path | None:
    """Return the folder that was converted (for a Hub id, the folder in the cache); None for a single file."""
    source = Path(report.source)
    if source.exists():
        return source if source.is_dir() else None
    try:
        only_the_folder: dict[str, Any] = {"local_files_only": True, "allow_patterns": []}
        return Path(huggingface_hub.snapshot_download(report.source, revision=revision, **only_the_folder))
    except LocalEntryNotFoundError:
        return None


def source_origin(folder: Path) -> tuple[str, str | None]:
    """Return the origin that the card of a local model states, as plain text, and the Hub id of its base model.

    Without a card, or if the card was edited, the text is empty.
    """
    page = _page(folder)
    base = metadata_of(page).get("base_model")
    if isinstance(base, list) and len(base) == 1:
        (base,) = base
    found = re.search(rf"^## {ORIGIN}\n\n(.+)$", page, re.MULTILINE) if is_untouched(page.encode()) else None
    words = WRITTEN.sub(lambda match: match[1] or match[2] or "", found[1]) if found else ""
    return plain(words, LONGEST_ORIGIN), base if is_repo_id(base) else None


def source_facts(folder: Path) -> dict[str, Any]:
    """Return licence, datasets and citations of a source's folder, as arguments of `ModelFacts`.

    They come from its model card, or else from timm's entries in `config.json`.
    """
    text = _page(folder)
    facts: dict[str, Any] = {}
    if said := metadata_of(text):
        facts |= _license_of_page(said)
        listed = said.get("datasets")
        facts["datasets"] = [name for name in (listed if isinstance(listed, list) else [listed]) if is_repo_id(name)]
    if "license" not in facts and (noted := _license_in_config(folder / "config.json")) is not None:
        facts |= {"license": noted} if noted in LICENSES_OF_TIMM else {"license": "other", "license_name": noted}
    if citations := [entry for entry in BIBTEX.findall(text) if len(entry) <= LONGEST_CITATION]:
        facts["citations"] = citations[:MOST_CITATIONS]
    return facts


def _page(folder: Path) -> str:
    """Return the beginning of a folder's model card, empty if there is none."""
    path = folder / CARD
    if not path.is_file():
        return ""
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        return file.read(MAX_CARD)


def metadata_of(page: str) -> dict[str, Any]:
    """Return the metadata of a model card; empty if there is none, or it cannot be parsed."""
    match = REGEX_YAML_BLOCK.search(page)
    try:
        said = yaml.safe_load(match[2]) if match else None
    except (yaml.YAMLError, ValueError, RecursionError):  # a broken card must not prevent using the weights
        said = None
    return {str(key): value for key, value in said.items()} if isinstance(said, dict) else {}


def _license_of_page(said: Mapping[str, Any]) -> dict[str, str]:
    """Return the licence in a card's metadata, if it has a valid form."""
    license = said.get("license")
    if not isinstance(license, str) or not LICENSE.fullmatch(license.lower()):
        return {}
    facts = {"license": license.lower()}
    name = said.get("license_name")
    if isinstance(name, str) and LICENSE_NAME.fullmatch(name):
        facts["license_name"] = name
    elif license.lower() == "other":
        facts["license_name"] = "unnamed"  # required by the Hub
    if (link := address(said.get("license_link"))) is not None:
        facts["license_link"] = link
    return facts


def _license_in_config(path: Path) -> str | None:
    """Return the licence in timm's config.json, which is in `pretrained_cfg`, or at the top level of old files."""
    try:
        settings = parse_json(read_small_file(path), path.name)
    except (CheckpointError, UnsafeFileError):
        return None
    tables = (settings, settings.get("pretrained_cfg"))
    noted = (table.get("license") for table in tables if isinstance(table, dict))
    return next((name.lower() for name in noted if isinstance(name, str) and LICENSE_NAME.fullmatch(name)), None)


def is_repo_id(name: object) -> bool:
    """Return whether this can be the id of a repository on the Hub."""
    try:
        validate_repo_id(name)  # type: ignore[arg-type]
    except HFValidationError:
        return False
    return isinstance(name, str)


# ---- the card ----


def _card(folder: Path, facts: ModelFacts) -> str:
    checkpoint = read_checkpoint(folder)
    settings = checkpoint.config or {}
    if settings.get("model_type") != PlainViTConfig.model_type:
        raise CheckpointError(f"{folder} holds no plain-vit model: give a folder written by `save_pretrained`.")
    try:
        config = PlainViTConfig.from_dict(settings)
        preprocessing = _preprocessing(checkpoint.preprocessor_config, settings)
    except (CheckpointError, ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{folder}: its settings describe no model: {error}") from error
    name = one_line(facts.name or folder.resolve().name) or "model"
    repo_id = f"{PLACEHOLDER}/{re.sub(r'[^A-Za-z0-9]+', '-', name).strip('-') or 'model'}"
    classifies = _is(config, "ImageClassification")
    tensors = checkpoint.tensors.meta().values()
    labels = [str(label) for _, label in sorted((config.id2label or {}).items())] if classifies else []
    prepared = checkpoint.preprocessor_config or {}
    is_padded = prepared.get("do_pad") and prepared.get("pad_size")
    edges = None if prepared.get("do_center_crop") or is_padded else prepared.get("size")
    many_sizes = bool(prepared.get("max_num_patches")) or (isinstance(edges, Mapping) and "longest_edge" in edges)
    card = ModelCard.from_template(
        _metadata(name, classifies, facts),
        str(TEMPLATE),
        name=name,
        repo_id=repo_id,
        facts=facts,
        config=config,
        size="many sizes" if many_sizes else "{} x {} pixels".format(*config.image_shape),
        parameters=sum(tensor.numel() for tensor in tensors),
        dtypes=sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors}),
        classifies=classifies,
        predicts_patches=_is(config, "MaskedImageModeling"),
        labels=labels,
        are_named=not all(label.startswith("LABEL_") for label in labels),
        has_code=(folder / "modeling_plain_vit.py").exists(),
        preprocessing=preprocessing,
        shared_labels=[name for name, count in Counter(labels).items() if count > 1],
        is_calibrated=any(result.metric_type == "calibration_error" for result in facts.results),
        needs_whole_patches=not (config.drop_partial_patches or many_sizes),  # or the image processor makes them whole
        license_link=address(facts.license_link),
        license_files=", ".join(f"[{plain(name)}]({urllib.parse.quote(name)})" for name in license_files(folder)),
        cites_paper=any("Worth 16x16 Words" in entry for entry in facts.citations),
        cell=partial(plain, longest=2 * LONGEST),
        listed=lambda names, most: few(list(map(plain, names)), most),
        code=code, counted=counted, fenced=fenced, plain=plain, quote=urllib.parse.quote,
    )  # fmt: skip
    return str(card)


def _metadata(name: str, classifies: bool, facts: ModelFacts) -> ModelCardData:
    results = [copy.copy(result) for result in facts.results]
    for result in results:
        vars(result).update({part: one_line(value) for part, value in vars(result).items() if isinstance(value, str)})
    return ModelCardData(  # omits what is None
        library_name="transformers",
        pipeline_tag="image-classification" if classifies else "image-feature-extraction",
        tags=list(dict.fromkeys(["vision", "vit", "plain-vit", *map(one_line, facts.tags)])),
        license=facts.license and one_line(facts.license),
        license_name=facts.license_name and one_line(facts.license_name),
        license_link=address(facts.license_link),
        base_model=facts.base_model,
        base_model_relation=facts.base_model_relation,
        datasets=list(facts.datasets) or None,
        metrics=list(dict.fromkeys(result.metric_type for result in results)) or None,
        model_name=name if results else None,
        eval_results=results or None,
    )


def _is(config: PlainViTConfig, task: str) -> bool:
    return any(task in str(kind) for kind in config.architectures or [])


def _preprocessing(settings: Mapping[str, Any] | None, model_settings: Mapping[str, Any]) -> str:
    """Name the image processor with these settings, and its settings, including its defaults."""
    if settings is None:
        return ""
    kind = str(settings.get("image_processor_type") or IMAGE_PROCESSOR)
    if not kind.startswith(IMAGE_PROCESSOR) and not hasattr(transformers, kind):  # a custom class
        return f"Images are prepared by {code(kind)}, the image processor in this repository."
    processor: Any = processor_from_transformers(settings, model_settings)
    found = processor.to_dict()
    used = {name: found[name] for name, step in STEPS.items() if found.get(step) and found.get(name) is not None}
    if "resample" in used:
        used["resample"] = PILImageResampling(used["resample"]).name.lower()
    words = f"Images are prepared by {code(type(processor).__name__)}, the image processor in this repository"
    named = ", ".join(code(f"{name} = {value}") for name, value in used.items())
    return f"{words}, with {named}." if named else f"{words}."

"""Model cards for the Hub: architecture, origin, usage, results.

Unknown facts are omitted. A card edited by hand is never overwritten.
"""

import copy
import inspect
import json
import math
import re
import urllib.parse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
import transformers
import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from huggingface_hub.utils import validate_repo_id
from transformers import Siglip2ImageProcessor, Siglip2ImageProcessorPil
from transformers.image_processing_backends import PilBackend, TorchvisionBackend
from transformers.image_utils import PILImageResampling

from ..configuration_plain_vit import PlainViTConfig
from ..conversion.parity import StageDifference
from ..conversion.report import Report
from ..conversion.sources.transformers.pixels import processor_from_transformers
from ..errors import CheckpointError, counted
from ..files.marks import MARK, is_untouched, marked
from ..files.reading import read_checkpoint
from ..image_processing_plain_vit import PIL_MODES, SourcePreprocessing
from ..scores import MULTI_LABEL, REGRESSION
from ..system.environment import version
from .licenses import license_files
from .markdown import LONGEST, address, code, fenced, one_line, plain

CARD = "README.md"
PLACEHOLDER = "your-name"  # the owner of a model that is not on the Hub yet; replaced when pushing
RELATIONS = ("finetune", "adapter", "merge", "quantized")  # the Hub's relations to a base model
IMAGE_PROCESSOR = "PlainViTImageProcessor"
RESIZE_WORDS = {
    None: "to {}",
    "cover": "to cover {}, aspect ratio kept",
    "contain": "to fit into {}, aspect ratio kept",
}
SHOWN_LABELS = 30
SHOWN_TWICE = 10  # names shared by several labels
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

VIT_CITATION = """\
@inproceedings{dosovitskiy2021image,
  title     = {An Image is Worth 16x16 Words: Transformers for Image Recognition at Scale},
  author    = {Alexey Dosovitskiy and Lucas Beyer and Alexander Kolesnikov and Dirk Weissenborn and Xiaohua Zhai and
               Thomas Unterthiner and Mostafa Dehghani and Matthias Minderer and Georg Heigold and Sylvain Gelly and
               Jakob Uszkoreit and Neil Houlsby},
  booktitle = {International Conference on Learning Representations},
  year      = {2021},
}"""


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
        results: Results of the model, for the table and for the Hub's leaderboards.
        curves: Figures in the folder, as paths relative to it, by caption.
        recipe: Training settings and their values.
        environment: Versions and hardware, by name.
        limits: Sentences about limitations, in addition to those that follow from the folder.
        citations: BibTeX entries, in addition to that of the paper.
        examples: Images for the widget, as paths in the folder or URLs, by title.
        tags: Tags in addition to those that every model here has.

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
    examples: Mapping[str, str] = field(default_factory=dict)
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
    for name in (*facts.curves.values(), *(place for place in facts.examples.values() if "://" not in place)):
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name} does not exist: give images by their paths in the folder.")
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
    if on_hub:
        at = f" at {code(revision)}" if revision else ""
        place = f"[{report.source}](https://huggingface.co/{report.source}){at}"
    else:
        place = code(source.resolve().name)  # its full path is private
    folder = source_folder(report, revision)
    said = {} if folder is None else source_facts(folder)
    sentences = [f"Converted from {place}, a checkpoint of {report.format}{layout}."]
    hints = {name: value for name, value in report.given_hints.items() if name != "drop"}
    if hints:
        given = ", ".join(code(f"{name} = {value!r}") for name, value in hints.items())
        sentences.append(f"Settings that the checkpoint does not contain were given at conversion: {given}.")
    if report.given_hints.get("drop"):
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
    """Return the folder that was converted, for a Hub id that in the cache; None where a single file was."""
    source = Path(report.source)
    if source.exists():
        return source if source.is_dir() else None
    try:
        only_the_folder: dict[str, Any] = {"local_files_only": True, "allow_patterns": []}
        return Path(huggingface_hub.snapshot_download(report.source, revision=revision, **only_the_folder))
    except LocalEntryNotFoundError:
        return None


def source_origin(folder: Path) -> tuple[str, str | None]:
    """Return what the card of a local model says of its origin, as plain text, and the Hub id of its base model.

    Without a card, or with one that was edited, there is no text.
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

    They are read from its model card, then from timm's entries in `config.json`.
    """
    text = _page(folder)
    facts: dict[str, Any] = {}
    if said := metadata_of(text):
        facts |= _license_of_page(said)
        facts["datasets"] = [name for name in _listed(said.get("datasets")) if is_repo_id(name)]
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
    """Return the metadata of a model card; empty where there is none, or what is there cannot be read."""
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
    """Return the licence from timm's config.json: in `pretrained_cfg`, or in old files at the top level."""
    if not path.is_file() or path.stat().st_size > MAX_CARD:
        return None
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return None
    tables = [settings, settings.get("pretrained_cfg")] if isinstance(settings, dict) else []
    noted = (table.get("license") for table in tables if isinstance(table, dict))
    return next((name.lower() for name in noted if isinstance(name, str) and LICENSE_NAME.fullmatch(name)), None)


def _listed(value: object) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [each for each in values if isinstance(each, str)]


def is_repo_id(name: object) -> bool:
    """Return whether this can be the id of a repository on the Hub."""
    try:
        validate_repo_id(name)  # type: ignore[arg-type]
    except HFValidationError:
        return False
    return True


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
    many_sizes = bool((checkpoint.preprocessor_config or {}).get("max_num_patches"))
    size = "many sizes" if many_sizes else "{} x {} pixels".format(*config.image_shape)
    sections = [
        (None, _what_it_is(config, classifies, checkpoint.tensors.meta(), size=size)),
        (ORIGIN, _origin(facts)),
        ("How to load it", _loading(repo_id, classifies, has_code=(folder / "modeling_plain_vit.py").exists())),
        ("Preprocessing", preprocessing),
        ("Results", _results(facts)),
        ("Training", _table(facts.recipe, "setting")),
        ("Environment", _table(facts.environment, "part")),
        ("Limits", _limits(config, classifies, facts, many_sizes=many_sizes)),
        ("License", _license(facts, license_files(folder))),
        ("Citation", "\n\n".join(fenced(entry, "bibtex") for entry in _citations(facts))),
    ]
    body = "\n\n".join(f"## {title}\n\n{text}" if title else text for title, text in sections if text)
    head = _metadata(name, repo_id, classifies, facts).to_yaml()
    return str(ModelCard(f"---\n{head}\n---\n\n# {plain(name)}\n\n{body}\n"))


def _metadata(name: str, repo_id: str, classifies: bool, facts: ModelFacts) -> ModelCardData:
    task = "image-classification" if classifies else "image-feature-extraction"
    results = [copy.copy(result) for result in facts.results]
    for result in results:
        vars(result).update({part: one_line(value) for part, value in vars(result).items() if isinstance(value, str)})
    known: dict[str, Any] = {
        "license": facts.license and one_line(facts.license),
        "license_name": facts.license_name and one_line(facts.license_name),
        "license_link": address(facts.license_link),
        "base_model": facts.base_model,
        "datasets": list(facts.datasets) or None,
        "metrics": list(dict.fromkeys(result.metric_type for result in results)) or None,
    }
    if facts.base_model_relation is not None:
        known["base_model_relation"] = facts.base_model_relation
    if facts.results:
        known |= {"model_name": name, "eval_results": results}
    if facts.examples:
        known["widget"] = [
            {"src": address(place) or f"https://huggingface.co/{repo_id}/resolve/main/{urllib.parse.quote(place)}",
             "example_title": one_line(title)}
            for title, place in facts.examples.items()
        ]  # fmt: skip
    tags = dict.fromkeys(["vision", "vit", "plain-vit", *map(one_line, facts.tags)])
    return ModelCardData(library_name="transformers", pipeline_tag=task, tags=list(tags), **known)


def _what_it_is(config: PlainViTConfig, classifies: bool, tensors: Mapping[str, torch.Tensor], *, size: str) -> str:
    count = sum(tensor.numel() for tensor in tensors.values())
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}
    labels = [str(label) for _, label in sorted((config.id2label or {}).items())]
    patch = " x ".join(map(str, config.patch_shape))
    channels = "" if config.num_channels == 3 else f" in {counted(config.num_channels, 'channel')}"
    sentences = [
        f"A Vision Transformer with {config.num_hidden_layers} layers of width {config.hidden_size} and "
        f"{config.num_attention_heads} heads, for images of {size}{channels} and patches of "
        f"{patch} pixels (height x width). It has {count:,} parameters, stored as "
        f"{' and '.join(sorted(dtypes))}."
    ]
    if classifies:
        regresses = config.problem_type == REGRESSION
        returned = f"It returns {counted(len(labels), 'number')} per image" if regresses else ""
        said = returned or f"It has {counted(len(labels), 'label')}"
        if all(label.startswith("LABEL_") for label in labels):
            sentences.append(f"{said}, whose {'names are' if len(labels) > 1 else 'name is'} not known.")
        else:
            shown = ", ".join(plain(label) for label in labels[:SHOWN_LABELS])
            rest = f" and {len(labels) - SHOWN_LABELS} more" if len(labels) > SHOWN_LABELS else ""
            sentences.append(f"{said}: {shown}{rest}.")
    else:
        returned = "one vector per patch" if config.pooling == "none" else "one vector per image and one per patch"
        sentences.append(f"It has no classifier: it returns {returned}.")
        if _is(config, "MaskedImageModeling"):
            sentences.append("`AutoModelForMaskedImageModeling` opens it with the layer that predicts masked patches.")
    return " ".join(sentences)


def _is(config: PlainViTConfig, task: str) -> bool:
    return any(task in str(kind) for kind in config.architectures or [])


def _origin(facts: ModelFacts) -> str:
    lines = [facts.origin] if facts.origin else []
    if facts.differences:
        worst = max(facts.differences, key=lambda stage: stage.relative)
        last = facts.differences[-1]
        lines.append(
            "Compared with the source's own model on the same pixels, in float32, the largest difference relative to "
            f"the largest value is {last.relative:.1e} for the {last.stage}, and over all stages at most "
            f"{worst.relative:.1e} ({worst.stage})."
        )
    return "\n\n".join(lines)


def _loading(repo_id: str, classifies: bool, *, has_code: bool) -> str:
    task, auto = (
        ("image-classification", "AutoModelForImageClassification")
        if classifies
        else ("image-feature-extraction", "AutoModel")
    )
    ways = [
        "With plain-vit installed:\n\n```python\nimport plain_vit\n"
        f'from transformers import pipeline\n\nrun = pipeline("{task}", "{repo_id}")\n'
        'print(run("image.png"))\n```'
    ]
    if has_code:
        ways.append(
            "Without it, using the code in this repository:\n\n```python\n"
            f"from transformers import AutoImageProcessor, {auto}\n\n"
            f'processor = AutoImageProcessor.from_pretrained("{repo_id}", trust_remote_code=True)\n'
            f'model = {auto}.from_pretrained("{repo_id}", trust_remote_code=True)\n```'
        )
    ways.append(
        "With plain-vit, as model, image processor and a report that accounts for every tensor:\n\n```python\n"
        "from plain_vit.conversion import from_checkpoint\n\n"
        f'converted = from_checkpoint("{repo_id}")\nprint(converted.report)\n```'
    )
    return "\n\n".join(ways)


def _preprocessing(settings: Mapping[str, Any] | None, model_settings: Mapping[str, Any]) -> str:
    """Return the steps of the image processor that these settings open, its defaults included."""
    if settings is None:
        return ""
    kind = str(settings.get("image_processor_type") or IMAGE_PROCESSOR)
    if not kind.startswith(IMAGE_PROCESSOR) and not hasattr(transformers, kind):  # of a class of its own
        return f"Images are prepared by {code(kind)}, the image processor in this repository."
    processor: Any = processor_from_transformers(settings, model_settings)
    if not _has_common_steps(processor):
        name = code(type(processor).__name__)
        return f"Images are prepared by transformers' {name} with its settings in this repository."
    ours = isinstance(processor, SourcePreprocessing)
    steps = []
    if processor.do_convert_rgb:
        mode = PIL_MODES.get(len(processor.image_mean)) if ours else "RGB"
        steps += [f"Images are converted to {'grayscale' if mode == 'L' else mode}."] if mode else []
    if processor.do_resize:
        resample = PILImageResampling.BILINEAR if processor.resample is None else processor.resample
        steps.append(f"They are resized {_resized(processor)} ({PILImageResampling(resample).name.lower()}).")
    if processor.do_center_crop:
        steps.append(f"They are center-cropped to {_extent(processor.crop_size)}; {_filling(processor)}.")
    if processor.do_rescale:
        factor = processor.rescale_factor
        steps.append(
            "Values are rescaled from [0, 255] to [0, 1]."
            if math.isclose(255 * factor, 1)
            else f"Values are multiplied by {factor:.8g}."
        )
    if processor.do_normalize:
        mean, std = (", ".join(f"{value:.8g}" for value in values) for values in _per_channel(processor))
        steps.append(f"Each channel is normalized with mean ({mean}) and standard deviation ({std}).")
    if getattr(processor, "do_pad", False):
        extent = _extent(processor.pad_size) if processor.pad_size else "the size of the largest image of the batch"
        steps.append(f"They are padded with zeros at the bottom and at the right to {extent}.")
    if not steps:
        return ""
    steps[0] = re.sub(r"^They\b", "Images", steps[0])
    return " ".join([*steps, "The image processor in this repository applies these steps."])


def _has_common_steps(processor: Any) -> bool:
    """Return whether a processor takes transformers' common steps (as ViT's and CLIP's do), ours, or SigLIP 2's."""
    if isinstance(processor, SourcePreprocessing | Siglip2ImageProcessor | Siglip2ImageProcessorPil):
        return True
    common = {*TorchvisionBackend.__mro__, *PilBackend.__mro__}
    own = [vars(kind).items() for kind in type(processor).__mro__ if kind not in common]
    return not any(inspect.isfunction(value) and name != "__init__" for members in own for name, value in members)


def _resized(processor: Any) -> str:
    """Return the size to which a processor resizes, in words."""
    if most := getattr(processor, "max_num_patches", None):
        side = processor.patch_size
        return f"to at most {most} patches of {side} x {side} pixels, aspect ratio kept"
    size = processor.size
    if size.shortest_edge and size.longest_edge:
        return (
            f"to {size.shortest_edge} pixels along the shortest edge, or less where the longest edge would exceed "
            f"{size.longest_edge} pixels"
        )
    if size.shortest_edge:
        return f"to {size.shortest_edge} pixels along the shortest edge"
    if size.max_height and size.max_width:
        return f"to at most {size.max_height} x {size.max_width} pixels, aspect ratio kept"
    return RESIZE_WORDS[getattr(processor, "resize_mode", None)].format(_extent(size))


def _filling(processor: Any) -> str:
    """Return what a centre crop fills the area beyond the image with."""
    color = getattr(processor, "pad_color", None)
    shown = f"({', '.join(f'{level:.8g}' for level in color)})" if color and any(color) else "black"
    return f"the area beyond a smaller image is {shown}"


def _per_channel(processor: Any) -> Iterator[Sequence[float]]:
    for values in (processor.image_mean, processor.image_std):
        yield values if isinstance(values, Sequence) else [values]


def _results(facts: ModelFacts) -> str:
    parts = []
    if facts.results:
        lines = ["| dataset | split | metric | value |", "|---|---|---|---|"]
        for result in facts.results:
            value = f"{result.metric_value:.4f}" if isinstance(result.metric_value, float) else result.metric_value
            metric = result.metric_name or result.metric_type
            lines.append(_row(result.dataset_name, result.dataset_split or "", metric, value))
        parts.append("\n".join(lines))
    parts += [f"![{plain(caption)}]({urllib.parse.quote(path)})" for caption, path in facts.curves.items()]
    return "\n\n".join(parts)


def _limits(config: PlainViTConfig, classifies: bool, facts: ModelFacts, *, many_sizes: bool) -> str:
    sentences = [*facts.limits]
    if classifies:
        sentences.append(_what_scores_say(config, facts))
        names = Counter(str(label) for label in (config.id2label or {}).values())
        if twice := [name for name, count in names.items() if count > 1]:
            rest = f" and {len(twice) - SHOWN_TWICE} more" if len(twice) > SHOWN_TWICE else ""
            listed = ", ".join(plain(name) for name in twice[:SHOWN_TWICE])
            sentences.append(f"Several labels share a name and differ only in their numbers: {listed}{rest}.")
    if not (config.drop_partial_patches or many_sizes):  # the image processor resizes to whole patches
        height, width = config.patch_shape
        sentences.append(f"Image heights must be multiples of {height} pixels, and widths multiples of {width}.")
    return "\n".join(f"- {sentence}" for sentence in sentences)


def _what_scores_say(config: PlainViTConfig, facts: ModelFacts) -> str:
    """Return the limits of what a classifier says, by the problem that it was trained for."""
    if config.problem_type == REGRESSION:
        return "Every image gets its numbers, even an image of something else."
    measured = any(result.metric_type == "calibration_error" for result in facts.results)
    unknown = "" if measured else ", and the calibration of the scores is unknown"
    if config.problem_type == MULTI_LABEL or config.num_labels == 1:
        return f"Each label is scored on its own, even for an image of something else{unknown}."
    return f"Every image gets one of the {config.num_labels} labels, even an image of something else{unknown}."


def _citations(facts: ModelFacts) -> list[str]:
    """Return the source's entries, and that of the paper if it is not among them."""
    paper = [] if any("Worth 16x16 Words" in entry for entry in facts.citations) else [VIT_CITATION]
    return [*facts.citations, *paper]


def _license(facts: ModelFacts, files: Sequence[str]) -> str:
    code_license = "The code in this repository (`*.py`) is under the Apache License 2.0."
    texts = ", ".join(f"[{plain(name)}]({urllib.parse.quote(name)})" for name in files)
    if facts.license is None and files:
        return f"The licence of the weights is in {texts}. {code_license}"
    if facts.license is None:
        return (
            "> **No licence of the weights is stated.** Without one nobody else may use them: ask their owner, or "
            f"state it as `license` in the metadata of this card.\n\n{code_license}"
        )
    link = address(facts.license_link)
    said = f", as {facts.license_from} says" if facts.license_from else ""
    text = f" ([text]({link}))" if link else f" ({texts})" if files else ""
    return f"The weights are under {code(facts.license_name or facts.license)}{text}{said}. {code_license}"


def _table(rows: Mapping[str, object], what: str) -> str:
    return "\n".join([f"| {what} | value |", "|---|---|", *(_row(*row) for row in rows.items())]) if rows else ""


def _row(*cells: object) -> str:
    return "| " + " | ".join(plain(cell, 2 * LONGEST) for cell in cells) + " |"


def _extent(size: Any) -> str:
    if size is None or not (size.height and size.width):
        raise ValueError(f"a size is {size}: expected height and width")
    return f"{size.height:d} x {size.width:d} pixels"

"""The advice in error messages works, and families that they name are correct.

The tests open files that plain-vit refuses, and try each keyword, candidate and command in the message with the true
values of the source: the result must be a model or an error about something else. Tests also fail for advice that they
do not follow, and for claims about families in words that are missing in `CLAIMS`.
"""

import contextlib
import io
import json
import pickle
import random
import re
import runpy
import shlex
import shutil
import struct
import subprocess
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import open_clip
import peft
import pytest
import timm
import torch
import torch.distributed.checkpoint
import torchvision
import vit_pytorch
from timm.models import list_models, list_modules, save_for_hf
from torch import nn
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto import configuration_auto

from plain_vit import PlainViTModel
from plain_vit.conversion import from_checkpoint, from_module
from plain_vit.conversion.registry import FORMATS
from plain_vit.conversion.sources.timm.arguments import OPENED
from plain_vit.conversion.sources.timm.constructors import CONSTRUCTORS
from plain_vit.conversion.sources.timm.names import families
from plain_vit.conversion.sources.timm.source import TIMM
from plain_vit.conversion.tables.format import Hints
from plain_vit.errors import (
    AmbiguousCheckpointError,
    CheckpointError,
    ExportError,
    PlainViTError,
    UnknownFormatError,
    option_words,
)
from plain_vit.files.reading import read_checkpoint
from plain_vit_command import HINTS, main, parser_of
from tests.cli.test_generated_attack import attack_many, attack_names, attack_shapes, save_bases
from tests.conftest import randomize_
from tests.files.bad_files import BAD_FILES
from tests.sizes import draws, few
from tests.sources.bad_models import BAD_MODELS
from tests.sources.other_code import OTHER_CODE, tensors
from tests.sources.test_families import (
    CLASSES,
    build,
    every_vision_class,
    refused_by_name,
    transformers_model,
)
from tests.sources.test_fuzzed_state_dicts import KINDS, NotBuilt, folder_of, truths
from tests.sources.test_timm_architectures import Unfilled
from tests.tiny import tiny_config

# ---- what is claimed, and what is advised ----

# Wording of claims, and the family that each names; `own` of a file contains its true families.
CLAIMS = (
    (r"timm's \w+ \((\w+)\.py\)", "timm {}"),
    (r"(?:timm's|or) (\w+)\.py \((?:[^()]|\([^()]*\))*\)", "timm {}"),
    (r"a checkpoint of (\w+):", "{}"),
    (r"(?:names|contains) a model of (\w+)", "{}"),
    (r"they look like (\w+(?: or \w+)*)", "{}"),
    (r"(?:the tensors of a ViT|this model) of (vit-pytorch)\b", "vit_pytorch"),
    (r"vit-pytorch's (\w+)\.\w+(?: (?:or|with) [\w.=]+)?(?:, or of its authors)?", "vit_pytorch {}"),
    (r"They look like (\w+)\.\w+(?: (?:or|with) [\w.=]+)?", "vit_pytorch {}"),
    (r"the tensors (?:have names of|are those of a model of) (transformers)\b", "{}"),
    (r"of (?:\w+ and |transformers' )?model_type '([^']*)'", "transformers {}"),
    (r"the tensors of torchvision's VisionTransformer()", "torchvision"),
    (r"a (?:Vision Transformer|model|NaFlexVit) of timm(?:'s \w+)? has()", "timm"),
    (r"parts of this (\w+) model", "{}"),
    (r"the tensors and the code of (\w+) do not", "{}"),
    (r"timm's VisionTransformer pools with the activation of these, its Eva with GELU()", "timm"),
    (r"several models of (vit-pytorch) side by side", "vit_pytorch"),
    (r"is not one of the \d+ Vision Transformers of timm [\d.]+ that plain-vit opens()", "timm"),
    (r"plain-vit's own names()", "plain_vit"),
    (r"(?:an open_clip model|th(?:is|e) head of open_clip's TimmModel)()", "open_clip"),
    (r"a CLIP with a modified ResNet()", "open_clip"),
    (r"the tensors of an adapter()", "adapter"),
)  # fmt: skip
# Wording that names packages without a claim.
NEUTRAL = (
    r"matches no known format \([^)]*\)", r"does not have the names of \w+",
    r"not the tensors of a model of timm that plain-vit opens, [^:]*:", r"it opens timm's [\w ,]*",
    r"match no plain ViT of vit-pytorch", r"expected one of transformers or plain-vit",
    r"none of the \d+ architectures of timm's \w+ \(\w+\.py\)",
    r"is not an architecture of \w+, the format of", r", but of \w+(?: and \w+)*$",
    r"architecture='\w+' is of timm, but the tensors are of open_clip's own tower",
    r"which plain-vit does not open: it opens [\w, -]*", r"[Vv]ersion 4 of transformers", r"of transformers for \w+",
    r"transformers itself refuses this configuration",
)  # fmt: skip
PACKAGES = re.compile(r"\b(timm|vit-pytorch|vit_pytorch|torchvision|transformers|open_clip|google)\b")

# The advice that the tests follow; anything else that looks like a keyword or a command fails.
KEY = re.compile(r"key='([^']*)' names a model of (\w+)")
RENAME = re.compile(r"rename it to end in (\.\w+)")
MEANT = re.compile(r"did you mean ([^?]*)\?")
SCRIPT = re.compile(r"python (-c '(?:[^']|'\"'\"')*'|-m torch\S* dcp_to_torch \S+ joined\.pt)")
CODE = re.compile(r"torch\.save\(torch\.(?:jit\.)?load\(.*'(?:tensors|saved)\.pt'\)")
OMIT = re.compile(r"[Oo]mit (?:it|them|format=, or give that one|the hint)\b")
LAYOUT = re.compile(r"expected layout= one of ([\w, ]+)")
FOLDER = re.compile(r"give the folder with it, or architecture=, the class, to see how they differ from it")
PLACE = re.compile(r"key= with its place, which ends in '([^']*)', opens it alone")
DROP = re.compile(r"leave the head out: drop=\('head',\) in Python, --drop head on the command line")
MOVE = re.compile(r"move preprocessor_config\.json \(or processor_config\.json\) out of the folder")
LABELS = re.compile(r"give id2label=, a list of (\d+) names \(--labels FILE on the command line\)")
LINE = re.compile(r"^  plain-vit .*$", re.MULTILINE)
FOLLOWED = (KEY, RENAME, MEANT, SCRIPT, CODE, OMIT, LAYOUT, FOLDER, PLACE, DROP, LABELS, LINE)
# An advised keyword, as opposed to one with a value that was found, such as image_size=7.
KEYWORD = re.compile(r"\b[a-z_]+=(?=[,;:.)]|$| (?!is|does|\())", re.MULTILINE)
COMMAND = re.compile(r"\bpython -|\bplain-vit (inspect|convert|verify|export|push|show|predict|embed|env)\b|--[a-z]")
QUOTED = re.compile(r"(?<!\w)'[^'\n]*'(?!\w)")
# Advice that cannot be followed here: it needs the source's pixels and logits, or the user's own program.
UNFOLLOWED = (
    r"or\s+reference=\(pixel_values, logits\)", r"for a class copied from one of them, give format=",
    r"try layer_norm_eps= or hidden_act=", r"choose one with key=\.", r"peft\.PeftModel[^\n]*",
    r"model\.merge_and_unload\(\)",
    r"with DeepSpeed installed, and give what it writes: python zero_to_fp32\.py \. joined",
    r"CLASS\.from_pretrained\([^)]*\)\.save_pretrained\('converted'\)",
)  # fmt: skip


@dataclass
class Refused:
    """A file or folder that does not open, or only with answers.

    Args:
        path: Path of the file or folder.
        own: Its true families, as in `CLAIMS`.
        truth: True values of settings that may be asked.
        given: Options that are passed from the start.
        trusted: Whether a command may run the code in the folder.
    """

    path: Path
    own: tuple[str, ...] = ()
    truth: Mapping[str, Any] = field(default_factory=dict)
    given: Mapping[str, Any] = field(default_factory=dict)
    trusted: bool = True


def said_of(path: Path, **options: Any) -> tuple[str, PlainViTError | None]:
    """Return the class and first line of the error, and the error; an empty text if the checkpoint opens."""
    try:
        from_checkpoint(path, **options)
    except PlainViTError as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}".replace(str(path), "PATH"), error
    return "", None


def follow(case: Refused) -> str:
    """Follow all advice in the error of a file, and return its first line; an empty text if the file opens."""
    first, error = said_of(case.path, **case.given)
    if error is None:
        return ""
    message = str(error).replace(str(case.path), "PATH")
    check_claims(message, case.own)
    for way, path, options in ways(case, error, str(error)):
        assert said_of(path, **options)[0] != first, f"{way} gets no further than:\n{error}"
    if isinstance(error, AmbiguousCheckpointError):
        follow_commands(case, error)
    rest = message
    for followed in FOLLOWED:
        rest = followed.sub("", rest)
    for unfollowed in UNFOLLOWED:
        rest = re.sub(unfollowed, "", rest)
    for name in error.candidates.keys() | error.otherwise.keys() if isinstance(error, AmbiguousCheckpointError) else ():
        rest = re.sub(rf"^  {name}= .*$", "", rest, flags=re.MULTILINE)
    rest = re.sub("^  - .*$", "", QUOTED.sub("", rest), flags=re.MULTILINE)
    for advised in (KEYWORD, COMMAND):
        assert not advised.search(rest), f"advice that no test follows: {rest}"
    return first


def check_claims(message: str, own: tuple[str, ...]) -> None:
    """Assert that every family claimed in a message is the file's own, and that packages are named only in claims."""
    rest = message
    for words in NEUTRAL:
        rest = re.sub(words, "", rest, flags=re.MULTILINE)
    for words, family in CLAIMS:
        for match in re.finditer(words, rest):
            claimed = family.format(match[1])
            assert claimed in own or claimed.split()[0] in own, f"{claimed!r} is claimed, of {own}: {message}"
        rest = re.sub(words, "", rest)
    rest = re.sub("^  .*$", "", QUOTED.sub("", rest), flags=re.MULTILINE)
    assert not PACKAGES.search(rest), f"a claim in other words: {rest}"


def ways(case: Refused, error: PlainViTError, message: str) -> Iterator[tuple[str, Path, dict[str, Any]]]:
    """Yield each piece of advice in a message: a description, the file to open, and the options."""
    given, truth = dict(case.given), dict(case.truth)
    if isinstance(error, AmbiguousCheckpointError):
        for asked in filter(None, (error.candidates, error.otherwise)):
            for name in asked.keys() & {"key", "format", "source"}:
                for value in asked[name]:
                    yield (
                        f"{name}={value!r}",
                        *((Path(str(value)), given) if name == "source" else (case.path, {**given, name: value})),
                    )
            if asked.keys() <= truth.keys():
                answers = {name: truth[name] for name in asked}
                yield f"{answers}", case.path, {**given, **answers}
    for key, _ in KEY.findall(message):
        yield f"key={key!r}", case.path, {**given, "key": key}
    for suffix in RENAME.findall(message):
        renamed = case.path.parent / "renamed" / f"{case.path.stem}{suffix}"
        renamed.parent.mkdir()
        yield f"renamed to {suffix}", Path(shutil.copy(case.path, renamed)), given
    for names in MEANT.findall(message):
        assert not truth or repr(truth["architecture"]) in names
        for name in re.findall("'([^']*)'", names):
            yield f"architecture={name}", case.path, {**given, "architecture": name}
    if OMIT.search(message) and given:
        kept = {name: value for name, value in given.items() if not re.search(rf"\b{name}\b", message)}
        yield f"only {kept} given", case.path, kept
    for names in LAYOUT.findall(message):
        for name in names.split(", "):
            yield f"layout={name}", case.path, {**given, "layout": name}
    for key in PLACE.findall(message):
        yield f"key={key!r}", case.path, {**given, "key": key}
    for count in LABELS.findall(message):
        yield "id2label=", case.path, {**given, "id2label": [f"name {number}" for number in range(int(count))]}
    if DROP.search(message):
        yield "drop='head'", case.path, {**given, "drop": ("head",)}
    if FOLDER.search(message) and (case.path.parent / "config.json").exists():
        yield "the folder", case.path.parent, given
    if MOVE.search(message):
        ignored = shutil.ignore_patterns("preprocessor_config.json", "processor_config.json")
        yield "moved", Path(shutil.copytree(case.path, case.path.parent / "moved", ignore=ignored)), given
    if case.trusted and (SCRIPT.search(message) or CODE.search(message)):
        yield "what the script writes", run_script(message, case.path.parent), given


def run_script(message: str, folder: Path) -> Path:
    """Run the Python code in a message like its command, and return the file that it writes."""
    found, code = SCRIPT.search(message), CODE.search(message)
    words = shlex.split(found[1]) if found else ["-c", f"import torch; {code[0]}" if code else ""]
    place = folder / "script"
    place.mkdir()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        patch.chdir(place)
        patch.setattr("sys.argv", words[1:])
        if words[0] == "-c":
            exec(compile(words[1], "message", "exec"), {})
        else:
            runpy.run_module(words[1], run_name="__main__")
    (written,) = place.iterdir()
    return written


def follow_commands(case: Refused, error: AmbiguousCheckpointError) -> None:
    """Run the commands that a question prints with true values, and assert that each gets further."""
    lines = [line.strip() for line in str(error).splitlines() if line.startswith("  plain-vit ")]
    for number, line in enumerate(lines):
        words = with_truth(words_of(line)[1:], case.truth, case.path.parent / f"out{number}")
        printed = io.StringIO()
        with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(io.StringIO()):
            code = main(words)
        same = f"plain-vit: {type(error).__name__}: {error}".splitlines()[0]
        assert printed.getvalue().splitlines()[:1] != [same], f"{line}\n{printed.getvalue()}"
        assert code == 0 or printed.getvalue()


def words_of(line: str) -> list[str]:
    """Split a command into words like a shell, which supports more quotes than shlex."""
    if "$'" not in line:
        return shlex.split(line)
    printed = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, check=True).stdout
    return printed.decode().split("\0")[:-1]


def with_truth(words: list[str], truth: Mapping[str, Any], out: Path) -> list[str]:
    """Check that the words of a conversion parse, and return them with the true values of the options."""
    for place, word in enumerate(words):
        if word == "VALUE":  # a setting that no tensor shows
            words[place : place + 1] = option_words("", truth[words[place - 1][2:].replace("-", "_")])[1:]
    options = parser_of(words[0]).read(words[1:])
    given = {name: getattr(options, name) for name in HINTS if getattr(options, name) is not None}
    hints = [word for name, value in given.items() for word in option_words(name, truth.get(name, value))]
    return ["convert", options.source, str(out), "--no-verify", *hints]


# ---- files of models that do not open ----

# Models of timm for which OTHER_CODE has names.
PLAIN: dict[str, Any] = {
    "num_attention_heads": 3, "attention_scale": "head_dim**-0.5", "layer_norm_eps": 1e-6, "hidden_act": "gelu",
    "pooling": "cls", "pool_prefix_tokens": False, "block_type": "sequential", "rope_type": "none",
    "image_size": (16, 20), "norm_type": "layer_norm", "mlp_type": "mlp",
}  # fmt: skip
# Families that errors may claim for files of other code.
OWN = {
    "MAE of its authors, whole, head in layers": ("timm",),
    "SimMIM of its authors": ("timm",),
    "SimMIM of a plain ViT": ("timm",),
    "an MAE beside its encoder": ("timm",),
    "a plain ViT with a head in layers": ("timm",),
    "Segment Anything": ("timm vision_transformer_sam",),
    "ViTDet": ("timm vision_transformer_sam",),
    "iBOT": ("timm",),
    "mmsegmentation": ("openmmlab",),
    "MoCo v3": ("timm",),
    "a backbone of lightly or solo-learn": ("timm",),
    "CONCH": ("open_clip",),
    "CCT of its authors": ("vit_pytorch cct",),
    "a decoder with a DPT neck": ("transformers",),
    "ComfyUI's vision tower of CLIP": ("transformers",),
    "an encoder between other parts of a plain ViT": ("timm",),
    **dict.fromkeys(("a tower of Qwen2-VL", "a tower of Qwen2.5-VL"), ("transformers",)),  # with its config.json
}
# A plain ViT of timm beside other parts, with the key that opens it.
OPENS_BY_KEY = {
    "SimMIM of a plain ViT": None,  # the mask token is in the encoder
    "an MAE beside its encoder": "encoder",
    "a backbone of lightly or solo-learn": "backbone",
    "an encoder between other parts of a plain ViT": "encoder",
}


def saved(state: Mapping[str, Any], path: Path) -> Path:
    torch.save(dict(state), path)
    return path


@pytest.mark.parametrize("title", OTHER_CODE)
def test_a_file_of_other_code_is_called_nothing_that_it_is_not(title: str, tmp_path: Path) -> None:
    path = saved(tensors(OTHER_CODE[title]), tmp_path / "other.pt")
    refusal = follow(Refused(path, OWN.get(title, ()), PLAIN))
    key = OPENS_BY_KEY.get(title)
    assert refusal
    assert (f"key={key!r} names a model of timm" in refusal) == (key is not None)
    if key is not None:
        assert follow(Refused(path, ("timm",), PLAIN, {"key": key})).startswith("Ambiguous")
        assert said_of(path, **PLAIN, key=key)[0] == ""


def sparse_file(state: Mapping[str, torch.Tensor], path: Path) -> Path:
    """Write zero tensors as a sparse file, whose bytes exist only when it is read."""
    words = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64", torch.int32: "I32",
             torch.bool: "BOOL", torch.float64: "F64", torch.uint8: "U8"}  # fmt: skip
    header, end = {}, 0
    for name, tensor in state.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": words[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return path


# Files whose parts also occur in other files, so that no tensor identifies them.
NAMELESS = {"deepseek_vit", "hiera", "hieradet_sam2", "qwen3_vit"}
OF_OTHERS = {"vision_transformer_sam"}  # live modules are refused; their files open as those of Segment Anything
CONVOLUTIONS = ("byobnet", "convnext", "cspnet", "mambaout", "resnet")  # an earlier version took them for ViTs


def check_timm(file: str, name: str, folder: Path) -> None:
    """Check that a model of timm opens live, or is refused live, by its tensors and by its architecture's name."""
    with torch.device("meta"), Unfilled():
        module = timm.create_model(name)
    kind = type(module)
    try:
        from_module(module)
    except PlainViTError:
        refused_by_name(module)
    else:
        opened = {path for constructor in CONSTRUCTORS for path in constructor.class_paths}
        assert f"{kind.__module__}.{kind.__qualname__}" in opened
        assert name in TIMM.architectures
        return
    path = sparse_file(module.state_dict(), folder / f"{name}.safetensors")
    refusal = follow(Refused(path, ("timm",)))
    assert bool(refusal) == (file not in OF_OTHERS)
    listed = file in families() and name in families()[file].entrypoints
    named = listed and file not in NAMELESS | OF_OTHERS
    assert re.findall(r"timm's (\w+)\.py \(", refusal) == ([file] if named else [])
    assert not named or refusal.startswith("UnknownFormatError")
    assert file not in CONVOLUTIONS or "matches no known format" in refusal
    if file in NAMELESS and refusal.startswith("Ambiguous"):  # a question without a true answer for its rotation
        error = said_of(path)[1]
        assert isinstance(error, AmbiguousCheckpointError)
        assert error.candidates["rope_type"] == ("none",)
        assert "architecture" not in error.candidates
        assert any("rope" in part for part, _ in module.named_modules())
    path.unlink()
    if listed:
        with torch.device("meta"):
            tensors = timm.create_model("test_vit").state_dict()  # whatever the name says about them
        with pytest.raises(UnknownFormatError, match=rf"{name}.*{file}\.py"):
            TIMM.describe_checkpoint(tensors, {"architecture": name}, Hints())


# Files that an earlier version took for others, or that come near: one of each kind by default.
QUICK = ["beit", "eva", "naflexvit", "swin_transformer", "vision_transformer_sam", *CONVOLUTIONS[:2]]
NEAR = [*QUICK, "cait", "crossvit", "hiera", "vision_transformer_hybrid", "vision_transformer_relpos", "volo", "xcit",
        *CONVOLUTIONS[2:]]  # fmt: skip


@pytest.mark.slow(quick=QUICK)
@pytest.mark.parametrize("file", [*NEAR, *few(sorted({*list_modules()} - {*NEAR}), 30)])
def test_a_model_of_timm_opens_or_is_called_nothing_that_it_is_not(file: str, tmp_path: Path) -> None:
    for name in few(sorted(list_models(module=file), key=len), 1):
        check_timm(file, name, tmp_path)


# Settings of the models in `tests/sources/test_families.py`.
LUCID: dict[str, Any] = {"num_attention_heads": 3, "image_size": (32, 32), "patch_size": (8, 8), "num_channels": 3}


@pytest.mark.slow(
    quick=["cvt.CvT", "distill.DistillableEfficientViT", "local_vit.LocalViT", "normalized_vit.nViT",
           "simple_vit_1d.SimpleViT", "simple_vit_with_specialized_cls.SimpleViT"]
)  # fmt: skip
@pytest.mark.parametrize("name", CLASSES)
def test_a_class_of_vit_pytorch_is_called_by_its_file(name: str, tmp_path: Path) -> None:
    path = saved(build(*CLASSES[name]).state_dict(), tmp_path / "vit.pt")
    refusal = follow(Refused(path, ("vit_pytorch",), LUCID))
    if "which plain-vit does not open" in refusal:
        assert name.partition(".")[0] in refusal or name == "distill.DistillableT2TViT"


# Folders of transformers with their classes; further classes are found in transformers.
HUGGING_FACE = {
    "data2vec-vision": "Data2VecVisionForSemanticSegmentation", "clip": "CLIPModel", "clap": "ClapModel",
    "convnext": "ConvNextModel",
    "eomt": "EomtForUniversalSegmentation", "glm4v_vision": "Glm4vVisionModel", "hiera": "HieraModel",
    "layoutlmv3": "LayoutLMv3Model",
    "qwen2_5_vl_vision": "Qwen2_5_VisionTransformerPretrainedModel", "sam_vision_model": "SamVisionModel",
    "swin": "SwinForImageClassification", "vit": "ViTModel", "vitdet": "VitDetModel", "yolos": "YolosModel",
}  # fmt: skip


def follow_hugging_face(model_type: str, module: Any, folder: Path) -> tuple[str, str]:
    """Follow the errors of a folder of transformers and of its file alone."""
    name = type(module).__name__
    path = sparse_file(revert_weight_conversion(module, module.state_dict()), folder / name / "model.safetensors")
    module.config.architectures = [name]
    module.config.save_pretrained(path.parent)
    own = (f"transformers {model_type}", f"transformers {module.config.model_type}")
    refusals = follow(Refused(path.parent, own)), follow(Refused(path, ("transformers",)))
    shutil.rmtree(path.parent)
    return refusals


@pytest.mark.slow(quick=["vitdet"])
@pytest.mark.parametrize(
    "model_type", [*HUGGING_FACE, *few(sorted({*configuration_auto.CONFIG_MAPPING_NAMES} - {*HUGGING_FACE}), 50)]
)
def test_a_folder_of_transformers_is_named_by_its_type_and_its_file_by_nothing_else(
    model_type: str, tmp_path: Path
) -> None:
    own = HUGGING_FACE.get(model_type, "")
    for name in few(every_vision_class(model_type, own), 1):
        if name == own:
            folder, file = follow_hugging_face(model_type, transformers_model(model_type, name), tmp_path)
            opens = model_type in ("clip", "glm4v_vision", "qwen2_5_vl_vision", "sam_vision_model", "vit")
            assert (folder == "") == opens
            assert opens or f"model_type '{model_type}'" in folder
            if model_type in ("clap", "convnext", "eomt", "layoutlmv3", "swin", "vitdet"):
                assert "matches no known format" in file
            continue
        try:
            module = transformers_model(model_type, name)
        except Exception:  # it needs a package, or has no settings of its own
            continue
        with contextlib.suppress(OSError, ValueError, KeyError):  # for example more tensors than a file may have
            follow_hugging_face(model_type, module, tmp_path)


# ---- files of other kinds ----


def dcp_folder(folder: Path) -> Path:
    """Save with torch.distributed.checkpoint in one process."""
    state = {"model": tensors(OTHER_CODE["a plain ViT with a head in layers"]), "step": 3}
    torch.distributed.checkpoint.save(state, checkpoint_id=folder / "dcp", no_dist=True)
    return folder / "dcp"


def onnx_file(folder: Path, name: str = "model.onnx") -> Path:
    graph = onnx.helper.make_graph([], "vit", [], [], [onnx.numpy_helper.from_array(np.ones((2, 3), np.float32), "w")])
    onnx.save(onnx.helper.make_model(graph, producer_name="pytorch"), folder / name)
    return folder / name


def exported_program(folder: Path) -> Path:
    torch.export.save(torch.export.export(nn.Linear(3, 5), (torch.ones(2, 3),)), folder / "model.pt2")
    return folder / "model.pt2"


def npz_named(folder: Path, name: str) -> Path:
    np.savez(folder / "a.npz", a=np.ones(3))
    return (folder / "a.npz").rename(folder / name)


def inside(make: Callable[[Path], Path]) -> Callable[[Path], Path]:
    def made(folder: Path) -> Path:
        make(folder)
        return folder

    return made


def parent_of_models(folder: Path) -> Path:
    for step in ("checkpoint-5", "checkpoint-10"):
        PlainViTModel(tiny_config()).save_pretrained(folder / step)
    return folder


# How each program makes its file, and how errors describe it; tests/files/bad_files.py has more.
OTHER_KINDS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "a folder of DCP": (dcp_folder, "is a checkpoint of torch.distributed.checkpoint"),
    "a shard of DCP": (lambda folder: next(dcp_folder(folder).glob("*.distcp")), "is part of a checkpoint of torch"),
    "its metadata": (lambda folder: dcp_folder(folder) / ".metadata", "is part of a checkpoint of torch.distributed"),
    "a folder around DCP": (inside(dcp_folder), "holds no weights itself; give one of the folders in it that do"),
    "a folder of checkpoints": (parent_of_models, "holds no weights itself; give one of the folders in it that do"),
    "ONNX": (onnx_file, "is an ONNX graph"),
    "a folder of ONNX": (inside(onnx_file), "is an ONNX graph"),
    "ONNX with another name": (partial(onnx_file, name="model.bin"), "is an ONNX graph"),
    "torch.export": (exported_program, "is a program written by torch.export"),
    "an npz named .pt": (partial(npz_named, name="a.pt"), "is a npz file by its content: rename it to end in .npz"),
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("title", OTHER_KINDS)
def test_a_file_of_another_kind_is_named_with_what_helps(title: str, tmp_path: Path) -> None:
    make, says = OTHER_KINDS[title]
    (tmp_path / "in").mkdir()
    path = make(tmp_path / "in")
    refusal = follow(Refused(path))
    assert says in refusal
    assert not re.search("damaged|truncated|holds no weights: expected", refusal)


# ---- pickles ----


class Hyperparameters:
    """An object that a training script saves beside its tensors."""


PICKLES: dict[str, Callable[[Any, Path], object]] = {
    "a whole module": torch.save,
    "one of an old torch": partial(torch.save, _use_new_zipfile_serialization=False),
    "objects beside tensors": lambda module, path: torch.save(
        {"state_dict": module.state_dict(), "config": Hyperparameters(), "epoch": 3}, path
    ),
    "a module in a dictionary": lambda module, path: torch.save({"model": module, "best": {"acc": 0.5}}, path),
    "another protocol": lambda module, path: torch.save(module.state_dict(), path, pickle_protocol=4),
    "no file of torch": lambda module, path: path.write_bytes(
        pickle.dumps({"model": {name: tensor.numpy() for name, tensor in module.state_dict().items()}, "by": "me"})
    ),
    "TorchScript": lambda module, path: torch.jit.script(module).save(path),
    "a compressed archive": lambda module, path: compressed(module.state_dict(), path),
}


def compressed(state: Mapping[str, torch.Tensor], path: Path) -> None:
    """Save tensors, and compress the archive like another program."""
    stored = io.BytesIO()
    torch.save(state, stored)
    with zipfile.ZipFile(stored) as before, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as after:
        for name in before.namelist():
            after.writestr(name, before.read(name))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("kind", PICKLES)
def test_the_script_for_a_pickle_keeps_its_tensors_bit_for_bit(kind: str, tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5))
    path = tmp_path / "it's a model.pt"
    PICKLES[kind](module, path)
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(path)
    assert "If you trust" in str(caught.value) or kind == "a compressed archive"
    written = run_script(str(caught.value), tmp_path)
    found = dict(read_checkpoint(written).tensors)
    assert found.keys() == module.state_dict().keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in module.state_dict().items())


# ---- adapters ----


@pytest.mark.parametrize("alone", [True, False])
def test_an_adapter_in_a_file_is_named_and_merging_it_helps(alone: bool, tmp_path: Path) -> None:
    module = randomize_(timm.models.VisionTransformer(img_size=16, patch_size=4, embed_dim=24, depth=2, num_heads=3))
    settings = peft.LoraConfig(target_modules=["qkv"], r=2, init_lora_weights=False)
    adapted = peft.get_peft_model(module, settings)
    if alone:
        adapted.save_pretrained(tmp_path / "adapter")
        path = tmp_path / "adapter" / "adapter_model.safetensors"
    else:
        path = saved(adapted.state_dict(), tmp_path / "adapted.pt")
    refusal = follow(Refused(path, ("adapter",)))
    assert "lora_A" in refusal
    assert "merge_and_unload()" in refusal
    assert ("and not those of the model" in refusal) == alone
    assert not alone or "is an adapter of peft without" in follow(Refused(path.parent))
    merged = adapted.merge_and_unload()
    truth = {**PLAIN, "image_size": 16}
    assert said_of(saved(merged.state_dict(), tmp_path / "merged.pt"), **truth)[0] == ""


def test_weights_of_loralib_are_named(tmp_path: Path) -> None:
    state = tensors(OTHER_CODE["iBOT"])
    state |= {f"blocks.0.attn.qkv.lora_{side}": torch.ones(2, 24) for side in "AB"}
    assert "not merged into the model" in follow(Refused(saved(state, tmp_path / "lora.pt"), ("adapter",)))


# ---- hints ----

FILES: dict[str, Callable[[], nn.Module]] = {
    "timm": lambda: timm.create_model("vit_tiny_patch16_224", depth=1),
    "vit_pytorch": lambda: vit_pytorch.ViT(
        image_size=16, patch_size=4, num_classes=5, dim=24, depth=1, heads=3, mlp_dim=20
    ),
    "torchvision": lambda: torchvision.models.VisionTransformer(16, 4, 1, 3, 24, 20, num_classes=5),
    "open_clip": lambda: open_clip.transformer.VisionTransformer(16, 4, 24, 1, 3, 2.0, output_dim=7),
}


def misspelt(name: str, draw: random.Random) -> str:
    """Return a name with two letters swapped, or one letter added, removed or changed."""
    place = draw.randrange(1, len(name) - 1)
    return draw.choice([
        name[:place] + name[place + 1] + name[place] + name[place + 2 :], name[:place] + name[place + 1 :],
        name[:place] + "x" + name[place:], name[:place] + "x" + name[place + 1 :],
    ])  # fmt: skip


@pytest.mark.parametrize("format", FILES)
def test_a_misspelt_architecture_is_called_unknown_and_those_spelt_alike_are_named(format: str, tmp_path: Path) -> None:
    path, draw = saved(FILES[format]().state_dict(), tmp_path / "model.pt"), random.Random(format)
    known = list(FORMATS[format].architectures)
    for name in draw.sample(known, min(10, len(known))):
        said = misspelt(name, draw)
        assert said not in known
        refusal = follow(Refused(path, (format,), {"architecture": name}, {"architecture": said}))
        assert f"architecture='{said}' is not an architecture of {format}" in refusal
    owner = "torchvision" if format == "timm" else "timm"
    other = {"timm": "vit_b_16", "torchvision": "vit_base_patch16_224"}.get(format, "deit_base_patch16_224")
    refusal = follow(Refused(path, (format,), {}, {"architecture": other}))
    assert f"but of {owner}" in refusal or "it has no effect here" in refusal or "omit it" in refusal


def test_a_command_has_all_that_was_said_and_opens(tmp_path: Path) -> None:
    both = {side: tensors(OTHER_CODE["iBOT"]) for side in ("first", "it's \x1b")}
    for state in both.values():
        del state["masked_embed"]
    path = saved(both, tmp_path / "of two.pt")
    assert follow(Refused(path, ("timm",), PLAIN)).startswith("AmbiguousCheckpointError: PATH contains several sets")
    for key in both:
        given = {"key": key, "layer_norm_eps": 1e-5, "image_mean": (0.5, 0.4, 0.3), "format": "timm"}
        _, error = said_of(path, **given)
        assert isinstance(error, AmbiguousCheckpointError)
        (line,) = (line for line in str(error).splitlines() if line.startswith("  plain-vit"))
        words = ["16x20" if word == "VALUE" else word for word in words_of(line)[1:]]  # no tensor shows it
        options = parser_of(words[0]).read(words[1:])
        assert {name: getattr(options, name) for name in given} == {**given, "image_mean": [0.5, 0.4, 0.3]}
        assert follow(Refused(path, ("timm",), PLAIN, given))
        assert said_of(path, **{**PLAIN, **given})[0] == ""


# ---- tensors that are missing ----


@pytest.mark.slow(quick=["open_clip"])
@pytest.mark.parametrize("format", FILES)
def test_a_missing_tensor_is_named_or_nothing_else_is_wrong(format: str, tmp_path: Path) -> None:
    state = FILES[format]().state_dict()
    for name in state:
        path = saved({other: tensor for other, tensor in state.items() if other != name}, tmp_path / "model.pt")
        assert "describe no model" not in said_of(path)[0], name


# ---- long names ----


def test_no_message_is_cut_inside_a_name(tmp_path: Path) -> None:
    names = [f"blocks.{index}.attn.{'rel_pos_h' * (1 + 200 * (index == 1))}" for index in range(9)]
    state = {**tensors(OTHER_CODE["iBOT"]), **{name: torch.ones(2) for name in names}}
    path = saved(state, tmp_path / "model.pt")
    for given in ({}, {"format": "torchvision"}, {"key": "none"}):
        _, error = said_of(path, **given)
        assert error is not None
        quoted = re.findall(r"'([^']*)'", re.sub(r"'[^' ]*\.\.\.[^' ]*' \(\d+ characters\)", "", str(error)))
        assert {name for name in quoted if name.startswith("blocks")} <= set(state)


# ---- the broken files and the fuzzed ones ----

# Families of the names in the files of each table of broken models.
OWN_OF_BROKEN = {"timm": ("timm",), "vit-pytorch": ("vit_pytorch",)}
SOME_BROKEN = [title for title in BAD_FILES if "named" in title or title.startswith(("index", "folder"))][::4]


def follow_bad_file(title: str, folder: Path) -> None:
    (folder / "in").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        follow(Refused(BAD_FILES[title].make(folder / "in"), trusted=title.endswith("of a whole module")))


def follow_bad_model(title: str, folder: Path) -> None:
    (folder / "in").mkdir()
    make, _, _, hints = BAD_MODELS[title]
    path = make(folder / "in")
    options = parser_of("inspect").read([str(path), *hints])
    given = {name: getattr(options, name) for name in HINTS if getattr(options, name) is not None}
    own = next((own for words, own in OWN_OF_BROKEN.items() if title.startswith(words)), ())
    follow(Refused(path, own, LUCID if own == ("vit_pytorch",) else {}, given))


@pytest.mark.slow(quick=[*SOME_BROKEN, *list(BAD_MODELS)[::6]])
@pytest.mark.parametrize("title", [title for title in [*BAD_FILES, *BAD_MODELS] if "100 MB" not in title])
def test_what_a_broken_file_gets_helps(title: str, tmp_path: Path) -> None:
    (follow_bad_file if title in BAD_FILES else follow_bad_model)(title, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_random_model_gets_helps(kind: str, tmp_path: Path) -> None:
    draw_model, followed, count = KINDS[kind][0], 0, draws(3, nightly=100)
    for seed in range(10 * count):
        draw = random.Random(seed)
        random.seed(seed)
        try:
            module: Any = draw_model(draw)
        except NotBuilt:
            continue
        place = tmp_path / str(seed)
        place.mkdir()
        if draw_model is folder_of:
            save_for_hf(module, str(place), safe_serialization=True)
            path = place
        else:
            # Every third file also has foreign parts.
            strangers = {"neck.0.weight": torch.ones(3, 5), "head.1.weight": torch.ones(2)} if seed % 3 == 0 else {}
            path = saved({**module.state_dict(), **strangers}, place / "model.pt")
        truth = {name: value for name, value in truths(module).items() if value is not None}
        follow(Refused(path, ("timm",), truth, {} if draw_model is folder_of else {"format": "timm"}))
        shutil.rmtree(place)
        followed += 1
        if followed == count:
            return
    raise AssertionError(f"only {followed} models were built")


@pytest.mark.slow
@pytest.mark.parametrize("attack", [attack_names, attack_many, attack_shapes])
def test_what_an_attack_gets_helps(attack: Callable[..., list[str]], tmp_path: Path) -> None:
    (tmp_path / "bases").mkdir()
    save_bases(tmp_path / "bases")
    for seed in range(draws(6, nightly=60)):
        place = tmp_path / str(seed)
        place.mkdir()
        words = attack(random.Random(seed), tmp_path / "bases", place)
        path = next((Path(word) for word in words if word.startswith(str(place))), None)
        if path is not None and path.exists():
            follow(Refused(path, (*FORMATS, "plain_vit", "adapter")))
        shutil.rmtree(place)


# ---- live modules ----


def test_the_refusal_of_a_live_module_lists_all_that_opens_of_its_package() -> None:
    opened = {name for names in TIMM.opens.values() for name in names}
    assert opened == set(re.findall(r"\w+", OPENED)) - {"and"}
    with torch.device("meta"):
        refused = {
            "timm": timm.create_model("xcit_nano_12_p8_224"), "transformers": transformers_model("swin", "SwinModel"),
            "vit_pytorch": build(*CLASSES["cvt.CvT"]), "torchvision": torchvision.models.swin_t(),
            "open_clip": open_clip.transformer.TextTransformer(),
        }  # fmt: skip
    for format, module in refused.items():
        with pytest.raises(ExportError, match="does not open yet") as caught:
            from_module(module)
        listed = [name for names in FORMATS[format].opens.values() for name in names]
        assert any(f"it opens {', '.join(names)}" in str(caught.value) for names in FORMATS[format].opens.values())
        assert len(listed) > 0
        assert "characters" not in str(caught.value)

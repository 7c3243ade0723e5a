"""A study, read from its YAML file, and its training runs."""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from plain_vit.training.recipes import RECIPES

HERE = Path(__file__).parent
ROOT = HERE.parent
SIZES = ("smoke", "desk", "paper")
SCRIPTS = {"finetune": "examples/finetune_image_classification.py", "masked": "examples/pretrain.py"}
CHOOSING_SEED = 0  # seed of the runs that choose the learning rate; reported runs have other seeds
FIRST, CHOOSE, REPORT = "first", "choose", "report"  # roles: an earlier stage, a choice, a result
COMPUTE = "compute"  # value of a study's `x`: contenders are placed by their compute
STUDY_FIELDS = {"title", "question", "paper", "prediction", "contenders", "seeds", "learning_rates", "model", "options",
                "choosing", "sizes", "stages", "x"}  # fmt: skip
# Options of a recipe that are also fields of a plain ViT's config.
FIELDS_OF_VITS = ("dropout", "drop_path_rate", "initialization")
LEVEL_FIELDS = {"model", "options", "choosing", "learning_rates", "seeds", "launch"}
CONTENDER_FIELDS = {"model", "times", "options", "after", "checkpoint", "sizes", "x", "series", "learning_rates"}
STAGE_FIELDS = {"script", "options"}


@dataclass(frozen=True)
class Run:
    """One training run: a command of a training script.

    Args:
        study: name of the study.
        size: smoke, desk or paper.
        contender: the contender it was made for; other contenders may share an earlier stage.
        role: FIRST, CHOOSE or REPORT.
        seed: seed of the run.
        learning_rate: peak learning rate; for an earlier stage it is among the options.
        script: one of SCRIPTS.
        options: options of the script, without model and folder.
        model: fields of the config, including its `type`; None if the run starts from the model of `after`.
        after: the run whose model this run starts from.
        checkpoint: a file, folder or Hub id that the run starts from.
    """

    study: str
    size: str
    contender: str
    role: str
    seed: int
    learning_rate: float
    script: str
    options: Mapping[str, Any] = field(hash=False)
    model: Mapping[str, Any] | None = field(hash=False)
    after: "Run | None" = None
    checkpoint: str | None = None

    @cached_property
    def key(self) -> str:
        """Return the identity of the run: a hash of everything its result depends on."""
        content = [self.script, self.options, self.model, self.learning_rate, self.seed]
        content.append(self.after.key if self.after else None)
        return digest([*content, self.checkpoint] if self.checkpoint else content)

    @property
    def name(self) -> str:
        """Return a name for people."""
        return f"{self.contender}, {self.role}, learning rate {self.learning_rate:g}, seed {self.seed}"

    def stages(self) -> Iterator["Run"]:
        """Yield the earlier runs that the run needs, in order, and the run itself."""
        if self.after is not None:
            yield from self.after.stages()
        yield self


def is_plain_vit(model: Mapping[str, Any]) -> bool:
    """Return whether a config's fields, including `type`, describe a plain ViT or the model in layer_positions.py."""
    return str(model.get("type", "plain_vit")).startswith("plain_vit")


def digest(content: Any) -> str:
    """Return a short hash of plain values."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Study:
    """A study in one size.

    Args:
        name: name of its file.
        size: smoke, desk or paper.
        description: content of the file, whose fields README.md explains.
        shared: the defaults of this size, from sizes.yaml.
    """

    name: str
    size: str
    description: Mapping[str, Any]
    shared: Mapping[str, Any]

    def only(self, contenders: Sequence[str]) -> "Study":
        """Return the study restricted to some of its contenders, with the same runs and results.

        Raises:
            ValueError: There is no such contender.
        """
        if unknown := [name for name in contenders if name not in self.contenders]:
            raise ValueError(f"{self.name} has no contender {unknown[0]!r}: expected some of {self.contenders}.")
        kept = {name: self.description["contenders"][name] for name in contenders}
        return dataclasses.replace(self, description={**self.description, "contenders": kept})

    @property
    def contenders(self) -> Sequence[str]:
        """Return the names of the contenders."""
        return [*self.description["contenders"]]

    @property
    def seeds(self) -> Sequence[int]:
        """Return the seeds of the reported runs."""
        return self._level("seeds") or [1, 2, 3]

    def learning_rates(self, contender: str) -> Sequence[float]:
        """Return the candidate learning rates of a contender."""
        own = self.description["contenders"][contender] or {}
        rates = own.get("learning_rates") or self._level("learning_rates")
        return [float(rate) for rate in rates[: 1 if self.size == "smoke" else None]]  # YAML reads 1e-3 as a string

    def run(self, contender: str, role: str, learning_rate: float, seed: int) -> Run:
        """Return a run of a contender, linked to the runs of its earlier stages."""
        own = self.description["contenders"][contender] or {}
        here = own.get("sizes", {}).get(self.size, {})
        shared = self._merged("model") if is_plain_vit(own.get("model", {})) else {}  # other classes have other fields
        model = {**shared, **own.get("model", {}), **here.get("model", {})}
        model |= {name: model[name] * factor for name, factor in own.get("times", {}).items()}
        options = {**self._merged("options"), **own.get("options", {}), **here.get("options", {})}
        if role == CHOOSE:
            options |= self._merged("choosing")
        before = None
        for name in own.get("after", ()):
            before = self._stage(name, contender, model, seed, before)
        return Run(
            self.name, self.size, contender, role, seed, learning_rate, "finetune", _given(options, model),
            model if before is None else None, before, here.get("checkpoint", own.get("checkpoint")),
        )  # fmt: skip

    def _stage(self, name: str, contender: str, model: Mapping[str, Any], seed: int, before: Run | None) -> Run:
        stage = self.description["stages"][name]
        here = stage.get("sizes", {}).get(self.size, {})
        script = stage.get("script", "finetune")
        # The study's own options apply to the last stage.
        shared = self.shared["options"] if script == "finetune" else {}
        options = {**shared, **stage.get("options", {}), **here.get("options", {})}
        rate = float(options.pop("learning_rate"))
        return Run(
            self.name, self.size, contender, FIRST, seed, rate, script, _given(options, model),
            None if before else model, before,
        )  # fmt: skip

    def _merged(self, name: str) -> dict[str, Any]:
        layers = [self.shared, self.description, self.description.get("sizes", {}).get(self.size, {})]
        return {key: value for layer in layers for key, value in layer.get(name, {}).items()}

    def _level(self, name: str) -> Any:
        layers = [self.description.get("sizes", {}).get(self.size, {}), self.description, self.shared]
        return next((layer[name] for layer in layers if name in layer), None)

    @property
    def launch(self) -> str:
        """Return the command that launches a script."""
        return self._level("launch") or "python"


def _given(options: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options without those that a study unsets with null, or that are fields of plain ViTs only."""
    given = {name: value for name, value in options.items() if value is not None}
    if is_plain_vit(model):
        return given
    recipes = [RECIPES[name].options for name in given.get("recipe", [])]
    return given | {name: "default" for name in FIELDS_OF_VITS if any(name in recipe for recipe in recipes)}


def study_names() -> list[str]:
    """Return the names of all studies."""
    return sorted(path.stem for path in HERE.glob("*.yaml") if path.stem != "sizes")


def open_study(name: str, size: str, folder: Path = HERE) -> Study:
    """Read a study from its file.

    Raises:
        ValueError: There is no such study or size, or the file has unknown fields or lacks some.
    """
    file = folder / f"{name}.yaml"
    if size not in SIZES or not file.is_file() or name == "sizes":
        raise ValueError(f"There is no study {name!r} of size {size!r}: expected one of {study_names()}, of {SIZES}.")
    description = yaml.safe_load(file.read_text(encoding="utf-8"))
    shared = yaml.safe_load((HERE / "sizes.yaml").read_text(encoding="utf-8"))[size]
    _check(file, "", description, STUDY_FIELDS, {"title", "question", "paper", "prediction", "contenders"})
    for each, level in {"shared": shared, **description.get("sizes", {})}.items():
        _check(file, f"sizes.{each}", level, LEVEL_FIELDS)
    for each, stage in description.get("stages", {}).items():
        _check(file, f"stages.{each}", stage, STAGE_FIELDS | {"sizes"})
    for each, contender in description["contenders"].items():
        _check(file, f"contenders.{each}", contender or {}, CONTENDER_FIELDS)
        if unknown := {*(contender or {}).get("after", ())} - description.get("stages", {}).keys():
            raise ValueError(f"{file.name}: {each} comes after {unknown}, which no stage is called: correct it.")
        if {"after", "checkpoint"} <= (contender or {}).keys():
            raise ValueError(f"{file.name}: {each} has a stage before it and a checkpoint: give one of them.")
    if (by := description.get("x", COMPUTE)) != COMPUTE:
        raise ValueError(f"{file.name}: x is {by!r}: expected {COMPUTE!r}, or each contender's own x.")
    study = Study(name, size, description, shared)
    for each in study.contenders:
        if size != "smoke" and len(study.learning_rates(each)) < 3:
            raise ValueError(
                f"{file.name}: {each} has {study.learning_rates(each)}: expected 3 learning rates or more."
            )
    return study


def _check(file: Path, where: str, found: Mapping[str, Any], known: set[str], needed: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    place = f"{file.name}, {where}" if where else file.name
    if unknown := found.keys() - known:
        raise ValueError(f"{place} has {sorted(unknown)}: expected only {sorted(known)}.")
    if missing := needed - found.keys():
        raise ValueError(f"{place} lacks {sorted(missing)}: add them.")

"""The plan of a conversion before it runs: model, table, tensors, and the source's own model for comparison."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import psutil
import torch
from torch import nn
from transformers import PreTrainedModel

from .. import modeling_plain_vit as modeling
from ..configuration_plain_vit import PlainViTConfig
from ..errors import ExportError, MappingError, in_bytes
from ..files.tensors import LazyTensors
from .dtypes import common_dtype, several_dtypes
from .parity import memory_of_probing
from .tables.engine import Row, convert, ignored_names, revert, sources_of, stream
from .tables.format import Description, Format


class SourceModule(NamedTuple):
    """A model of the source's own package, its layout, and whether it was built from the source's own configuration."""

    module: nn.Module
    layout: str | None
    is_independent: bool = False


@dataclass
class ConversionPlan:
    """The plan to convert a checkpoint. Everything is known except the values of the tensors, which are not read yet.

    Args:
        whole: Our model on the meta device, with the names of the rows.
        rows: The conversion table.
        tensors: The source's tensors, by the names of the rows. If they have several dtypes, they are converted on
            reading to the dtype that holds all values exactly.
        description: The description of the checkpoint.
        origin: The format of the checkpoint; None for plain-vit's own.
        settings: Contents of its `config.json`.
    """

    whole: PreTrainedModel
    rows: Sequence[Row]
    tensors: LazyTensors
    description: Description
    origin: Format | None
    settings: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = field(init=False, default=())

    def __post_init__(self) -> None:
        if len({entry.dtype for entry in self.tensors.entries.values()}) < 2:
            return
        unused = self.ignored
        dtypes = [entry.dtype for name, entry in self.tensors.entries.items() if name not in unused]
        if note := several_dtypes(dtypes):
            self.tensors, self.notes = self.tensors.in_dtype(common_dtype(dtypes)), (note,)

    @property
    def model(self) -> PreTrainedModel:
        """The resulting model; only the encoder if there is no classifier."""
        return self.whole if self.origin is None else without_empty_head(self.whole)

    @property
    def ignored(self) -> dict[str, str]:
        """The tensors that no row uses, each with the reason why our model does not need it."""
        read = {name for names in sources_of(self.rows, self.whole.state_dict()).values() for name in names}
        return ignored_names([name for name in self.tensors if name not in read], self.description.ignored)

    def load(
        self,
        converted: dict[tuple[object, ...], dict[str, torch.Tensor]] | None = None,
        *,
        mmap: bool = False,
    ) -> PreTrainedModel:
        """Load the weights into the model.

        Args:
            converted: Cache of converted weights by table. Models with equal tables share their memory.
            mmap: Memory-map also files that their writers may overwrite in place.
        """
        shapes = ((name, tensor.shape) for name, tensor in self.whole.state_dict().items())
        key = (*map(repr, self.rows), *shapes)
        state = (converted or {}).get(key)
        if state is None:
            state = self._convert(self.tensors.mapped(overwritten=mmap), owned=True)
            if converted is not None:
                converted[key] = state
        self.whole.load_state_dict(state, assign=True)
        return self.model.eval()

    def check(self) -> PreTrainedModel:
        """Check names, shapes and dtypes of the tensors, and return the model on the meta device, with their dtype."""
        try:
            self.whole.load_state_dict(self._convert(self.tensors.meta()), assign=True)
        except MappingError:
            deque(self.stream(), maxlen=0)  # also reports errors in the values
            raise
        return self.model.eval()

    def stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Read and convert the tensors one by one, named as in the resulting model."""
        prefix = "" if self.model is self.whole else "vit."
        expected, description = self.whole.state_dict(), self.description
        tensors = self.tensors.mapped()
        for name, tensor in stream(self.rows, tensors, expected, description.config, description.ignored):
            yield name.removeprefix(prefix), tensor

    def source_module(self) -> SourceModule | str:
        """Build the source's own model with random weights, or return the reason why it cannot be built."""
        if self.origin is None:
            return "the source is plain-vit's own"
        # Copies of the weights: their model, its random weights, our model; for another dtype, two models in float32.
        dtypes = {entry.dtype for entry in self.tensors.entries.values()}
        parameters = sum(parameter.numel() for parameter in self.whole.parameters())
        needed = 4 * parameters * (3 if dtypes == {torch.float32} else 5) + memory_of_probing(self.description.config)
        if (free := psutil.virtual_memory().available) < needed:
            return f"it takes {in_bytes(needed)} of memory, but only {in_bytes(free)} are free"
        # A layout of another release differs from the installed one at most in the names and axes of tensors.
        reasons = []
        assumes_head = any(one.field == "head" for one in self.description.inferences)
        try:
            module = None if assumes_head else self.origin.independent_module(self.description, self.settings)
            if module is not None:
                return SourceModule(module, self.description.layout, is_independent=True)
        except ImportError as error:
            reasons.append(str(error))
        for layout in dict.fromkeys([self.description.layout, None]):
            try:
                return SourceModule(self.origin.build_module(self.description.config, layout), layout)
            except (ExportError, ImportError) as error:
                reasons.append(str(error))
        return reasons[0]

    def fill(self, theirs: SourceModule) -> Sequence[str]:
        """Load the source's tensors into the source's own model, and return notes for the report."""
        origin, config = cast(Format, self.origin), self.description.config
        if theirs.layout != self.description.layout:
            fill_module(theirs.module, origin, config, self.whole.state_dict(), theirs.layout)
            return [f"compared with the installed release, whose tensor layout differs from {self.description.layout}"]
        tensors = self.tensors.mapped()
        unused = self.ignored
        used = {name: tensors[name] for name in tensors if name not in unused}
        theirs.module.load_state_dict(dict(origin.for_module(used, config, theirs.layout)), assign=True)
        return []

    def _convert(self, tensors: Mapping[str, torch.Tensor], owned: bool = False) -> dict[str, torch.Tensor]:
        expected, description = self.whole.state_dict(), self.description
        return convert(self.rows, tensors, expected, description.config, description.ignored, owned=owned)


def fill_module(
    module: nn.Module, target: Format, config: PlainViTConfig, tensors: Mapping[str, torch.Tensor], layout: str | None
) -> None:
    """Load our tensors into a module of another package."""
    state = revert(target.rows(config, layout), tensors, config)
    like = next(iter(tensors.values()))
    for name, tensor in module.state_dict().items():
        if tensor.numel() == 0:  # such as a class token with no rows
            state.setdefault(name, tensor.to(like.device, like.dtype))
    module.load_state_dict(dict(target.for_module(state, config, layout)), assign=True)


def without_empty_head(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model, or only its encoder if there is no classifier."""
    # Without a classifier DeiT still returns the mean of two tokens, which only the classification model computes.
    headed = model.config.num_labels or model.config.use_distillation_token
    return model if headed or isinstance(model, modeling.PlainViTForMaskedImageModeling) else cast(Any, model).vit

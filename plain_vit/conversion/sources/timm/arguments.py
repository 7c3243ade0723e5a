"""Arguments of timm's constructors, for conversion to and from our config, modules and state dicts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

# timm's classes that open, for error messages.
OPENED = "VisionTransformer, VisionTransformerDistilled, Eva, Beit, VisionTransformerRelPos and NaFlexVit"

# timm's name of a choice -> our name; if timm has several names, exports use the first.
POOLINGS = {"token": "cls", "": "none", "avg": "mean", "max": "max", "avgmax": "mean_max", "map": "map", "prr": "prr"}
NORMS = {"layernorm": "layer_norm", "rmsnorm": "rms_norm"}
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_tanh": "gelu_pytorch_tanh",
    "quick_gelu": "quick_gelu",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
}
QK_NORMS = {False: None, True: "norm"}
NEGATED = {False: True, True: False}


@dataclass(frozen=True)
class Argument:
    """An argument of a constructor that affects the outputs of its model, and where to read it from.

    A `config.json` holds the value itself, in `model_args` or in the architecture that it names.

    Args:
        name: timm's name.
        default: timm's default.
        field: Field of our config. Values that depend on several arguments or fields are corrected in `joint_fields`
            and `joint_arguments`.
        words: timm's names for the values of the field; None if both have the same values.
        module: Function that reads the argument from the `modules.Parts` of a live model.
        tensors: Function that reads it from the `plain.shapes.Parts` of a state dict; None if no name or shape shows
            it.
    """

    name: str
    default: Any
    field: str | None = None
    words: Mapping[Any, Any] | None = None
    module: Callable[[Any], Any] = lambda parts: None
    tensors: Callable[[Any], Any] | None = None

    def ours(self, value: Any) -> Any:
        """Return our value for a value of timm's."""
        if self.words is None:
            return value
        return self.words[bool(value) if isinstance(self.default, bool) else value]

    def theirs(self, value: Any) -> Any:
        """Return timm's value for a value of ours."""
        return value if self.words is None else timm_name_for(self.words, value)


def timm_name_for(table: Mapping[Any, Any], ours: Any) -> Any:
    """Return timm's name for our value: the first if it has several, the first of the table if it has none."""
    return next((word for word, meaning in table.items() if meaning == ours), next(iter(table)))

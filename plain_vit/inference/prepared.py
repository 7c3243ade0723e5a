"""Copies of a model that compute the same with fewer operations, but cannot be trained or saved."""

import copy
import inspect
from collections import Counter, OrderedDict
from collections.abc import Mapping
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import nn
from transformers.initialization import no_init_weights

from .. import modeling_plain_vit as modeling
from ..attention_plain_vit import PlainViTAttention
from ..configuration_plain_vit import PlainViTConfig
from ..errors import PreparedModelError, listed
from ..layers_plain_vit import AttentionBranch, LayerScale, MLPBranch, ParallelLayer
from ..modeling_plain_vit import PlainViTLayer, PlainViTMLP, PlainViTPreTrainedModel
from ..packed_plain_vit import Places
from ..system.environment import has_products
from .cuda_graphs import CudaGraphs
from .hooks import has_user_hooks, hooks_of, is_recorder

Model = TypeVar("Model", bound=PlainViTPreTrainedModel)

# Activations that oneDNN fuses into a matrix product, with its names for kind and algorithm.
FUSED_ACTIVATIONS = {"gelu": ("gelu", "none"), "gelu_pytorch_tanh": ("gelu", "tanh"), "relu": ("relu", "")}


def simplify(model: Model, *, dtype: torch.dtype | None = None) -> Model:
    """Return a copy that computes the same with fewer operations, all plain torch, so that any engine can compile it.

    Args:
        model: As for `prepare_for_inference`.
        dtype: Dtype of the copy (default: that of the model).

    Raises:
        PreparedModelError: As for `prepare_for_inference`.
    """
    return cast(Model, simplified(model, dtype)[0])


def simplified(model: Any, dtype: torch.dtype | None) -> tuple[Any, set[nn.Module]]:
    """Return the copy of `simplify`, and the set of its modules that are as the config builds them."""
    refuse_prepared(model)
    copied = copy.deepcopy(model) if isinstance(model, PlainViTPreTrainedModel) else copy_of_travelled(model)
    simple: Any = copied.eval().requires_grad_(False)
    kind = prepared_kind(type(simple))
    expected = built(kind, simple.config)  # the first model of a class tells transformers what to record
    expected.__class__ = type(simple)
    as_built = modules_as_built(simple, expected)
    is_as_built = as_built.issuperset(simple.modules())
    may_skip = isinstance(simple, modeling.PlainViTForImageClassification)
    may_skip = may_skip and as_built.issuperset(modules_before_head(simple))
    fold_gains(as_built)
    simple.to(dtype or simple.dtype)
    join_projections(simple, as_built)
    simple.__class__ = kind
    simple.is_as_built = is_as_built
    simple.num_tokens_read = simple.vit.pooler.num_tokens_read if may_skip else None
    return simple, as_built


def prepared_kind(kind: type) -> Any:
    """Return the class of prepared models for a model class."""
    return type(kind.__name__, (Prepared, kind), {})


def built(kind: Any, config: PlainViTConfig) -> Any:
    """Return the model that a config builds, without weights."""
    with torch.device("meta"), no_init_weights():
        return kind(config)


# Modules whose code is known, so that their joint computation may be replaced

RECORDED = ("output_attentions", "output_hidden_states")  # which show all tokens to the user
KNOWN = ("plain_vit", "torch", "transformers")  # packages


def modules_as_built(model: nn.Module, expected: nn.Module, package: str | None = None) -> set[nn.Module]:
    """Return the modules of a model that compute exactly what their counterparts in the expected model compute.

    Such a module has the same type, from a known package, and its type's methods. It occurs once in the model, is
    complete, and has no hook of a user.

    Args:
        model: The model.
        expected: The model that its config builds.
        package: Another known package, whose types count as those of the expected model.
    """
    types = {name: type(module) for name, module in expected.named_modules()}
    named = list(model.named_modules(remove_duplicate=False))
    places = Counter(module for _, module in named)

    def is_as_built(name: str, module: nn.Module) -> bool:
        kind = type(module)
        same = kind is types.get(name) and kind.__module__.partition(".")[0] in KNOWN
        replaced = any(inspect.isroutine(getattr(kind, attribute, None)) for attribute in vars(module))
        weights = [weight for weight in module._parameters.values() if weight is not None]
        whole = all(type(weight) in (nn.Parameter, torch.Tensor) for weight in weights)
        travelled = name in types and package == kind.__module__.rpartition(".")[0]
        code = getattr(kind.forward, "__module__", "")  # a class may have got another `forward`
        replaced = replaced or not (code.partition(".")[0] in KNOWN or code.rpartition(".")[0] == package)
        return (same or travelled) and places[module] == 1 and whole and not replaced and not has_user_hooks(module)

    return {module for name, module in named if is_as_built(name, module)}


def modules_before_head(model: Any) -> list[nn.Module]:
    """Return the modules that compute the tokens for the head, from the last block on."""
    vit = getattr(model, "vit", model)
    parts = [*vit.layers[-1:], vit.layernorm, getattr(vit, "pooler", None)]
    return [vit, *(module for part in parts if part is not None for module in part.modules())]


def refuse_prepared(model: object) -> None:
    """Refuse a model that is prepared already."""
    if isinstance(model, Prepared):
        raise PreparedModelError("this model is already prepared: prepare the original model")


def copy_of_travelled(model: Any) -> Any:
    """Return a copy, of the package's own class, of a model loaded with the code in its folder (`trust_remote_code`).

    Raises:
        PreparedModelError: The model is not a plain ViT.
    """
    kind = type(model)
    ours = getattr(modeling, kind.__name__, None) if kind.__name__ in modeling.__all__ else None
    if ours is None or kind.__module__.rpartition(".")[2] != modeling.__name__.rpartition(".")[2]:
        raise PreparedModelError(f"{kind.__name__} is not a plain ViT: convert it first, with from_module")
    config = PlainViTConfig.from_dict(model.config.to_dict())
    config._attn_implementation = model.config._attn_implementation
    as_built = modules_as_built(model, built(ours, config), kind.__module__.rpartition(".")[0])
    if others := [name for name, module in model.named_modules() if module not in as_built]:
        raise PreparedModelError(
            f"{listed(others)} of this {kind.__name__} differ from what its config builds, or have a hook, and a copy "
            "would not: merge its adapters, put its own modules back and remove its hooks, or load it with the class "
            "of plain_vit"
        )
    with no_init_weights():
        made = ours(config).to(model.device, model.dtype)
    made.load_state_dict(model.state_dict())
    return made


class Prepared:
    """Mixin of prepared models: they refuse training, saving and moving."""

    is_as_built = False  # every module was as the config builds it
    num_tokens_read: int | None = None  # number of the last block's leading tokens that the head reads; None for all
    graphs: CudaGraphs | None = None  # on a GPU
    compilation: dict[str, Any] | None = None  # arguments of `compile`, if it was called
    is_unpacked = False  # True for a copy, which packs its weights on its first call

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Return what a copy or another process needs to rebuild the prepared model."""
        state = vars(without_recorders(cast(nn.Module, self), {}))
        state.pop("_compiled_call_impl", None)
        return restored, (type(self).__bases__[1], state["config"]), state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        self.is_unpacked = True
        if self.compilation is not None:
            self.compile(**self.compilation)  # type: ignore[attr-defined]

    def pack_again(self) -> None:
        """Pack the weights again, if that is faster on this processor.

        This waits for the first call, so that a forked process can first be limited to one thread.

        Raises:
            PreparedModelError: This release of torch has no oneDNN.
        """
        model = cast(Any, self)
        layers = [module for module in model.modules() if isinstance(module, PackedLinear)]
        if layers and not torch.backends.mkldnn.is_available():
            raise PreparedModelError(
                "this model was prepared for oneDNN, which torch does not have here: send the model itself, and "
                "prepare it here"
            )
        if is_worth_packing(model.dtype):
            for layer in layers:
                layer.pack()
        self.is_unpacked = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_unpacked:
            self.pack_again()
        pixels: Any = args[0] if len(args) == 1 else kwargs.get("pixel_values")
        run = partial(super().__call__, **self.reading_few(kwargs))  # type: ignore[misc]
        if self.graphs is None or len(args) + len(kwargs) != 1 or not self.graphs.can_replay(self, pixels):
            return run(*args, **kwargs)
        return self.graphs(cast(nn.Module, self), run, pixels)

    def reading_few(self, options: Mapping[str, Any]) -> dict[str, int]:
        """Return the option to compute only the tokens that the head reads, unless someone sees the others."""
        model = cast(Any, self)
        is_seen = any(options.get(name) or getattr(model.config, name) for name in RECORDED)
        if self.num_tokens_read is None or is_seen or any(map(has_user_hooks, modules_before_head(model))):
            return {}
        return {"num_output_tokens": self.num_tokens_read}

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)  # type: ignore[misc]

    def train(self, mode: bool = True) -> Any:
        """Refuse to train."""
        if mode:
            raise PreparedModelError("a prepared model is for inference only: train the original model")
        return super().train(mode)  # type: ignore[misc]

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Refuse to be saved."""
        raise PreparedModelError("a prepared model cannot be saved: save the original model")

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        raise PreparedModelError(
            "a prepared model stays on its device and in its dtype: move or cast the original model, and prepare that"
        )


def restored(kind: type, config: PlainViTConfig) -> Any:
    """Return an empty prepared model of a class, for `__setstate__`, after telling transformers what it records."""
    prepared = prepared_kind(kind)
    built(prepared, config)
    return prepared.__new__(prepared)


def without_recorders(module: nn.Module, copies: dict[nn.Module, nn.Module]) -> nn.Module:
    """Return a copy with the same tensors and without transformers' hooks, which cannot be pickled and are re-added.

    Args:
        module: The module.
        copies: Copies made so far, for modules that occur several times.
    """
    if module not in copies:
        copied = copies[module] = object.__new__(type(module))
        vars(copied).update(vars(module))
        vars(copied).pop("_output_capturing_hooks_installed", None)
        hooks = [(key, hook) for key, hook in module._forward_hooks.items() if not is_recorder(hook)]
        parts = module._modules.items()
        inside = {name: None if part is None else without_recorders(part, copies) for name, part in parts}
        vars(copied).update(_forward_hooks=OrderedDict(hooks), _modules=inside)
    return copies[module]


# Gains on residual branches: (x W + b) * g = x (W * g) + b * g

# The parts of a block that each gain scales, and the last layer of each part.
GAINS: dict[type, dict[str, tuple[str, ...]]] = {
    PlainViTLayer: {"layer_scale1": ("attention",), "layer_scale2": ("mlp",)},
    ParallelLayer: {"layer_scale1": ("attention", "mlp")},
    AttentionBranch: {"layer_scale": ("attention",)},
    MLPBranch: {"layer_scale": ("mlp",)},
}
LAST_LAYERS = {"attention": "o_proj", "mlp": "fc2"}


def fold_gains(as_built: set[nn.Module]) -> None:
    """Fold every LayerScale into the layer whose output it scales, if that layer is dense.

    Args:
        as_built: The modules of a model that are as the config builds them.
    """
    for block in as_built:
        for name, parts in GAINS.get(type(block), {}).items():
            gain: Any = getattr(block, name)
            if not isinstance(gain, LayerScale):
                continue
            modules = [module for part in (name, *parts) for module in block.get_submodule(part).modules()]
            if not as_built.issuperset(modules):
                continue
            layers: list[Any] = [block.get_submodule(f"{part}.{LAST_LAYERS[part]}") for part in parts]
            if all(is_plain(layer) for layer in layers):
                for layer in layers:
                    layer.weight = constant(layer.weight * gain.weight[:, None])  # others may share the weight
                    if layer.bias is not None:
                        layer.bias = constant(layer.bias * gain.weight)
                setattr(block, name, None)


def constant(weight: torch.Tensor) -> nn.Parameter:
    """Return a weight that does not require gradients."""
    return nn.Parameter(weight, requires_grad=False)


# Query, key and value in one product


class JoinedAttention(PlainViTAttention):
    """Self-attention with fused query, key and value projections, and the scale in the query's weights."""

    def __init__(self, attention: PlainViTAttention):
        nn.Module.__init__(self)
        self.__dict__.update({name: value for name, value in vars(attention).items() if not name.startswith("_")})
        self._forward_hooks.update(attention._forward_hooks)  # transformers' own, which record attention weights
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        scales = [1.0, 1.0, 1.0]
        # (s x W + s b) k = s (x W + b) k; a bias may depend on the query itself
        if attention.q_norm is None and attention.relative_position_bias is None:
            scales[0], self.scaling = self.scaling, 1.0
        self.counts = [len(projection.weight) // attention.head_dim for projection in projections]  # of heads
        weight = torch.cat([projection.weight * scale for projection, scale in zip(projections, scales, strict=True)])
        self.qkv_proj = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        self.qkv_proj.weight = constant(weight)
        if attention.q_proj.bias is not None:
            biases = [bias_or_zeros(projection) * scale for projection, scale in zip(projections, scales, strict=True)]
            self.qkv_proj.bias = constant(torch.cat(biases))
        self.q_norm, self.k_norm, self.v_norm = attention.q_norm, attention.k_norm, attention.v_norm
        self.norm = attention.norm
        self.relative_position_bias = attention.relative_position_bias
        self.o_proj, self.dropout = attention.o_proj, None

    def project(self, hidden_states: torch.Tensor, places: Places) -> tuple[torch.Tensor, ...]:
        query, key, value = self.qkv_proj(hidden_states).unflatten(-1, (-1, self.head_dim)).split(self.counts, dim=2)
        return query[:, : places.num_output_tokens], key, value


def bias_or_zeros(layer: nn.Linear) -> torch.Tensor:
    """Return the bias of a layer, or zeros: in some models the query has a bias and the key has none."""
    return layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias


def is_plain(layer: nn.Module) -> bool:
    """Return whether a layer is a dense layer with complete weights, without hooks, and with torch's `forward`."""
    return (
        type(layer) is nn.Linear
        and type(layer.weight) in (nn.Parameter, torch.Tensor)
        and not hooks_of(layer)
        and "forward" not in vars(layer)
    )


def join_projections(model: Any, as_built: set[nn.Module]) -> None:
    """Fuse the projections of every attention except the last block's, which may need only one query.

    Args:
        model: The model.
        as_built: Its modules that are as the config builds them.
    """
    layers = getattr(model, "vit", model).layers
    for parent in [module for layer in layers[:-1] for module in layer.modules() if module in as_built]:
        attention = getattr(parent, "attention", None)
        if type(attention) is PlainViTAttention and as_built.issuperset(attention.modules()):
            parent.attention = JoinedAttention(attention)


# Weights in oneDNN's memory layout


def is_worth_packing(dtype: torch.dtype) -> bool:
    """Return whether packed weights are faster on this processor: it has AVX-512, and its bfloat16 products."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512":  # measured with AVX2, where it is slower
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and has_products(dtype))


class PackedLinear(nn.Module):
    """Dense layer with its weight in oneDNN's memory layout, and the activation after it.

    Copies, including those in other processes, use the plain weight until they are packed.
    """

    def __init__(self, layer: nn.Linear, rows: int):
        super().__init__()
        self.rows = rows
        self.weight = layer.weight.detach()
        self.bias = None if layer.bias is None else layer.bias.detach()
        self.activation = ("none", "")
        self.pack()

    def pack(self) -> None:
        """Lay out the weight for this processor and the number of threads that torch uses now."""
        if not self.weight.is_mkldnn:  # as in a shallow copy
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight, self.rows)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "weight": self.weight.to_dense() if self.weight.is_mkldnn else self.weight}

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        kind, algorithm = self.activation
        return torch.ops.mkldnn._linear_pointwise(hidden_states, self.weight, self.bias, kind, [], algorithm)


def pack(model: Any, as_built: set[nn.Module], rows: int) -> None:
    """Pack every dense layer, and fuse each MLP's activation into its first layer, if that is faster here.

    Args:
        model: The model.
        as_built: Its modules that are as the config builds them; they call their layers and do not read the weights.
        rows: Expected number of rows of the inputs.
    """
    if not is_worth_packing(model.dtype):
        return
    for parent in [module for module in model.modules() if module in as_built or type(module) is JoinedAttention]:
        fuses = type(parent) is PlainViTMLP and as_built.issuperset((parent.fc1, parent.activation))
        for name, layer in list(parent.named_children()):
            if is_plain(layer):
                setattr(parent, name, PackedLinear(layer, rows))
        if fuses and model.config.hidden_act in FUSED_ACTIVATIONS:
            parent.fc1.activation, parent.activation = FUSED_ACTIVATIONS[model.config.hidden_act], nn.Identity()

"""Settings of a bare state dict of timm's VisionTransformer: inferred from names and shapes, or given by the caller.

Heads, scale, epsilon, activation and more affect the logits but no shape. They come from a timm architecture name or
from the caller: a model with the shapes of an architecture may still be another one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from .....errors import CheckpointError, MappingError
from ....tables.format import SCALES, Hints, Inference
from ....tables.infer import head_counts, image_sizes, pair, patches_in, ratio_of, size_fault
from ..arguments import ACTIVATIONS, POOLINGS, timm_name_for
from .arguments import ARGUMENTS, BLOCKS

POOLED_TOKENS = ("mean", "max", "mean_max", "map")  # poolings that may include the tokens before the patches


ASKED = (
    *("num_attention_heads", "attention_scale", "layer_norm_eps", "hidden_act", "pooling", "pool_prefix_tokens"),
    *("block_type", "norm_type", "mlp_type", "position_embedding_type", "rope_type", "image_size"),
)


class Settings:
    """The arguments of timm's constructor, each from the tensors, from the caller, or missing.

    Args:
        known: The result of `shapes.observed`.
        rows: Rows of the position table; None without a table.
        hints: The caller's hints.

    Attributes:
        arguments: The arguments, without the numbers of classes and channels.
        fields: Fields of our config without an argument.
        inferences: The inferred values and their origins.
        open: The missing settings with their candidates.

    Raises:
        CheckpointError: for impossible hints.
    """

    def __init__(self, known: Mapping[str, Any], rows: int | None, hints: Hints):
        self.known = known
        self.rows = rows
        self.hints = hints
        self.open: dict[str, Sequence[object]] = {}
        self.inferences: list[Inference] = []
        self.fields: dict[str, Any] = {}
        self.arguments: dict[str, Any] = {
            **{one.name: known[one.name] for one in ARGUMENTS if one.name in known and one.name != "num_heads"},
            "mlp_ratio": ratio_of(known["width"], known["embed_dim"]),
            "init_values": 1e-5 if known["layer_scale"] else None,
            "final_norm": known["norm"] or known["fc_norm"],
            "embed_norm_layer": known["norm_layer"] if known["embed_norm"] else None,
        }
        self._attention()
        self._layers()
        self._pooling()
        self._rotation()
        self._positions()

    def ask(self, name: str, candidates: Sequence[object]) -> Any:
        """Return the caller's hint, or record it as missing."""
        said = getattr(self.hints, name)
        if said is None:
            self.open[name] = candidates
        return said

    def infer(self, field: str, value: object, source: str) -> None:
        """Record a value inferred from the tensors."""
        self.inferences.append(Inference(field, value, source))

    def _attention(self) -> None:
        known, hints, width = self.known, self.hints, self.known["embed_dim"]
        differential = known["attn_layer"] == "diff" or known["block_fn"] == "DiffParallelScalingBlock"
        heads, settled = hints.heads_in(width, known["num_heads"])
        self.inferences += settled
        if known["num_heads"] is not None:
            self.infer("num_attention_heads", heads, "the width of lambda_q1" if differential else "that of q_norm")
        elif heads is None:
            self.ask("num_attention_heads", head_counts(width))
        self.arguments["num_heads"] = heads
        if differential:
            self.infer("attention_scale", "half of head_dim, **-0.5", "timm's DiffAttention, the only value there")
        elif self.ask("attention_scale", SCALES) is not None and heads is not None:
            scale = hints.scale(width, width // heads)
            if scale != (width // heads) ** -0.5:
                self.fields["attention_scale"] = scale

    def _layers(self) -> None:
        known, arguments = self.known, self.arguments
        arguments["norm_eps"] = self.ask("layer_norm_eps", [1e-6, 1e-5])
        acts = list(dict.fromkeys(ACTIVATIONS.values()))
        gated = known["mlp_layer"] != "Mlp"
        acts.sort(key=lambda act: gated and act != "silu")
        act = self.ask("hidden_act", acts)
        arguments["act_layer"] = "gelu" if act is None else timm_name_for(ACTIVATIONS, act)
        if known["norm_layer"] == "rmsnorm":  # a LayerNorm without bias and timm's SimpleNorm have the same tensors
            self.ask("norm_type", ["rms_norm"])
        if known["mlp_layer"] == "SwiGLUPacked":  # a GLU whose gate is the second half has the same tensors
            self.ask("mlp_type", ["swiglu_packed"])
        if known["block_fn"] != "Block":
            self.infer("block_type", BLOCKS[known["block_fn"]], "the names of the tensors")
        elif known["layer_scale"]:
            self.infer("block_type", "sequential", "LayerScale, which timm's post-norm blocks do not have")
        else:
            block = self.ask("block_type", ["sequential", "post_norm"])
            arguments["block_fn"] = "ResPostBlock" if block == "post_norm" else "Block"
        if known["stem_depths"] is not None:
            self.infer("resnet_stem.style", "timm", "timm's hybrids of a ResNet-V2, the only one there")

    def _pooling(self) -> None:
        known, hints, arguments = self.known, self.hints, self.arguments
        pooling = hints.pooling
        if known["distilled"]:
            self.infer("pooling", "cls", "dist_token, which timm uses together with the class token")
            pooling = "cls"
        elif known["map"]:
            if known["mlp_layer"] != "Mlp":
                raise CheckpointError(
                    "the tensors contain attn_pool and gated MLPs: timm's VisionTransformer pools with the activation "
                    "of these, its Eva with GELU, and nothing tells them apart: give the architecture, or convert the "
                    "live module"
                )
            pooling = self.ask("pooling", ["map"])  # poolings with other numbers of heads have the same tensors
            if pooling not in (None, "map"):
                raise CheckpointError(
                    f"pooling={pooling!r} has no weights, but the tensors contain attn_pool: expected 'map'"
                )
        else:
            averaging = ["mean", "max", "mean_max"]
            others = ["cls"] if known["class_token"] else []
            usual = [*averaging, *others] if known["fc_norm"] or not others else [*others, *averaging]
            pooling = self.ask("pooling", [*usual, "none", "prr"])
            if pooling == "map":
                raise CheckpointError(
                    "pooling='map' needs the weights attn_pool, which are missing: give another pooling"
                )
        averages = pooling in (None, *POOLED_TOKENS)
        if prefix_of(known) and averages:
            self.ask("pool_prefix_tokens", [False, True])
        arguments["pool_include_prefix"] = bool(hints.pool_prefix_tokens) and averages
        if pooling is not None:
            arguments["global_pool"] = timm_name_for(POOLINGS, pooling)

    def _rotation(self) -> None:
        # Some published models with rotary embeddings have the same names and shapes as models without.
        said = self.ask("rope_type", ["none"])
        if said not in (None, "none"):
            raise CheckpointError(
                f"rope_type={said!r}: a rotation has more settings than its type. Give the architecture of "
                "timm that has it, or convert the live module with from_module"
            )

    def _positions(self) -> None:
        known, hints, rows, arguments = self.known, self.hints, self.rows, self.arguments
        arguments["no_embed_class"] = hints.position_embedding_on_prefix is False
        if rows is None:
            if self.ask("position_embedding_type", ["none"]) not in (None, "none"):
                raise CheckpointError(
                    f"position_embedding_type={hints.position_embedding_type!r}, and the file has no pos_embed: "
                    "compute the table and save it with the other tensors, as pos_embed of shape (1, tokens, width)"
                )
            arguments["img_size"] = self.ask("image_size", [(224, 224)])
            return
        choices = [True, False] if prefix_of(known) and not known["distilled"] else [True]
        choices = [one for one in choices if hints.position_embedding_on_prefix in (None, one)]
        patches = {on_prefix: rows - (prefix_of(known) if on_prefix else 0) for on_prefix in choices}
        if hints.image_size is None:
            if max(patches.values()) < 1:
                raise MappingError("the position table has no row for a patch:", [f"pos_embed: {rows} rows"])
            sizes = [size for count in patches.values() for size in image_sizes(count, known["patch_size"])]
            self.open["image_size"] = list(dict.fromkeys(sizes))
            return
        size = pair(hints.image_size)
        if fault := size_fault(size, known["patch_size"], list(patches.values())):
            raise CheckpointError(fault)
        fit = [on_prefix for on_prefix, count in patches.items() if patches_in(size, known["patch_size"]) == count]
        arguments |= {"img_size": size, "no_embed_class": not fit[0]}
        if prefix_of(known) and hints.position_embedding_on_prefix is None:
            whence = f"the {rows} rows of pos_embed, for {patches[fit[0]]} patches"
            self.infer("position_embedding_on_prefix", fit[0], whence)


def prefix_of(known: Mapping[str, Any]) -> int:
    """Return the number of tokens before the patches."""
    return int(known["class_token"]) + int(known["distilled"]) + int(known["reg_tokens"])

"""Optimizers, parameter groups, learning rate schedules, moving averages."""

import fnmatch
import inspect
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.swa_utils import AveragedModel

from ..errors import TrainingError
from .arguments import StepOptions


class Muon(torch.optim.Optimizer):
    """Muon (Jordan 2024) for the matrices of the blocks, AdamW for everything else, as one optimizer.

    The Nesterov momentum of each matrix is orthogonalised, and its step is scaled to the size of an AdamW step (Liu et
    al. 2025), so both share learning rate and weight decay. `torch.optim.Muon` has the same formula, but handles one
    matrix at a time, always in bfloat16.

    Args:
        parameter_groups: groups of parameters; groups with `orthogonalised` hold the matrices for Muon.
        lr: learning rate of groups that do not set one.
        momentum: momentum of Muon.
        betas: both betas of AdamW.
        eps: epsilon of AdamW.

    Raises:
        TrainingError: No group has matrices for Muon.
    """

    def __init__(
        self,
        parameter_groups: Sequence[dict[str, Any]],
        lr: float = 1e-3,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        if not any(group["orthogonalised"] for group in parameter_groups):
            raise TrainingError("muon is for the matrices of the blocks, and none of them is trained: use adamw.")
        others = [group for group in parameter_groups if not group["orthogonalised"]]
        self.adamw = torch.optim.AdamW(others, lr, betas, eps, fused=True) if others else None
        super().__init__(parameter_groups, {"lr": lr, "weight_decay": 0.0, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take a step; see `torch.optim.Optimizer.step`."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            if group["orthogonalised"]:
                self._move_matrices(group)
        if self.adamw is not None:
            # Loading a state dict replaces both.
            self.adamw.state = self.state
            self.adamw.param_groups = [group for group in self.param_groups if not group["orthogonalised"]]
            self.adamw.step()
        return loss

    def _move_matrices(self, group: dict[str, Any]) -> None:
        """Update the matrices of a group, all matrices of one shape together."""
        shapes: dict[torch.Size, list[torch.Tensor]] = {}
        for matrix in group["params"]:
            if matrix.grad is not None:
                shapes.setdefault(matrix.shape, []).append(matrix)
        for shape, matrices in shapes.items():
            rate = group["lr"] * 0.2 * math.sqrt(max(shape))
            for start in range(0, len(matrices), TOGETHER):
                some = matrices[start : start + TOGETHER]
                steps = [*orthogonalised(torch.stack(self._next_momenta(some, group))).to(some[0].dtype)]
                if isinstance(some[0], DTensor):
                    mesh, placements = some[0].device_mesh, some[0].placements
                    steps = [distribute_tensor(step, mesh, placements, src_data_rank=None) for step in steps]
                torch._foreach_mul_(some, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_sub_(some, steps, alpha=rate)

    def _next_momenta(self, matrices: Sequence[torch.Tensor], group: dict[str, Any]) -> list[torch.Tensor]:
        """Add the gradients of matrices to their momenta; return the Nesterov momenta, gathered from all processes."""
        for matrix in matrices:
            if not self.state[matrix]:
                self.state[matrix]["momentum_buffer"] = torch.zeros_like(matrix)
        gradients = [cast(torch.Tensor, matrix.grad) for matrix in matrices]
        momenta = [self.state[matrix]["momentum_buffer"] for matrix in matrices]
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        ahead = torch._foreach_lerp(gradients, momenta, group["momentum"])
        return [each.full_tensor() if isinstance(each, DTensor) else each for each in ahead]


def orthogonalised(matrices: torch.Tensor) -> torch.Tensor:
    """Bring the singular values of matrices close to 1 with five Newton-Schulz steps (Jordan 2024).

    Args:
        matrices: matrices of shape (N, rows, columns).

    Returns:
        Matrices of the same shape, in float32 on a CPU and in bfloat16 elsewhere. Singular values above 0.002 of the
        norm of their matrix become 0.68 to 1.20. In bfloat16, the result depends on the rounding of the gradients and
        therefore on the number of processes.
    """
    tall = matrices.shape[1] > matrices.shape[2]
    wide = (matrices.mT if tall else matrices).to(torch.float32 if matrices.device.type == "cpu" else torch.bfloat16)
    wide = wide / wide.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    first, second, third = NEWTON_SCHULZ
    for _ in range(5):
        products = wide @ wide.mT
        products = torch.baddbmm(products, products, products, beta=second, alpha=third)
        wide = torch.baddbmm(wide, products, wide, beta=first)
    return wide.mT if tall else wide


# Optimizers of torch that take gradients of any shape, by lower-case name.
OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    kind.__name__.lower(): kind
    for kind in (
        torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax,
        torch.optim.Adagrad, torch.optim.Adafactor, torch.optim.RMSprop, Muon,
    )
}  # fmt: skip

# Argument of optimizers -> our option, and its type.
ARGUMENTS: dict[str, tuple[str, type]] = {"betas": ("betas", tuple), "eps": ("epsilon", float)}

# Argument that an optimizer may or may not have -> our option.
SETTINGS = {"momentum": "momentum", **{argument: option for argument, (option, _) in ARGUMENTS.items()}}

# Optimizers with a fused implementation on CPUs and GPUs, for whole and sharded parameters.
FUSED = (torch.optim.AdamW, torch.optim.Adam)

# Muon: coefficients of the polynomial, from its author's code, and the number of matrices multiplied at a time.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
TOGETHER = 16

# Weight decay applies to matrices and kernels, not to biases, norms, tokens or position embeddings.
MULTIPLYING_LAYERS = (nn.Linear, nn.Bilinear, nn.MultiheadAttention, nn.modules.conv._ConvNd)


def make_optimizer(
    model: nn.Module,
    name: str,
    *,
    learning_rate: float,
    weight_decay: float = 0.0,
    layer_decay: float = 1.0,
    momentum: float = 0.9,
    betas: Sequence[float] | None = None,
    epsilon: float | None = None,
) -> torch.optim.Optimizer:
    """Build an optimizer with a weight decay and a learning rate per group.

    A group has its peak learning rate as `peak_lr`, and a `name` as in timm: `decay`, `no_decay`, or with `layer_decay`
    `layer_3_decay`; Muon's groups end in `_muon`.

    Args:
        model: the model; frozen parameters are left out.
        name: one of `OPTIMIZERS`, or `timm:NAME` for an optimizer of timm, if timm is installed.
        learning_rate: peak learning rate of the head.
        weight_decay: weight decay of matrices and kernels.
        layer_decay: learning rate of each block relative to the next one; 1 gives all the same.
        momentum: momentum of SGD and Muon, and the first beta of Adam.
        betas: both betas of Adam and similar optimizers (default: `momentum` and 0.999).
        epsilon: epsilon (default: the optimizer's own).

    Raises:
        TrainingError: The optimizer is unknown or lacks the given betas or epsilon, nothing is left to train, or
            `layer_decay` is given for a model that is not a single stack of blocks.
    """
    decayed = {
        id(parameter)
        for layer in model.modules()
        if isinstance(layer, MULTIPLYING_LAYERS)
        for parameter in layer.parameters(recurse=False)
        if parameter.ndim >= 2
    }
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not named:
        raise TrainingError("Every parameter of the model is frozen: freeze fewer.")
    heights = heights_above_input([name for name, _ in model.named_parameters()]) if layer_decay != 1 else {}
    top = max(heights.values(), default=0)
    matrices = matrices_of_blocks(model) if OPTIMIZERS.get(name) is Muon else set()
    groups: dict[tuple[float, float, bool], list[nn.Parameter]] = {}
    names: dict[tuple[float, float, bool], str] = {}
    for parameter_name, parameter in named:
        height = heights.get(parameter_name, top)
        rate = learning_rate * layer_decay ** (top - height)
        decay = weight_decay if id(parameter) in decayed else 0.0
        group = (rate, decay, id(parameter) in matrices)
        groups.setdefault(group, []).append(parameter)
        name_of_layer = f"layer_{height}_" if heights else ""
        names.setdefault(group, f"{name_of_layer}{'decay' if decay else 'no_decay'}{'_muon' if group[2] else ''}")
    parameter_groups = [
        {"params": parameters, "lr": rate, "peak_lr": rate, "weight_decay": decay, "name": names[rate, decay, muon]}
        | ({"orthogonalised": muon} if OPTIMIZERS.get(name) is Muon else {})
        for (rate, decay, muon), parameters in groups.items()
    ]
    given: dict[str, Any] = {} if betas is None else {"betas": tuple(betas)}
    if epsilon is not None:
        given["eps"] = epsilon
    return build_optimizer(name, parameter_groups, learning_rate=learning_rate, momentum=momentum, **given)


def settings_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the values of the options in `SETTINGS` for an optimizer; None for an option that it does not have."""
    values = {option: optimizer.defaults.get(argument) for argument, option in SETTINGS.items()}
    return {name: ", ".join(map(str, value)) if isinstance(value, tuple) else value for name, value in values.items()}


def matrices_of_blocks(model: nn.Module) -> set[int]:
    """Return the ids of the weights of all dense layers within numbered blocks, as in `layers.3.mlp.fc1`."""
    return {
        id(layer.weight)
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and re.search(r"\.\d+\.", name)
    }


def build_optimizer(
    name: str, parameter_groups: list[dict[str, Any]], *, learning_rate: float, momentum: float, **given: Any
) -> torch.optim.Optimizer:
    """Build an optimizer by its name; see `make_optimizer`. `given` are its own arguments."""
    if name.startswith("timm:"):
        optimizer = _timm_optimizer(name[5:], parameter_groups, lr=learning_rate, momentum=momentum, **given)
        for argument, value in given.items():
            if optimizer.defaults.get(argument) != value:  # timm ignores arguments that the optimizer lacks
                raise TrainingError(f"The optimizer {name} does not take the option {ARGUMENTS[argument][0]}: omit it.")
        return optimizer
    if name not in OPTIMIZERS:
        raise TrainingError(f"There is no optimizer {name!r}: expected one of {', '.join(OPTIMIZERS)}, or timm:NAME.")
    kind = OPTIMIZERS[name]
    taken = inspect.signature(kind).parameters
    options: dict[str, Any] = {"lr": learning_rate}
    if "betas" in taken:
        options["betas"] = (momentum, 0.999)
    if "momentum" in taken:
        options["momentum"] = momentum
    if kind in FUSED:
        options["fused"] = True
    for argument in given:
        option, shape = ARGUMENTS[argument]
        if not isinstance(getattr(taken.get(argument), "default", None), shape):
            raise TrainingError(f"The optimizer {name} does not take the option {option}: omit it.")
    return kind(parameter_groups, **{**options, **given})


def _timm_optimizer(name: str, parameter_groups: list[dict[str, Any]], **options: Any) -> torch.optim.Optimizer:
    try:
        from timm.optim import create_optimizer_v2
    except ImportError as error:
        raise TrainingError(f"The optimizer timm:{name} needs timm: install it, or use one of torch.") from error
    try:
        optimizer = create_optimizer_v2(parameter_groups, name, weight_decay=0.0, **options)
    except ValueError as error:
        raise TrainingError(f"timm has no optimizer {name!r}: {error}") from error
    except TypeError as error:
        raise TrainingError(f"The optimizer timm:{name} does not take all of these options: {error}") from error
    if getattr(optimizer, "is_second_order", False):
        raise TrainingError(f"The optimizer timm:{name} needs second derivatives, which are not computed: use another.")
    return optimizer


def freeze(model: nn.Module, what: Sequence[str], head: Collection[str]) -> None:
    """Freeze parameters.

    Args:
        model: the classifier.
        what: `backbone` (all except the head), a number (everything before the blocks, and that many blocks), or
            patterns of names, such as `vit.embeddings.*`.
        head: names of the parameters of the head.

    Raises:
        TrainingError: A pattern matches no parameter, or the model has fewer blocks.
    """
    names = [name for name, _ in model.named_parameters()]
    frozen: set[str] = set()
    for wanted in what:
        if wanted == "backbone":
            found = {name for name in names if name not in head}
        elif wanted.isdecimal():
            heights = heights_above_input(names)
            blocks = max(heights.values()) - 1
            if int(wanted) > blocks:
                raise TrainingError(f"{wanted} blocks cannot be frozen: the model has {blocks}.")
            found = {name for name in names if heights[name] <= int(wanted)}
        else:
            found = set(fnmatch.filter(names, wanted))
        if not found:
            raise TrainingError(
                f"No parameter matches --freeze {wanted}: expected backbone, a number of blocks, or a pattern of names "
                f"such as {names[0]}."
            )
        frozen |= found
    for name, parameter in model.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)


def freeze_unused(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> None:
    """Freeze parameters that no logit depends on, such as the last norm of CLIP.

    They would not be trained anyway, and several processes would wait for their gradients.

    Args:
        model: the classifier, in any mode.
        inputs: its inputs for one image.
    """
    training = model.training
    with torch.random.fork_rng(devices=[]):
        total = model.eval()(**inputs).logits.float().sum()
    if total.requires_grad:
        total.backward()
    model.train(training)
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.grad is not None)
    model.zero_grad()


def train_mode(model: nn.Module) -> None:
    """Set training mode, except for fully frozen modules, which keep evaluation mode and their running statistics."""
    model.train()
    for module in model.modules():
        parameters = list(module.parameters())
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            module.eval()


def heights_above_input(names: Iterable[str]) -> dict[str, int]:
    """Map the parameters of a stack of blocks to their depth.

    Args:
        names: names of all parameters, in the order in which the model defines them.

    Returns:
        0 for everything before the blocks, 1 for the first block, and so on; one more than the last block for
        everything after it.

    Raises:
        TrainingError: There is not exactly one stack of blocks.
    """
    names = list(names)
    matches = {name: re.match(r"(.*?)\.(\d+)\.", name) for name in names}
    stacks = {match[1] for match in matches.values() if match and int(match[2]) > 0}
    if len(stacks) != 1:
        raise TrainingError(
            f"Numbering blocks needs a model with one stack of them, but this one has {len(stacks)}: omit "
            "--layer_decay, and give parameter names in --freeze."
        )
    stack = stacks.pop()
    blocks = {name: int(match[2]) + 1 for name, match in matches.items() if match and match[1] == stack}
    first, last = names.index(next(iter(blocks))), max(blocks.values())
    return {name: blocks.get(name, 0 if place < first else last + 1) for place, name in enumerate(names)}


def learning_rate_factor(
    step: int,
    *,
    total: int,
    warmup: int,
    schedule: str,
    minimum: float = 0.0,
    restarts: int = 0,
    cooldown: int = 0,
) -> float:
    """Return the learning rate of an optimizer step as a fraction of its peak.

    Args:
        step: number of the optimizer step, 0 to `total` - 1.
        total: optimizer steps of the run.
        warmup: steps of the linear rise; the first step is taken at 1 / `warmup`.
        schedule: `cosine` or `linear`, down to `minimum`; `inverse_sqrt`, which decays with the square root of the step
            and halves until step 4 * `warmup` (Zhai et al. 2022; without warm-up, 10,000 takes its place); `constant`
            or `plateau`; or `rising`, exponentially from a ten-millionth, for trials.
        minimum: final learning rate as a fraction of the peak.
        restarts: number of times that `cosine` restarts at the peak, in equal cycles (Loshchilov & Hutter 2017).
        cooldown: number of last steps over which the learning rate additionally falls linearly towards 0.
    """
    if step < warmup:
        return (step + 1) / warmup
    left = min(1.0, (total - step) / cooldown) if cooldown else 1.0
    if schedule == "inverse_sqrt":
        scale = warmup or 10_000
        return left * math.sqrt(scale / (step + scale - warmup))
    if schedule == "rising":
        return 1e-7 ** (1 - step / max(1, total - 1))
    done = (step - warmup) / max(1, total - warmup)
    if schedule == "cosine":
        length = max(1, total - warmup)
        done = (step - warmup) * (restarts + 1) % length / length if step < total else 1.0
        return minimum + (1 - minimum) * 0.5 * (1 + math.cos(math.pi * done))
    return minimum + (1 - minimum) * (1 - done) if schedule == "linear" else left


def scheduled_rate(options: StepOptions, step: int, *, total: int, warmup: int) -> float:
    """Return the learning rate of an optimizer step as a fraction of its peak, from the options of a run."""
    return learning_rate_factor(
        step,
        total=total,
        warmup=warmup,
        schedule=options.schedule,
        minimum=options.lowest_factor,
        restarts=options.restarts,
        cooldown=options.cooldown_steps,
    )


class MovingAverage(AveragedModel):
    """A moving average of weights with its counter on the CPU: reading one on a GPU would stall each step.

    Args:
        model: the model whose weights are averaged.
        decay: the average moves by 1 - `decay` with each update.
        device: device of the average.
        warmup: move by (updates before + 1) ** (-2 / 3) while that is more, as timm's `ModelEmaV3`.
    """

    def __init__(self, model: nn.Module, decay: float, device: torch.device, *, warmup: bool = False) -> None:
        super().__init__(model, device=device)
        self.decay, self.warmup, self.n_averaged = decay, warmup, self.n_averaged.cpu()

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Update the average; the first update copies the weights. Buffers are copied from the model."""
        averaged: list[torch.Tensor] = list(self.module.parameters())
        current = [parameter.to(averaged[0].device) for parameter in model.parameters()]
        if self.n_averaged:
            warm = (int(self.n_averaged) + 1) ** (-2 / 3) if self.warmup else 0.0
            torch._foreach_lerp_(averaged, current, max(1 - self.decay, warm))
        else:
            for ours, theirs in zip(averaged, current, strict=True):  # _foreach_copy_ does not support sharded weights
                ours.copy_(theirs)
        for ours, theirs in zip(self.module.buffers(), model.buffers(), strict=True):
            ours.copy_(theirs)
        self.n_averaged += 1

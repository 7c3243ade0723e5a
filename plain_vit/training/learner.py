"""Model with its optimizer and a moving average of its weights, replicated or sharded over processes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..errors import TrainingError
from ..system.extras import needs
from .arguments import RECORDING_MODES, LoopOptions
from .gradients import clip_adaptively, repeat_uphill
from .hardware.precision import train_on_copies
from .hardware.sharding import ShardedState, blocks_to_shard, check_optimizer, held_here, local_parameters, shard
from .models import as_saved
from .optimization import MovingAverage, make_optimizer
from .placed_randomness import Places, draw_by_place

with needs("plain-vit[train]"):
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import broadcast


class Learner:
    """A model in training; `prepare` moves it to its device.

    Args:
        model: the model with its initial weights.
        options: optimizer, learning rate and seed.
        accelerator: accelerator of the run.
        layer_decay: see `make_optimizer`.
        ema_decay: evaluate and save a moving average of the weights with this decay.
        model_ema_warmup: see `MovingAverage`.
        shard: shard the model, its average and the optimizer state over the processes.
        compile: compile the model.
        compile_mode: mode of `torch.compile`.

    Raises:
        TrainingError: The average, the optimizer or the sharding is not available.
    """

    def __init__(
        self,
        model: nn.Module,
        options: LoopOptions,
        accelerator: Accelerator,
        *,
        layer_decay: float = 1.0,
        ema_decay: float | None = None,
        model_ema_warmup: bool = False,
        shard: bool = False,
        compile: bool = False,
        compile_mode: str = "default",
    ) -> None:
        self.model, self.options, self.accelerator, self.layer_decay = model, options, accelerator, layer_decay
        self.shard, self.compile, self.compile_mode = shard, compile, compile_mode
        self.places = Places(options.seed)
        draw_by_place(model, self.places)
        self.make_optimizer = partial(
            make_optimizer,
            name=options.optimizer,
            learning_rate=options.peak_learning_rate,
            weight_decay=options.weight_decay,
            momentum=options.momentum,
            betas=options.betas,
            epsilon=options.epsilon,
        )
        self.optimizer: Any = self.make_optimizer(model, layer_decay=layer_decay)  # replaced by Accelerate's wrapper
        averaged = partial(MovingAverage, model, device=accelerator.device, warmup=model_ema_warmup)
        self.average = None if ema_decay is None else averaged(decay=ema_decay)
        if options.param_dtype == "bf16":
            train_on_copies(model, torch.bfloat16)
        self.blocks = blocks_to_shard(model, accelerator) if shard else []
        if shard:
            check_optimizer(self.make_optimizer, accelerator)
        self.sharded: ShardedState | None = None
        self.closures: list[Callable[[], torch.Tensor]] = []  # one per micro-batch of the current step
        self.grad_norm = torch.zeros(())  # of the last step, before clipping
        self.clipped_norm: torch.Tensor | None = None  # after clipping, of the last step if it was measured
        self.skipped = False  # whether the last step was left out
        self.measures_update = False  # in this step
        self.update_ratios: dict[str, torch.Tensor] = {}  # of the last measured step, by parameter group
        self.phase: Callable[[str], None] = lambda name: None  # told what a step does next

    def prepare(self) -> None:
        """Compile and shard the model if requested, and let Accelerate wrap the rest.

        Raises:
            TrainingError: Accelerate is configured to compile in a mode that would overwrite accumulated gradients.
        """
        launched = self.accelerator.state.dynamo_plugin.mode
        if launched in RECORDING_MODES and self.accelerator.gradient_accumulation_steps > 1:
            raise TrainingError(
                f"Accelerate is configured to compile in the mode {launched}, which overwrites the gradients of a "
                "micro-batch with those of the next: use one per step, or another --dynamo_mode of `accelerate launch`."
            )
        if self.compile:
            # Compile block by block: the gathering of sharded weights between blocks cannot be compiled.
            for part in self.blocks or [self.model]:
                part.compile(mode=self.compile_mode)
        if not self.shard:
            self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)
            return
        shard(self.model, self.accelerator)
        optimizer = self.make_optimizer(self.model, layer_decay=self.layer_decay)
        self.optimizer = AcceleratedOptimizer(optimizer, device_placement=False)
        if self.average is not None:
            shard(self.average.module, self.accelerator)
        self.sharded = ShardedState(self.model, optimizer, self.average)
        self.accelerator.print("each process holds {:,} of {:,} parameters".format(*held_here(self.model)))

    @property
    def evaluated(self) -> nn.Module:
        """Return the model to evaluate and save: the moving average, if there is one."""
        return self.model if self.average is None else self.average.module

    def final(self) -> nn.Module:
        """Return `evaluated`, with LoRA adapters merged into a copy."""
        bare = self.accelerator.unwrap_model(self.evaluated)
        return as_saved(bare) if hasattr(bare, "merge_and_unload") else self.evaluated

    def set_learning_rate(self, factor: float) -> None:
        """Set the learning rate of each parameter group to this fraction of its peak."""
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor

    def learn(self, loss: torch.Tensor, closure: Callable[[], torch.Tensor]) -> None:
        """Accumulate the gradients of a micro-batch; after the last micro-batch of a step, update the weights.

        Args:
            loss: mean loss of the micro-batch.
            closure: recomputes the loss with changed weights.
        """
        self.phase("backward")
        self.accelerator.backward(loss)
        self.closures.append(closure)
        self.phase("optimizer")
        if self.accelerator.sync_gradients:
            if self.options.sharpness_radius:
                repeat_uphill(self.model, self.closures, self.accelerator, self.options.sharpness_radius)
            self.closures.clear()
            self.grad_norm, self.clipped_norm, self.update_ratios = _whole(self._clip()), None, {}
            self.skipped = self.options.skip_nonfinite > 0 and not self.grad_norm.isfinite()
        if not self.skipped:
            self._update()
        self.optimizer.zero_grad()

    def _update(self) -> None:
        """Update the weights; measure the gradients, and each group's update divided by the norm of its weights before.

        Copies of the weights are made when the activations are no longer in memory.
        """
        measured = self.optimizer.param_groups if self.measures_update and self.accelerator.sync_gradients else []
        before = [[weight.detach().clone() for weight in group["params"]] for group in measured]
        if measured and self.options.max_grad_norm:
            self.clipped_norm = _whole(_norm_of_gradients(self.model))
        self.optimizer.step()
        for group, weights in zip(measured, before, strict=True):
            norm = _whole(nn.utils.get_total_norm(weights))
            torch._foreach_sub_(weights, [weight.detach() for weight in group["params"]])
            self.update_ratios[group["name"]] = _whole(nn.utils.get_total_norm(weights)) / norm

    def describe_groups(self) -> dict[str, float]:
        """Return the learning rate and the update-to-weight ratio of each parameter group in the last measured step."""
        rates = {f"learning_rate/{group['name']}": group["lr"] for group in self.optimizer.param_groups}
        return {**rates, **{f"update_ratio/{name}": float(ratio) for name, ratio in self.update_ratios.items()}}

    def _clip(self) -> torch.Tensor:
        """Clip the gradients, and return their norm before.

        The adaptive mode exempts the head, the last two parameters, as timm does.
        """
        most, parameters = self.options.max_grad_norm, [*self.model.parameters()]
        if most and self.options.clip_mode == "norm":
            return self.accelerator.clip_grad_norm_(parameters, most)
        self.accelerator.unscale_gradients()
        norm = _norm_of_gradients(self.model)
        if most:
            clip_adaptively(parameters[:-2], most)
        return norm

    def is_finite(self) -> bool:
        """Return whether all weights are finite, in all processes."""
        finite = torch.stack([weight.isfinite().all() for weight in local_parameters(self.model)])
        return not self.accelerator.reduce((~finite).sum().float()) > 0

    def share_buffers(self) -> None:
        """Copy the buffers of the first process, which saves them, to all: running statistics differ per process."""
        models = [self.model] if self.average is None else [self.model, self.average.module]
        for buffer in (buffer for model in models for buffer in model.buffers()):
            buffer.copy_(broadcast(buffer.contiguous()))

    def update_average(self) -> None:
        """Update the moving average."""
        if self.average is not None:
            self.average.update_parameters(self.accelerator.unwrap_model(self.model))


def _norm_of_gradients(model: nn.Module) -> torch.Tensor:
    return nn.utils.get_total_norm([weight.grad for weight in model.parameters() if weight.grad is not None])


def _whole(norm: torch.Tensor) -> torch.Tensor:
    """Return a norm over all shards."""
    return norm.full_tensor() if isinstance(norm, DTensor) else norm

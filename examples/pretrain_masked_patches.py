"""Pre-train a Vision Transformer without labels, on one process or many: it predicts patches that are hidden from it.

    python            examples/pretrain_masked_patches.py --model vit-base-patch16-224 --dataset FOLDER --output_dir OUT
    accelerate launch examples/pretrain_masked_patches.py --model DIR --dataset FOLDER --target pixels --output_dir OUT
    torchrun --nproc_per_node 2 examples/pretrain_masked_patches.py ...
    python            examples/finetune_image_classification.py --model OUT --dataset ... --output_dir OUT2

`--target mean_color` is the paper's own (Dosovitskiy et al. 2021, appendix B.1.2): of half of the patches, 80% hidden,
10% exchanged for another patch and 10% left as they are, the mean colour is predicted, in 3 bits per channel. `--target
pixels` is SimMIM (Xie et al. 2022): every pixel of the 60% of the patches that are hidden; they hide squares of 32
pixels, which `--mask_block 2` does where patches have 16.

Labels are neither needed nor looked at. As in fine-tuning, the result does not depend on how many processes share the
work, and `--resume` continues from the newest checkpoint to the same numbers.
"""

import dataclasses
import json
import math
import signal
import sys
import time
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch.utils.data import DataLoader
from tqdm import tqdm

from plain_vit.configuration_plain_vit import PRESET_NAME, PlainViTConfig
from plain_vit.conversion import from_checkpoint
from plain_vit.errors import TrainingError
from plain_vit.extras import needs
from plain_vit.image_processing_plain_vit import PlainViTImageProcessor
from plain_vit.modeling_plain_vit import PlainViTForMaskedImageModeling, PlainViTModel

with needs("plain-vit[train]", script=__name__ == "__main__"):
    from accelerate.utils import set_seed

    from plain_vit.training.arguments import as_yaml, check_options, option, run_script
    from plain_vit.training.data import load_images
    from plain_vit.training.data.augmentation import training_transform
    from plain_vit.training.data.sampling import ShuffledStream, randomness
    from plain_vit.training.masking import CORRUPTIONS, CorruptedImages, Corruption, MaskedPrediction
    from plain_vit.training.models import checkpoint_hints
    from plain_vit.training.optimization import learning_rate_factor, make_optimizer
    from plain_vit.training.processes import StopRequest, loading_options, start_accelerator
    from plain_vit.training.progress import Progress
    from plain_vit.training.run import RunFolder, move_into, shared_staging, write_file
    from plain_vit.training.trackers import start_trackers, tracker_names


@dataclass(kw_only=True)
class PretrainArguments:
    """The options of a run."""

    _argument_group_name: ClassVar[str] = "pre-training"

    model: str = option(help="preset, plain-vit folder or Hub id, or another library's checkpoint")
    from_scratch: bool = option(False, help="keep the architecture only and draw new weights; so it is with a preset")
    model_hints: list[str] | None = option(
        None, help="name=value: what another library's checkpoint does not say, such as num_attention_heads=4"
    )
    dataset: str = option(help="as in fine-tuning: digits, a folder of images, cifar10, a Hub name, ...")
    dataset_subset: str | None = option(None, help="configuration of a Hub data set that has several")
    image_column: str | None = option(None, help="found by its type if not given")
    split: str | None = option(None, help="split to learn from; train if not given, or else the only one")
    validation_fraction: float = option(0.02, help="part of its images to watch the loss on, instead of learning from")
    output_dir: str = option(help="empty or new folder")
    resume: bool = option(False, help="go on from the newest checkpoint in output_dir")

    target: Literal["mean_color", "pixels"] = option("mean_color", help="what is predicted of a patch")
    mask_ratio: float | None = option(
        None, help="share of the patches that are predicted; the publication's if not given"
    )
    hidden_share: float | None = option(None, help="share of those that are hidden; the publication's if not given")
    exchanged_share: float | None = option(None, help="share of those that another patch takes the place of")
    mask_block: int = option(1, help="patches along each side of the squares that are predicted as a whole")
    crop_scale: float = option(1.0, help="smallest part of an image that a random crop may keep; 1: no crop")
    horizontal_flip: float = option(0.0, help="probability")

    epochs: float | None = option(None, help="passes over the training images; 10 if neither they nor steps are given")
    steps: int | None = option(None, help="optimizer steps, instead of epochs")
    batch_size: int = option(64, help="images per optimizer step, over all processes and micro-batches")
    gradient_accumulation_steps: int = option(1, help="micro-batches that make one optimizer step")
    optimizer: str = option("adam", help="of torch.optim, in small letters, or timm:NAME")
    learning_rate: float = option(2e-4, help="at its peak")
    momentum: float = option(0.9, help="of SGD; first beta of Adam")
    weight_decay: float = option(0.0, help="of matrices and kernels; nothing else decays")
    schedule: Literal["cosine", "linear", "inverse_sqrt", "constant"] = option("cosine", help="after the warm-up")
    warmup_steps: int | None = option(None, help="optimizer steps in which the rate rises; a tenth of all if not given")
    max_grad_norm: float = option(1.0, help="gradients are clipped to this norm; 0 leaves them")
    mixed_precision: Literal["no", "bf16", "fp16"] = option("no", help="precision of forward and backward")

    evaluations: int | None = option(None, help="how often to evaluate, evenly spread; once per epoch if not given")
    log_every: int = option(10, help="optimizer steps between logged values")
    checkpoint_every: int | None = option(
        None, help="optimizer steps between checkpoints; at each evaluation if not given"
    )
    checkpoints_kept: int = option(2, help="how many checkpoints stay; 0: write none")
    report_to: str = option("none", help="tensorboard, trackio and wandb, separated by commas")
    num_workers: int = option(0, help="processes that prepare images, per training process")
    num_processes: int | None = option(None, help="refuse to run with another number of processes")
    seed: int = option(0, help="decides everything random")


FREE_ON_RESUME = ("output_dir", "resume", "num_workers", "num_processes", "checkpoints_kept", "report_to")


def pretrain(arguments: PretrainArguments) -> dict[str, Any]:
    """Run what the arguments say.

    Args:
        arguments: as on the command line.

    Returns:
        What `results.json` gets: the loss, and where colours are predicted the accuracy, on the images watched.
    """
    start = time.perf_counter()
    check_options(arguments)
    trackers = tracker_names(arguments.report_to)
    accumulation = arguments.gradient_accumulation_steps
    accelerator = start_accelerator(
        num_processes=arguments.num_processes,
        gradient_accumulation_steps=accumulation,
        mixed_precision=arguments.mixed_precision,
    )
    loading = loading_options(arguments.num_workers)
    say = tqdm.write if accelerator.is_main_process else lambda line: None
    set_seed(arguments.seed)
    processes = accelerator.num_processes
    if arguments.batch_size % (processes * accumulation):
        raise TrainingError(
            f"batch_size {arguments.batch_size} does not divide among {processes} processes x {accumulation} "
            f"micro-batches: use a multiple of {processes * accumulation}."
        )

    # Data, model and plan. Whatever is wrong with them is found before anything is written.
    images = load_images(
        arguments.dataset, arguments.split, subset=arguments.dataset_subset, image_column=arguments.image_column
    )
    watched_count = round(arguments.validation_fraction * len(images))
    if not 0 < watched_count < len(images):
        raise TrainingError(
            f"validation_fraction {arguments.validation_fraction} of {len(images)} images are {watched_count}: "
            "expected 1 or more to watch, and some to learn from."
        )
    shuffled = torch.randperm(len(images), generator=torch.Generator().manual_seed(arguments.seed)).tolist()
    watched, train = images.select(sorted(shuffled[:watched_count])), images.select(sorted(shuffled[watched_count:]))
    model, image_processor = make_model(arguments)
    usual = CORRUPTIONS[arguments.target]
    corruption = Corruption(
        usual.ratio if arguments.mask_ratio is None else arguments.mask_ratio,
        hidden=usual.hidden if arguments.hidden_share is None else arguments.hidden_share,
        exchanged=usual.exchanged if arguments.exchanged_share is None else arguments.exchanged_share,
        block=arguments.mask_block,
    )
    patch_size = model.config.patch_shape
    varied = training_transform(
        image_processor, crop_scale=arguments.crop_scale, horizontal_flip=arguments.horizontal_flip
    )
    train_images = CorruptedImages(train, varied, patch_size, corruption, arguments.seed)
    # The same masks at every evaluation, of an epoch that no training reaches.
    plain = training_transform(image_processor, scaled=False)
    watched_images = CorruptedImages(watched, plain, patch_size, corruption, arguments.seed, epoch=2**31)
    predicted = int(watched_images[0]["predicted"].sum())  # patches of each image
    passes = 10.0 if arguments.epochs is None else arguments.epochs
    total_steps = arguments.steps or math.ceil(passes * len(train) / arguments.batch_size)
    epochs = total_steps * arguments.batch_size / len(train)
    warmup = round(0.1 * total_steps) if arguments.warmup_steps is None else arguments.warmup_steps
    if warmup > total_steps:
        raise TrainingError(f"The warm-up takes {warmup} steps, the run {total_steps}: give --warmup_steps.")
    evaluations = arguments.evaluations or max(1, round(epochs))
    evaluation_steps = frozenset(math.ceil(total_steps * (count + 1) / evaluations) for count in range(evaluations))
    every = arguments.checkpoint_every
    checkpoint_steps = frozenset(range(every, total_steps + 1, every)) if every else evaluation_steps
    optimizer = make_optimizer(
        model,
        arguments.optimizer,
        learning_rate=arguments.learning_rate,
        weight_decay=arguments.weight_decay,
        momentum=arguments.momentum,
    )
    options = {name: value for name, value in dataclasses.asdict(arguments).items() if name not in FREE_ON_RESUME}
    run = RunFolder(
        arguments.output_dir, accelerator, {**options, "training images": len(train)}, resume=arguments.resume
    )

    # The run begins, or continues from its newest checkpoint.
    task, optimizer = accelerator.prepare(MaskedPrediction(model), optimizer)
    progress = run.begin() or {"step": 0, "window": [0.0] * 3, "since": [0.0] * 3}
    if accelerator.is_main_process:
        write_file(run.path / "arguments.yaml", as_yaml(arguments))
    step = progress["step"]
    start_trackers(accelerator, trackers, run.path, dataclasses.asdict(arguments), step=step)
    # Loss, right predictions and images of this process since the last line of the log, and since the last evaluation.
    window = torch.tensor(progress["window"], device=accelerator.device) * accelerator.is_main_process
    since = torch.tensor(progress["since"], device=accelerator.device) * accelerator.is_main_process
    stream = ShuffledStream(
        len(train),
        length=total_steps * arguments.batch_size,
        seed=arguments.seed,
        start=step * arguments.batch_size,
    )
    micro_batch = arguments.batch_size // processes // accumulation
    loading["batch_size"] = micro_batch
    train_loader, watched_loader = accelerator.prepare(
        DataLoader(train_images, sampler=stream, **loading), DataLoader(watched_images, **loading)
    )

    def means(sums: torch.Tensor, name: str) -> dict[str, float]:
        """Return the loss and, of colours, the accuracy, of sums over images."""
        loss, right, count = sums.tolist()
        values = {f"{name}_loss": loss / count}
        return values | ({f"{name}_accuracy": right / count / predicted} if arguments.target == "mean_color" else {})

    @torch.no_grad()
    def evaluate() -> dict[str, float]:
        task.eval()
        sums = torch.zeros(3, device=accelerator.device, dtype=torch.float64)
        for batch in watched_loader:
            losses, right = task(**batch, each=True)
            values = torch.stack([losses.double(), right.double(), torch.ones_like(losses.double())], dim=1)
            sums += accelerator.gather_for_metrics(values).sum(dim=0)
        task.train()
        if sums[2] != len(watched):
            raise TrainingError(f"{int(sums[2])} images were evaluated, but {len(watched)} are watched.")
        return means(sums, "validation")

    def save_checkpoint() -> None:
        sums = {"window": accelerator.reduce(window).tolist(), "since": accelerator.reduce(since).tolist()}
        run.save({"step": step, **sums}, keep=arguments.checkpoints_kept)

    say(
        f"{len(train)} images, {predicted} of {watched_images[0]['predicted'].numel()} patches of each predicted, "
        f"{total_steps} steps of {arguments.batch_size} images in {processes} processes, {epochs:.1f} epochs"
        + (f", from step {step} on" if step else "")
    )
    result: dict[str, float] = {}
    bar = Progress(
        total=total_steps * arguments.batch_size,
        done=step * arguments.batch_size,
        shown=accelerator.is_main_process,
    )
    with bar, StopRequest() as stop:
        task.train()
        for micro_step, batch in enumerate(bar.batches(train_loader)):
            if micro_step % accumulation == 0:
                # Dropout depends on the step alone, so that a resumed run repeats it.
                torch.manual_seed(randomness(arguments.seed, step, accelerator.process_index))
                factor = learning_rate_factor(step, total=total_steps, warmup=warmup, schedule=arguments.schedule)
                for group in optimizer.param_groups:
                    group["lr"] = group["peak_lr"] * factor

            with accelerator.accumulate(task):
                loss, right = task(**batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients and arguments.max_grad_norm:
                    accelerator.clip_grad_norm_(task.parameters(), arguments.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
            seen = torch.stack(
                [loss.detach().float() * micro_batch, right.float(), torch.full_like(right, micro_batch)]
            )
            window += seen
            since += seen
            if not accelerator.sync_gradients:
                continue

            step += 1
            bar.update(arguments.batch_size)
            if step % arguments.log_every == 0 or step == total_steps:
                values = means(accelerator.reduce(window), "train")
                window.zero_()
                run.log(step=step, learning_rate=factor * arguments.learning_rate, **values)
                accelerator.log(bar.rates(), step=step)
                bar.show(loss=f"{values['train_loss']:.4f}")
            if step in evaluation_steps:
                learnt = means(accelerator.reduce(since), "train")
                since.zero_()
                with bar.pause():
                    result = evaluate()
                epoch = step / total_steps * epochs
                run.log(step=step, epoch=epoch, **result)
                shares = {name.replace("_", " "): value for name, value in {**learnt, **result}.items()}
                bar.row(
                    {
                        "epoch": f"{epoch:.1f}",
                        "step": str(step),
                        **{name: f"{value:.2%}" if "acc" in name else f"{value:.4f}" for name, value in shares.items()},
                        "lr": f"{factor * arguments.learning_rate:.2e}",
                    }
                )
            if stop.requested_anywhere(accelerator):
                save_checkpoint()
                accelerator.end_training()
                say(f"Stopped after step {step} of {total_steps}: go on with --resume.")
                sys.exit(128 + signal.SIGTERM)
            if arguments.checkpoints_kept and step in checkpoint_steps:
                with bar.pause():
                    save_checkpoint()

    result = result or evaluate()  # a run resumed at its last step has nothing left to learn
    results = {**result, "steps": total_steps, "seconds": round(time.perf_counter() - start, 1), **bar.rates()}
    bare = accelerator.unwrap_model(task).model
    with shared_staging(run.path / "model", accelerator) as folder:
        weights = {name.removeprefix("model."): tensor for name, tensor in accelerator.get_state_dict(task).items()}
        bare.save_pretrained(folder, state_dict=weights, is_main_process=accelerator.is_main_process)
        if accelerator.is_main_process:
            image_processor.save_pretrained(folder)
    if accelerator.is_main_process:
        write_file(run.path / "results.json", json.dumps(results, indent=2) + "\n")
        move_into(run.path / "model", run.path)
    say(f"validation loss {result['validation_loss']:.4f} on {len(watched)} images; the model is in {run.path}")
    accelerator.end_training()
    accelerator.free_memory()
    return results


def make_model(arguments: PretrainArguments) -> tuple[PlainViTForMaskedImageModeling, Any]:
    """Build the model that predicts, from scratch or around the weights of another, and its image processor."""
    if PRESET_NAME.fullmatch(arguments.model):
        config: Any = PlainViTConfig.from_name(arguments.model)
        body = None
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        image_processor: Any = PlainViTImageProcessor(size={"height": height, "width": width})
    else:
        converted = from_checkpoint(arguments.model, **checkpoint_hints(arguments.model_hints))
        config, image_processor = converted.model.config, converted.image_processor
        body = None if arguments.from_scratch else converted.model.base_model
        if image_processor is None:
            raise TrainingError(f"{arguments.model} does not say how its images are prepared: convert it first.")
    if config.patch_projection == "resnet":
        raise TrainingError("A hybrid sees more than one patch at a time, so none can be hidden: name another model.")
    fields = {
        **config.to_dict(),
        "use_mask_token": True,
        "patch_dropout_prob": 0.0,
        "reconstruction_target": arguments.target,
    }
    if image_processor.do_normalize:
        fields |= {"pixel_mean": list(image_processor.image_mean), "pixel_std": list(image_processor.image_std)}
    model = PlainViTForMaskedImageModeling(PlainViTConfig.from_dict(fields))
    with torch.device("meta"):
        pooled = [name for name in PlainViTModel(model.config).state_dict() if name.startswith("pooler.")]
    if pooled:
        raise TrainingError(
            f"The pooling {config.pooling!r} has weights that would not be trained: name another model."
        )
    if body is not None:
        model.vit.load_state_dict({"embeddings.mask_token": model.vit.embeddings.mask_token, **body.state_dict()})
    return model, image_processor


def main() -> None:
    run_script(pretrain, PretrainArguments, description=__doc__)


if __name__ == "__main__":
    main()

"""Pre-train a Vision Transformer without labels, on one process or many.

    python            examples/pretrain.py --model vit-base-patch16-224 --dataset FOLDER --output_dir OUT
    accelerate launch examples/pretrain.py --model DIR --dataset FOLDER --target pixels --output_dir OUT
    torchrun --nproc_per_node 2 examples/pretrain.py ...
    python            examples/finetune_image_classification.py --model OUT --dataset ... --output_dir OUT2

`--method masked_patches` predicts masked patches of an image from the others. `--target mean_color` is the ViT paper's
(Dosovitskiy et al. 2021, appendix B.1.2): predict the mean colour, in 3 bits per channel, of half of the patches, of
which 80% are hidden, 10% replaced by another patch and 10% unchanged. `--target pixels` is SimMIM (Xie et al. 2022):
predict every pixel of the hidden patches, 60% of all. SimMIM hides squares of 32 pixels; with patches of 16 pixels, use
`--mask_block 2`.

`--method mae` is the masked autoencoder (He et al. 2022): the encoder sees only a quarter of the patches, and a decoder
predicts the pixels of the others. The decoder is saved in the folder `decoder`, and pre-training goes on with it.

`--method distillation --teacher MODEL` learns the features of another model: those of its patches, and the pooled ones.

Labels are not used. As in fine-tuning, the result does not depend on the number of processes, and `--resume` continues
from the newest checkpoint with the same numbers.
"""

import time
from typing import Any

if __name__ == "__main__":  # answer --help and mistakes first: importing torch takes seconds
    import plain_vit_command

    plain_vit_command.check_script("pretrain", __doc__)

import torch
from torch.utils.data import DataLoader, default_collate

from plain_vit.configuration_plain_vit import PRESET_NAME, PlainViTConfig
from plain_vit.conversion import from_checkpoint
from plain_vit.errors import TrainingError, counted
from plain_vit.system.extras import needs

with needs("plain-vit[train]", script=__name__ == "__main__"):
    from accelerate.utils import send_to_device
    from datasets import Dataset

    from plain_vit.training.arguments import (
        ImageOptions,
        PretrainArguments,
        StepOptions,
        keywords,
        run_script,
    )
    from plain_vit.training.data import load_images
    from plain_vit.training.data.identity import dataset_identity
    from plain_vit.training.data.inputs import max_num_patches_of
    from plain_vit.training.hardware.throughput import flops_per_image
    from plain_vit.training.learner import Learner
    from plain_vit.training.loop import Loop, make_schedule, start_run
    from plain_vit.training.models import checkpoint_hints, has_known_config, open_preset
    from plain_vit.training.optimization import settings_of
    from plain_vit.training.reports.facts import recipe_of
    from plain_vit.training.reports.publishing import publish, training_facts
    from plain_vit.training.reports.report import environment
    from plain_vit.training.run.folder import RunFolder, deciding_options, default_options
    from plain_vit.training.tasks.distillation import distillation
    from plain_vit.training.tasks.mae import mae
    from plain_vit.training.tasks.masked_patches import masked_patches
    from plain_vit.training.tasks.unlabelled import Start, Unlabelled, UnlabelledImages

METHODS = {"masked_patches": masked_patches, "mae": mae, "distillation": distillation}


def pretrain(arguments: PretrainArguments) -> dict[str, Any]:
    """Run the pre-training.

    Args:
        arguments: as on the command line.

    Returns:
        The contents of `results.json`: the loss and, for colours, the accuracy on the validation images.
    """
    start = time.perf_counter()
    accelerator, loading = start_run(arguments)

    # Data, model and schedule: errors in them are reported before anything is written.
    train, watched = open_images(arguments)
    task = METHODS[arguments.method](arguments, open_encoder(arguments))
    varied = task.transforms(crop_scale=arguments.crop_scale, horizontal_flip=arguments.horizontal_flip)
    train_images = UnlabelledImages(train, varied, task.targets, arguments.seed)
    # Every evaluation has the same masks: those of an epoch that training never reaches.
    plain = task.transforms(scaled=False)
    watched_images = UnlabelledImages(watched, plain, task.targets, arguments.seed, epoch=2**31)
    schedule = make_schedule(arguments, len(train), accelerator.num_processes)
    learner = Learner(task.module, arguments, accelerator)
    dataset = dataset_identity(arguments.dataset, train)
    decides = deciding_options(arguments, dataset=dataset, training_images=len(train))
    defaults = default_options(arguments)
    run = RunFolder(arguments.output_dir, accelerator, decides, resume=arguments.resume, defaults=defaults)

    # Start the run, or resume it from its newest checkpoint.
    loop = Loop(task, learner, schedule, run, arguments)
    one_image = send_to_device(task.complete(default_collate([watched_images[0]])), accelerator.device)
    loop.flops = flops_per_image(task.module, lambda: task.module.to(accelerator.device)(**one_image)[0])
    loop.begin()
    batches = loop.batches(train_images, **loading)
    watched_loader = accelerator.prepare(DataLoader(watched_images, batch_size=loop.micro_batch, **loading))
    accelerator.print(f"{len(train)} images, pre-training {task.summary}")
    loop.train(batches, watched_loader)

    final = loop.final_model()
    result = loop.judge(final, watched_loader)
    results = {
        **{f"validation_{name}": value for name, value in result.values.items()},
        **loop.figures(since=start),
    }
    loop.finish(final, results)
    if accelerator.is_main_process:
        describe_model(arguments, loop, task, len(train), len(watched))
    run.upload()
    loss = result.values["loss"]
    accelerator.print(f"validation loss {loss:.4f} on {counted(len(watched), 'image')}; the model is in {run.place}")
    accelerator.end_training()
    accelerator.free_memory()
    return results


def open_images(arguments: PretrainArguments) -> tuple[Dataset, Dataset]:
    """Open the training images, and split off some for validation."""
    images = load_images(**keywords(arguments, ImageOptions), split=arguments.split)
    count = round(arguments.validation_fraction * len(images))
    if not 0 < count < len(images):
        raise TrainingError(
            f"validation_fraction {arguments.validation_fraction} of {len(images)} images are {count}: "
            "expected at least 1 for validation and 1 for training."
        )
    shuffled = torch.randperm(len(images), generator=torch.Generator().manual_seed(arguments.seed)).tolist()
    return images.select(sorted(shuffled[count:])), images.select(sorted(shuffled[:count]))


def open_encoder(arguments: PretrainArguments) -> Start:
    """Open the encoder, with new weights or with those of a checkpoint, and its image processor."""
    fresh = arguments.from_scratch and not arguments.model_hints and has_known_config(arguments.model)
    if fresh or PRESET_NAME.fullmatch(arguments.model):
        config: Any
        image_processor: Any
        (config, image_processor), body = open_preset(arguments.model), None
    else:
        converted = from_checkpoint(arguments.model, **checkpoint_hints(arguments.model_hints))
        config, image_processor = converted.model.config, converted.image_processor
        body = None if arguments.from_scratch else converted.model.base_model
        if image_processor is None:
            raise TrainingError(f"{arguments.model} has no image processor: convert it first.")
    if max_num_patches_of(image_processor):
        raise TrainingError("Pre-training needs images of one size, not of many: give another model.")
    fields = {**config.to_dict(), "use_mask_token": False, "patch_dropout_prob": 0.0}
    if arguments.initialization is not None:
        fields |= {"initialization": arguments.initialization}
    if image_processor.do_normalize:
        fields |= {name: list(getattr(image_processor, name)) for name in ("image_mean", "image_std")}
    weights = None if body is None else body.state_dict()
    return Start(PlainViTConfig.from_dict(fields), weights, image_processor, arguments.model)


def describe_model(arguments: PretrainArguments, loop: Loop[Any], task: Unlabelled, train: int, watched: int) -> None:
    """Write the model card."""
    fresh = arguments.from_scratch or PRESET_NAME.fullmatch(arguments.model) is not None
    others = ("method", "target", "norm_pix_loss", "initialization", "crop_scale", "horizontal_flip", "mixed_precision")
    values = {
        **{name: getattr(arguments, name) for name in others},
        **task.settings,
        **keywords(arguments, StepOptions),
        **settings_of(loop.learner.optimizer),
    }
    facts = training_facts(
        loop.run.path,
        source=arguments.model,
        from_scratch=fresh,
        dataset=arguments.dataset,
        split_name="validation",
        results={},
        images=f"train {train:,}, validation {watched:,}",
        recipe={
            **recipe_of(arguments, values),
            "epochs": f"{loop.schedule.epochs:.1f}",
            "steps": loop.schedule.total_steps,
            "warmup_steps": loop.schedule.warmup_steps,
            "seed": arguments.seed,
        },
        environment={"processes": str(loop.accelerator.num_processes), **environment()},
        method=f"Pre-trained from {{start}} on {{data}}, {task.summary}",
    )
    publish(loop.run.path, facts, repo_id=None, private=False, say=print)


def main() -> None:
    run_script(pretrain, PretrainArguments, description=__doc__)


if __name__ == "__main__":
    plain_vit_command.run(main)

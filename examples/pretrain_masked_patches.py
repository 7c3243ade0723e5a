"""Pre-train a Vision Transformer without labels by masked patch prediction, on one process or many.

    python            examples/pretrain_masked_patches.py --model vit-base-patch16-224 --dataset FOLDER --output_dir OUT
    accelerate launch examples/pretrain_masked_patches.py --model DIR --dataset FOLDER --target pixels --output_dir OUT
    torchrun --nproc_per_node 2 examples/pretrain_masked_patches.py ...
    python            examples/finetune_image_classification.py --model OUT --dataset ... --output_dir OUT2

`--target mean_color` is the ViT paper's target (Dosovitskiy et al. 2021, appendix B.1.2): predict the mean colour, in 3
bits per channel, of half of the patches, of which 80% are hidden, 10% replaced by another patch and 10% unchanged.
`--target pixels` is SimMIM (Xie et al. 2022): predict every pixel of the hidden patches, 60% of all. SimMIM hides
squares of 32 pixels; with patches of 16 pixels, use `--mask_block 2`.

Labels are not used. As in fine-tuning, the result does not depend on the number of processes, and `--resume` continues
from the newest checkpoint with the same numbers.
"""

import time
from dataclasses import replace
from typing import Any

if __name__ == "__main__":  # answer --help and mistakes first: importing torch takes seconds
    import plain_vit_command

    plain_vit_command.check_script("pretrain_masked_patches", __doc__)

import torch
from torch.utils.data import DataLoader

from plain_vit.configuration_plain_vit import PRESET_NAME, PlainViTConfig
from plain_vit.conversion import from_checkpoint
from plain_vit.errors import TrainingError, counted
from plain_vit.modeling_plain_vit import PlainViTForMaskedImageModeling, PlainViTModel
from plain_vit.system.extras import needs

with needs("plain-vit[train]", script=__name__ == "__main__"):
    from datasets import Dataset

    from plain_vit.training.arguments import (
        ImageOptions,
        PretrainArguments,
        StepOptions,
        keywords,
        run_script,
    )
    from plain_vit.training.data import load_images
    from plain_vit.training.data.augmentation import training_transform
    from plain_vit.training.data.identity import dataset_identity
    from plain_vit.training.data.inputs import max_num_patches_of
    from plain_vit.training.learner import Learner
    from plain_vit.training.loop import Loop, make_schedule, start_run
    from plain_vit.training.models import checkpoint_hints, has_known_config, open_preset
    from plain_vit.training.optimization import settings_of
    from plain_vit.training.reports.facts import recipe_of
    from plain_vit.training.reports.publishing import publish, training_facts
    from plain_vit.training.reports.report import environment
    from plain_vit.training.run.folder import RunFolder, deciding_options, default_options
    from plain_vit.training.tasks.masked_patches import (
        CORRUPTIONS,
        CorruptedImages,
        Corruption,
        MaskedPatches,
        MaskedPrediction,
    )


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
    model, image_processor = make_model(arguments)
    patch_size, corruption, seed = model.config.patch_shape, corruption_of(arguments), arguments.seed
    varied = training_transform(
        image_processor, crop_scale=arguments.crop_scale, horizontal_flip=arguments.horizontal_flip
    )
    train_images = CorruptedImages(train, varied, patch_size, corruption, seed)
    # Every evaluation has the same masks: those of an epoch that training never reaches.
    plain = training_transform(image_processor, scaled=False)
    watched_images = CorruptedImages(watched, plain, patch_size, corruption, seed, epoch=2**31)
    predicted = watched_images[0]["predicted"]  # the same number for every image
    task = MaskedPatches(model, image_processor, int(predicted.sum()))
    schedule = make_schedule(arguments, len(train), accelerator.num_processes)
    learner = Learner(MaskedPrediction(model), arguments, accelerator)
    dataset = dataset_identity(arguments.dataset, train)
    decides = deciding_options(arguments, dataset=dataset, training_images=len(train))
    defaults = default_options(arguments)
    run = RunFolder(arguments.output_dir, accelerator, decides, resume=arguments.resume, defaults=defaults)

    # Start the run, or resume it from its newest checkpoint.
    loop = Loop(task, learner, schedule, run, arguments)
    loop.begin()
    batches = loop.batches(train_images, **loading)
    watched_loader = accelerator.prepare(DataLoader(watched_images, batch_size=loop.micro_batch, **loading))
    accelerator.print(f"{len(train)} images, {predicted.sum()} of {predicted.numel()} patches of each predicted")
    loop.train(batches, watched_loader)

    final = loop.final_model()
    result = loop.judge(final, watched_loader)
    results = {
        **{f"validation_{name}": value for name, value in result.values.items()},
        **loop.figures(since=start),
    }
    loop.finish(final, results)
    if accelerator.is_main_process:
        describe_model(arguments, loop, len(train), len(watched))
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


def corruption_of(arguments: PretrainArguments) -> Corruption:
    """Return the masking: from the options, or as published for the target."""
    options = {"ratio": "mask_ratio", "hidden": "hidden_share", "exchanged": "exchanged_share", "block": "mask_block"}
    given = {field: getattr(arguments, name) for field, name in options.items() if getattr(arguments, name) is not None}
    return replace(CORRUPTIONS[arguments.target], **given)


def make_model(arguments: PretrainArguments) -> tuple[PlainViTForMaskedImageModeling, Any]:
    """Build the masked image model, from scratch or from another model's weights, and its image processor."""
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
        raise TrainingError("Masked pre-training needs images of one size, not of many: give another model.")
    if config.resnet_stem is not None:
        raise TrainingError("The patches of a hybrid overlap, so none can be masked: give another model.")
    fields = {
        **config.to_dict(),
        "use_mask_token": True,
        "patch_dropout_prob": 0.0,
        "reconstruction_target": arguments.target,
    }
    if arguments.initialization is not None:
        fields |= {"initialization": arguments.initialization}
    if image_processor.do_normalize:
        fields |= {name: list(getattr(image_processor, name)) for name in ("image_mean", "image_std")}
    model = PlainViTForMaskedImageModeling(PlainViTConfig.from_dict(fields))
    with torch.device("meta"):
        pooled = [name for name in PlainViTModel(model.config).state_dict() if name.startswith("pooler.")]
    if pooled:
        raise TrainingError(
            f"The pooling {config.pooling!r} has weights that would not be trained: give another model."
        )
    if body is not None:
        model.vit.load_state_dict({"embeddings.mask_token": model.vit.embeddings.mask_token, **body.state_dict()})
    return model, image_processor


def describe_model(arguments: PretrainArguments, loop: Loop[Any], train: int, watched: int) -> None:
    """Write the model card."""
    fresh = arguments.from_scratch or PRESET_NAME.fullmatch(arguments.model) is not None
    masked, others = corruption_of(arguments), ("initialization", "crop_scale", "horizontal_flip", "mixed_precision")
    values = {
        "target": arguments.target,
        "mask_ratio": masked.ratio,
        "hidden_share": masked.hidden,
        "exchanged_share": masked.exchanged,
        "mask_block": masked.block,
        **keywords(arguments, StepOptions),
        **settings_of(loop.learner.optimizer),
        **{name: getattr(arguments, name) for name in others},
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
        method="Pre-trained from {start} on {data}, by predicting masked patches",
    )
    publish(loop.run.path, facts, repo_id=None, private=False, say=print)


def main() -> None:
    run_script(pretrain, PretrainArguments, description=__doc__)


if __name__ == "__main__":
    plain_vit_command.run(main)

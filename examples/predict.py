"""Write the likeliest classes of any number of images to parquet shards.

    python            examples/predict.py --model DIR --dataset digits --split test --output_dir predictions
    torchrun --nproc_per_node 2 examples/predict.py --model DIR --dataset FOLDER --output_dir predictions
    python            examples/predict.py ... --resume

Each row has the number of the image, the path of its file, the predicted class with its probability, and the likeliest
classes with their probabilities. The shards are the same however many processes share the work. A run that was killed
continues with --resume, and gives the same files.
"""

from pathlib import Path
from typing import Any

if __name__ == "__main__":  # answer --help and mistakes first: importing torch takes seconds
    import plain_vit_command

    plain_vit_command.check_script(__file__, __doc__)

import torch
from tqdm import tqdm

from plain_vit import PlainViTForImageClassification
from plain_vit.errors import TrainingError, counted
from plain_vit.system.extras import needs

with needs("plain-vit[train]", script=__name__ == "__main__"):
    from plain_vit.inference.bulk import Run, open_images, open_model, predictions_of, prepared, settings_of
    from plain_vit.training.arguments import PredictArguments, run_script
    from plain_vit.training.hardware.processes import start_processes
    from plain_vit.training.models import names_of_classes


def predict(arguments: PredictArguments) -> dict[str, Any]:
    """Run the predictions.

    Args:
        arguments: as on the command line.

    Returns:
        The contents of `manifest.json`.
    """
    accelerator, loading = start_processes(arguments)
    images = open_images(arguments)
    opened, image_processor = open_model(arguments)
    if not isinstance(opened, PlainViTForImageClassification):
        raise TrainingError(f"{arguments.model} has no classifier: give a fine-tuned model, or extract features.")
    own = {"top": arguments.top, "classes": names_of_classes(opened.config)}
    settings = settings_of(arguments, images, opened, image_processor) | own
    model = prepared(opened, arguments, accelerator)

    def columns_of(inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
        return predictions_of(model, inputs, top=arguments.top)

    run = Run(Path(arguments.output_dir), images, image_processor, columns_of, arguments, settings)
    manifest = run.to_end(accelerator, loading)
    if accelerator.is_main_process:
        tqdm.write(f"the predictions for {counted(manifest['images'], 'image')} are in {run.folder}")
    return manifest


def main() -> None:
    run_script(predict, PredictArguments, description=__doc__)


if __name__ == "__main__":
    main()

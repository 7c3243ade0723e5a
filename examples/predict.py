"""Write the likeliest classes of any number of images to parquet shards.

    python            examples/predict.py --model DIR --dataset digits --split test --output_dir predictions
    torchrun --nproc_per_node 2 examples/predict.py --model DIR --dataset FOLDER --output_dir predictions
    python            examples/predict.py ... --resume

Each row has the number of the image, the path of its file, the predicted class with its probability, and the likeliest
classes with their probabilities. The shards are the same however many processes share the work. A run that was killed
continues with --resume, and gives the same files.
"""

from typing import Any

if __name__ == "__main__":  # answer --help and mistakes first: importing torch takes seconds
    import plain_vit_command

    plain_vit_command.check_script("predict", __doc__)

from plain_vit.system.extras import needs

with needs("plain-vit[train]", script=__name__ == "__main__"):
    from plain_vit.inference.bulk import run_over_images
    from plain_vit.inference.callables import Predictor
    from plain_vit.training.arguments import PredictArguments, run_script


def predict(arguments: PredictArguments) -> dict[str, Any]:
    """Run the predictions.

    Args:
        arguments: as on the command line.

    Returns:
        The contents of `manifest.json`.
    """
    return run_over_images(Predictor, arguments)


def main() -> None:
    run_script(predict, PredictArguments, description=__doc__)


if __name__ == "__main__":
    plain_vit_command.run(main)

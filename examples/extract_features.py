"""Write the features of any number of images to parquet shards.

    python            examples/extract_features.py --model DIR --dataset digits --output_dir features
    torchrun --nproc_per_node 2 examples/extract_features.py --model DIR --dataset FOLDER --output_dir features
    python            examples/extract_features.py ... --resume

Each row has the number of the image, the path of its file, and its feature vector, a list of fixed size. The shards are
the same however many processes share the work. A run that was killed continues with --resume, and gives the same files.
Read the shards with `datasets.load_dataset("parquet", data_dir="features/data")`, pandas or polars.
"""

from typing import Any

if __name__ == "__main__":  # answer --help and mistakes first: importing torch takes seconds
    import plain_vit_command

    plain_vit_command.check_script("extract_features", __doc__)

from plain_vit.system.extras import needs

with needs("plain-vit[train]", script=__name__ == "__main__"):
    from plain_vit.inference.bulk import run_over_images
    from plain_vit.inference.callables import FeatureExtractor
    from plain_vit.training.arguments import ExtractArguments, run_script


def extract(arguments: ExtractArguments) -> dict[str, Any]:
    """Run the extraction.

    Args:
        arguments: as on the command line.

    Returns:
        The contents of `manifest.json`.
    """
    return run_over_images(FeatureExtractor, arguments)


def main() -> None:
    run_script(extract, ExtractArguments, description=__doc__)


if __name__ == "__main__":
    plain_vit_command.run(main)

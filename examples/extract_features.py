"""Write the features of any number of images to parquet shards.

    python            examples/extract_features.py --model DIR --dataset digits --output_dir features
    torchrun --nproc_per_node 2 examples/extract_features.py --model DIR --dataset FOLDER --output_dir features
    python            examples/extract_features.py ... --resume

Each row has the number of the image, the path of its file, and its feature vector, a list of fixed size. The shards are
the same however many processes share the work. A run that was killed continues with --resume, and gives the same files.
Read the shards with `datasets.load_dataset("parquet", data_dir="features/data")`, pandas or polars.
"""

from pathlib import Path
from typing import Any

if __name__ == "__main__":  # answer --help and mistakes first: importing torch takes seconds
    import plain_vit_command

    plain_vit_command.check_script(__file__, __doc__)

import torch
from tqdm import tqdm

from plain_vit.errors import counted
from plain_vit.system.extras import needs

with needs("plain-vit[train]", script=__name__ == "__main__"):
    from accelerate import Accelerator

    from plain_vit.inference.bulk import (
        Run,
        as_columns,
        check_features,
        check_outputs,
        features_of,
        open_images,
        open_model,
        prepared,
        settings_of,
    )
    from plain_vit.training.arguments import ExtractArguments, run_script
    from plain_vit.training.hardware.processes import start_processes


def extract(arguments: ExtractArguments) -> dict[str, Any]:
    """Run the extraction.

    Args:
        arguments: as on the command line.

    Returns:
        The contents of `manifest.json`.
    """
    run, accelerator, loading = open_run(arguments)
    manifest = run.to_end(accelerator, loading)
    if accelerator.is_main_process:
        tqdm.write(f"the features of {counted(manifest['images'], 'image')} are in {run.folder}")
    return manifest


def open_run(arguments: ExtractArguments) -> tuple[Run, Accelerator, dict[str, Any]]:
    """Open the images and the prepared model; return the run, the accelerator, and options of the data loader."""
    accelerator, loading = start_processes(arguments)
    images = open_images(arguments)
    opened, image_processor = open_model(arguments)
    check_features(opened.config, arguments.feature, arguments.layers)
    check_outputs(opened, arguments.layers, arguments.engine)
    own = {name: getattr(arguments, name) for name in ("feature", "layers", "dtype")}
    settings = settings_of(arguments, images, opened, image_processor) | own
    model, dtype = prepared(opened.base_model, arguments, accelerator), getattr(torch, arguments.dtype)

    def columns_of(inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
        features = features_of(model, inputs, kind=arguments.feature, layers=arguments.layers)
        return as_columns({name: values.to(dtype) for name, values in features.items()})

    run = Run(Path(arguments.output_dir), images, image_processor, columns_of, arguments, settings)
    return run, accelerator, loading


def main() -> None:
    run_script(extract, ExtractArguments, description=__doc__)


if __name__ == "__main__":
    main()

"""Write the features of any number of images to parquet files, on a Ray cluster.

    python examples/ray_features.py --model DIR --images FOLDER --output_dir features
    RAY_ADDRESS=auto python examples/ray_features.py --model DIR --images s3://BUCKET/images \\
        --output_dir s3://BUCKET/features --max_workers 64 --gpus 1

Images are read, computed and written at the same time, in bounded memory. Ray starts workers while images wait and
there is room for them, and replaces a worker that was killed, with the images that it had. Each worker opens --model
itself: give a Hub name, or a folder that all machines have. Needs `pip install "ray[data]"`.
"""

if __name__ == "__main__":  # answer --help and mistakes first: importing torch takes seconds
    import plain_vit_command

    plain_vit_command.check_script("ray_features", __doc__)

from plain_vit.system.extras import needs

with needs("plain-vit[train]", "ray[data]", script=__name__ == "__main__"):
    import ray
    import ray.data

    from plain_vit import FeatureExtractor
    from plain_vit.training.arguments import RayArguments, run_script
    from plain_vit.training.data.folders import ENDINGS
    from plain_vit.training.models import checkpoint_hints


def extract(arguments: RayArguments) -> None:
    """Run the extraction on the cluster of RAY_ADDRESS, or else on this machine.

    Args:
        arguments: as on the command line.
    """
    if not ray.is_initialized():
        ray.init()
    if arguments.format == "images":
        endings = [ending.removeprefix(".") for ending in sorted(ENDINGS)]
        rows = ray.data.read_binary_files(arguments.images, include_paths=True, file_extensions=endings)
    else:
        rows = ray.data.read_parquet(arguments.images)
    image_column = "bytes" if arguments.format == "images" else arguments.image_column
    settings = {
        "image_column": image_column,
        "keep": [name for name in rows.schema().names if name != image_column],  # what is written beside the features
        "model_hints": checkpoint_hints(arguments.model_hints) or None,
        **{name: getattr(arguments, name) for name in ("feature", "dtype", "batch_size", "corrupted")},
    }
    features = rows.map_batches(
        FeatureExtractor,
        fn_constructor_args=(arguments.model,),
        fn_constructor_kwargs=settings,
        batch_format="pyarrow",
        batch_size=arguments.batch_size,
        compute=ray.data.ActorPoolStrategy(min_size=arguments.min_workers, max_size=arguments.max_workers),
        num_cpus=arguments.cpus,
        num_gpus=arguments.gpus,
    )
    mode = ray.data.SaveMode.ERROR  # if the folder has contents
    features.write_parquet(arguments.output_dir, min_rows_per_file=arguments.rows_per_file, mode=mode)
    print(f"the features are in {arguments.output_dir}")


def main() -> None:
    run_script(extract, RayArguments, description=__doc__)


if __name__ == "__main__":
    plain_vit_command.run(main)

"""What the world gets to see of a run: the page of the model that came out of it, and the model on the Hub."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from huggingface_hub import EvalResult

from plain_vit.configuration_plain_vit import PRESET_NAME, PlainViTConfig
from plain_vit.errors import HubError
from plain_vit.hub import Push, push_folder
from plain_vit.markdown import code, plain
from plain_vit.model_card import ModelFacts, source_facts, write_card
from plain_vit.training.data import EMBEDDED
from plain_vit.training.data.benchmarks import BENCHMARKS

PICTURES = {"Training curves": "report/curves.png", "Confusion matrix": "report/confusion_matrix.png"}


def training_facts(
    run: Path,
    *,
    source: str,
    from_scratch: bool,
    dataset: str,
    split_name: str,
    results: Mapping[str, float],
    images: str,
    recipe: Mapping[str, object],
    environment: Mapping[str, str],
    license: str | None,
) -> ModelFacts:
    """Return what is known of a model that a run made.

    Args:
        run: The folder of the run, with the model and, where it has one, the report.
        source: What the run started from, as it was asked for.
        from_scratch: Only the architecture of the source was taken.
        dataset: As it was asked for.
        split_name: That the results are of.
        results: By the name of the metric: `accuracy`, and `top5_accuracy` where there are enough classes.
        images: How many images of which splits, in words.
        recipe: Settings and their values.
        environment: Versions and machine.
        license: Of the weights; what the page of the source says if not given.
    """
    known = {} if from_scratch else source_facts(Path(source))
    if license is not None:
        known = {name: value for name, value in known.items() if not name.startswith("license")}
        known |= {"license": license, "license_from": "whoever trained them"}
    elif "license" in known:
        known["license_from"] = "their source"
    is_hub_model = not (from_scratch or Path(source).exists() or PRESET_NAME.fullmatch(source))
    if dataset in BENCHMARKS and not Path(dataset).is_dir():
        dataset = BENCHMARKS[dataset].repository
    is_hub_data = not (dataset in EMBEDDED or Path(dataset).exists())
    data = f"[{dataset}](https://huggingface.co/datasets/{dataset})" if is_hub_data else plain(_name(dataset))
    known["datasets"] = list(dict.fromkeys([*known.get("datasets", ()), *([dataset] if is_hub_data else ())]))
    if from_scratch:
        origin = f"Trained from scratch on {data} ({images})."
    else:
        start = f"[{source}](https://huggingface.co/{source})" if is_hub_model else code(_name(source))
        origin = f"Fine-tuned from {start} on {data} ({images})."
    if is_hub_model:
        known |= {"base_model": source, "base_model_relation": "finetune"}
    names = {"accuracy": "accuracy", "top5_accuracy": "top-5 accuracy"}
    return ModelFacts(
        origin=origin,
        results=[
            EvalResult(
                task_type="image-classification", task_name="Image classification", dataset_type=_name(dataset),
                dataset_name=_name(dataset), dataset_split=split_name, metric_type=metric, metric_name=names[metric],
                metric_value=value,
            )
            for metric, value in results.items()
        ],
        curves={caption: path for caption, path in PICTURES.items() if (run / path).exists()},
        recipe=recipe,
        environment=environment,
        limits=[f"It was evaluated on the {split_name} split of {plain(_name(dataset))} alone."],
        **known,
    )  # fmt: skip


def publish(
    run: Path, facts: ModelFacts, *, repo_id: str | None, private: bool, say: Callable[[str], object]
) -> Push | None:
    """Write the page of a run's model, if it is a plain ViT, and push the folder where that was asked for.

    Args:
        run: The folder of the run.
        facts: From `training_facts`.
        repo_id: "user/name", or None to keep it here.
        private: Make the repository private.
        say: Called with a message where there is no page.

    Returns:
        What was pushed.

    Raises:
        HubError: The push failed; the folder is whole, and can be pushed again.
    """
    model_type = json.loads((run / "config.json").read_text(encoding="utf-8"))["model_type"]
    if model_type == PlainViTConfig.model_type:
        write_card(run, facts)
    else:
        say(f"Warning: a model of type {model_type!r} gets no page, only plain ViTs do: write its README.md yourself.")
    if repo_id is None:
        return None
    try:
        return push_folder(run, repo_id, private=private)
    except HubError as error:
        again = f"plain-vit push {run} {repo_id}" + (" --private" if private else "")
        raise HubError(f"{error} The model is whole in {run}: push it with `{again}`.") from error


def _name(place: str) -> str:
    """Return a Hub id as it is, and the last part of a path, whose folders are private."""
    return Path(place).name if Path(place).exists() else place

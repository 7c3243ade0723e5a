"""Model card and upload of a run."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from huggingface_hub import EvalResult

from plain_vit.configuration_plain_vit import PRESET_NAME, PlainViTConfig
from plain_vit.conversion.registry import located
from plain_vit.errors import HubError
from plain_vit.files.place_names import public_name
from plain_vit.hub import Push, push_folder
from plain_vit.hub.card import ModelFacts, source_facts, source_origin, write_card
from plain_vit.hub.markdown import code, plain
from plain_vit.training.data import EMBEDDED
from plain_vit.training.data.benchmarks import BENCHMARKS

METRIC_NAMES = {
    "top5_accuracy": "top-5 accuracy", "macro_f1": "macro F1", "micro_f1": "micro F1", "r2": "R2",
    "calibration_error": "expected calibration error",
}  # fmt: skip
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
    license: str | None = None,
    method: str | None = None,
) -> ModelFacts:
    """Return the facts about a trained model.

    Args:
        run: The run folder, with the model and possibly the report.
        source: The starting point of the run, as given.
        from_scratch: Whether only the architecture of the source was used.
        dataset: The dataset, as given.
        split_name: Name of the split that the results are on.
        results: Results by metric, such as `accuracy`; `top5_accuracy` if there are enough classes.
        images: Text with the number of images of each split.
        recipe: Settings by name.
        environment: Versions and hardware.
        license: Licence of the weights (default: from the card of the source).
        method: Text about what was done, with `{start}` and `{data}` (default: fine-tuned, or trained).
    """
    source = source if from_scratch else str(located(source)[0])
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
    data = f"[{dataset}](https://huggingface.co/datasets/{dataset})" if is_hub_data else plain(public_name(dataset))
    known["datasets"] = list(dict.fromkeys([*known.get("datasets", ()), *([dataset] if is_hub_data else ())]))
    start = f"[{source}](https://huggingface.co/{source})" if is_hub_model else code(public_name(source))
    method = method or ("Trained" if from_scratch else "Fine-tuned") + " from {start} on {data}"
    origin = method.format(start="scratch" if from_scratch else start, data=f"{data} ({images})") + "."
    earlier, base = ("", None) if from_scratch or is_hub_model else source_origin(Path(source))
    if earlier:
        origin += f" The card of {start} says: {earlier}"
    if is_hub_model or base:
        known |= {"base_model": base or source, "base_model_relation": "finetune"}
    return ModelFacts(
        origin=origin,
        results=[
            EvalResult(
                task_type="image-classification", task_name="Image classification", dataset_type=public_name(dataset),
                dataset_name=public_name(dataset), dataset_split=split_name, metric_type=metric,
                metric_name=METRIC_NAMES.get(metric, metric.replace("_", " ")), metric_value=value,
            )
            for metric, value in results.items()
        ],
        curves={caption: path for caption, path in PICTURES.items() if (run / path).exists()},
        recipe=recipe,
        environment=environment,
        limits=[f"It was evaluated only on the {split_name} split of {plain(public_name(dataset))}."],
        **known,
    )  # fmt: skip


def publish(
    run: Path, facts: ModelFacts, *, repo_id: str | None, private: bool, say: Callable[[str], object]
) -> Push | None:
    """Write the model card of a run, if the model is a plain ViT, and push the folder if requested.

    Args:
        run: The run folder.
        facts: From `training_facts`.
        repo_id: "user/name", or None not to push.
        private: Make the repository private.
        say: Called with a message if no model card is written.

    Returns:
        The push, or None.

    Raises:
        HubError: The push failed; the folder is complete and can be pushed again.
    """
    model_type = json.loads((run / "config.json").read_text(encoding="utf-8"))["model_type"]
    if model_type == PlainViTConfig.model_type:
        write_card(run, facts)
    else:
        say(f"Warning: model type {model_type!r} gets no model card, only plain ViTs do: write its README.md yourself.")
    if repo_id is None:
        return None
    try:
        return push_folder(run, repo_id, private=private)
    except HubError as error:
        again = f"plain-vit push {run} {repo_id}" + (" --private" if private else "")
        raise HubError(f"{error} The model is complete in {run}: push it with `{again}`.") from error

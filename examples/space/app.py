"""Browser demo: classify an image, show the attention over it, compare two checkpoints.

    python examples/space/app.py                   the included checkpoint, and the same model before training
    python examples/space/app.py FOLDER user/name  your own models: folders of plain-vit, or ids on the Hub

As a Space on the Hub, it reads the models from the variable MODELS, separated by spaces; see README.md.
"""

if __name__ == "__main__":  # answer --help and mistakes first: importing torch takes seconds
    from plain_vit_command import argument, read_words

    WORDS = read_words(__doc__, argument("models", "folders of plain-vit, or ids on the Hub", nargs="*"))

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import PreTrainedModel

from plain_vit import PlainViTForImageClassification
from plain_vit.analysis import attention_maps, attention_rollout, displayable, predict
from plain_vit.conversion import from_checkpoint
from plain_vit.errors import CheckpointError, PlainViTError, counted, few
from plain_vit.hub.markdown import code, plain
from plain_vit.scores import REGRESSION
from plain_vit.system.extras import needs

with needs("plain-vit[space]", script=__name__ == "__main__"):
    import gradio as gr
    from matplotlib.figure import Figure

    from plain_vit.analysis.plots import plot_maps_over_images

HERE = Path(__file__).parent
# The checkpoint is next to this folder in a checkout, and inside it in a Space, if it was copied there.
PLACES = (HERE / "checkpoints", HERE.parent / "checkpoints")
CHECKPOINTS = next((folder for folder in PLACES if folder.is_dir()), None)
SHIPPED_HINTS: dict[str, Any] = {
    "num_attention_heads": 4,
    "image_size": 24,
    "patch_size": 4,
}  # not stored in the file
NOTHING = "nothing"
TOP = 5
SHOWN_LABELS = 50
ROLLOUT = -1  # slider position for the rollout over all layers


@dataclass(frozen=True)
class Shown:
    """A model with its image processor."""

    model: PreTrainedModel
    image_processor: Any

    def look(self, image: Image.Image, layer: int) -> tuple[dict[str, float] | str, Figure]:
        """Return the likeliest labels with probabilities (or numbers as text), and the attention over the image."""
        pixels = self.image_processor(image, return_tensors="pt")
        (scores,) = predict(self.model, pixels)
        names: Any = self.model.config.id2label
        order = np.argsort(scores)[-TOP:]  # of two classes with the same name, the likelier comes last and is kept
        likely: dict[str, float] | str = {names[int(i)]: float(scores[i]) for i in order}
        if self.model.config.problem_type == REGRESSION:
            likely = ", ".join(f"{names[i]} {score:.4g}" for i, score in enumerate(scores))
        if layer == ROLLOUT:
            maps, meaning = attention_rollout(self.model, pixels), "rollout through all layers"
        else:
            heads = attention_maps(self.model, pixels, layers=layer)  # B, 1, heads, h, w
            maps, meaning = heads[:, 0].mean(axis=1), f"attention in layer {layer}"
        shown = displayable(pixels, self.image_processor, self.model)
        return likely, plot_maps_over_images(shown, maps, meaning=meaning)


def load_models(sources: Sequence[str]) -> dict[str, Shown]:
    """Open the named models, or else the included one, trained and untrained.

    Raises:
        CheckpointError: No model is named, and the included one is missing.
    """
    if sources:
        opened = {source: from_checkpoint(source) for source in sources}
        return {source: Shown(converted.model, converted.image_processor) for source, converted in opened.items()}
    if CHECKPOINTS is None:
        raise CheckpointError(
            "There is no model to show. Set the variable MODELS in the Space's settings to Hub ids, separated by "
            "spaces; or copy examples/checkpoints next to app.py."
        )
    names = (CHECKPOINTS / "glyphs_labels.txt").read_text(encoding="utf-8").splitlines()
    trained = from_checkpoint(CHECKPOINTS / "glyphs_vit.pt", **SHIPPED_HINTS, id2label=names)
    config: Any = trained.model.config
    torch.manual_seed(0)
    untrained = PlainViTForImageClassification(config).eval()
    return {
        "shipped checkpoint": Shown(trained.model, trained.image_processor),
        "before its training": Shown(untrained, trained.image_processor),
    }


def what_they_know(models: dict[str, Shown]) -> str:
    """Describe the labels of the models in Markdown; models with the same labels are grouped."""
    together: dict[tuple[str, ...], list[str]] = {}
    for name, shown in models.items():
        names: Any = shown.model.config.id2label
        labels = tuple(plain(label) for _, label in sorted(names.items()))
        together.setdefault(labels, []).append(code(name))
    lines = [
        f"- {' and '.join(models_of)}: {counted(len(labels), 'label')} ({few(labels, SHOWN_LABELS)})."
        for labels, models_of in together.items()
    ]
    return "\n".join(["These are all answers that a model has, even to an image of something else:", "", *lines])


def build(models: dict[str, Shown]) -> gr.Blocks:
    """Build the page.

    Args:
        models: Models by the name that the page shows.
    """
    names = list(models)

    def look(image: Image.Image | None, first: str, second: str, layer: int) -> list[Any]:
        if image is None:
            raise gr.Error("Give an image first.")
        answers: list[Any] = []
        for name in (first, second):
            try:
                likely, figure = (None, None) if name == NOTHING else models[name].look(image, int(layer))
            except PlainViTError as error:
                raise gr.Error(str(error)) from error
            answers += [gr.Label(likely, label=name), gr.Plot(figure, label=f"{name}: attention")]
        return answers

    depth = min(shown.model.config.num_hidden_layers for shown in models.values())
    with gr.Blocks(title="plain-vit", analytics_enabled=False) as page:
        gr.Markdown(f"# Where a Vision Transformer looks\n\n{what_they_know(models)}")
        with gr.Row():
            with gr.Column():
                image = gr.Image(type="pil", label="Image", height=260)
                gr.Examples([str(path) for path in sorted((HERE / "images").glob("*.png"))], image)
            with gr.Column():
                first = gr.Dropdown(names, value=names[0], label="Model")
                second = gr.Dropdown([NOTHING, *names], value=names[-1] if names[1:] else NOTHING, label="Compare with")
                layer = gr.Slider(
                    ROLLOUT, depth - 1, value=ROLLOUT, step=1, label="Attention in layer (-1: rollout through all)"
                )
                button = gr.Button("Look", variant="primary")
        with gr.Row():
            outputs: list[Any] = []
            for chosen in (first, second):
                with gr.Column():
                    title = chosen.value
                    outputs += [gr.Label(num_top_classes=TOP, label=title), gr.Plot(label=f"{title}: attention")]
        button.click(look, [image, first, second, layer], outputs, api_name="look")
    return page


if __name__ == "__main__":
    build(load_models(WORDS.models or os.environ.get("MODELS", "").split())).launch()

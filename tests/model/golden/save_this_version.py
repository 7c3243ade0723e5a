"""Save the golden folder of this version; run `python -m tests.model.golden.save_this_version` once per release.

The folder holds a small model, its image processor and its logits. Every later version must open it and give the same
logits (`test_golden.py`). The code saved with the model is in `code-VERSION.zip` (`test_golden_code.py`).
"""

import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import plain_vit
from plain_vit import PlainViTConfig, PlainViTForImageClassification, PlainViTImageProcessor
from tests.conftest import randomize_


def golden_pixels() -> torch.Tensor:
    """Return pixels of shape (2, 3, 12, 24) that do not depend on torch's random generator."""
    return torch.arange(2 * 3 * 12 * 24, dtype=torch.float32).mul(0.37).sin().view(2, 3, 12, 24)


def main() -> None:
    """Write the folder, unless it exists."""
    folder = Path(__file__).parent / plain_vit.__version__
    folder.mkdir()
    labels = {0: "ant", 1: "bee", 2: "cat"}
    config = PlainViTConfig(
        hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=20, image_size=(12, 24),
        patch_size=(4, 6), num_register_tokens=1, layer_scale_init_value=0.5, use_mask_token=True,
        rope_parameters={"rope_theta": 100.0}, id2label=labels,
        label2id={name: number for number, name in labels.items()},
    )  # fmt: skip
    model: Any = PlainViTForImageClassification(config)
    randomize_(model).eval()
    model.save_pretrained(folder)
    PlainViTImageProcessor(size={"height": 12, "width": 24}).save_pretrained(folder)
    with zipfile.ZipFile(folder.with_name(f"code-{folder.name}.zip"), "w", zipfile.ZIP_DEFLATED) as archive:
        for code in sorted(folder.glob("*.py")):
            archive.writestr(zipfile.ZipInfo(code.name), code.read_bytes(), zipfile.ZIP_DEFLATED)
            code.unlink()
    with torch.no_grad():
        logits = model(golden_pixels()).logits
        resized = model(golden_pixels().view(2, 3, 24, 12)).logits
    save_file({"logits": logits, "resized": resized}, folder / "expected.safetensors")


if __name__ == "__main__":
    main()

"""Download of the files that torchvision publishes, to the place where torchvision itself keeps them."""

import os
from pathlib import Path

import torch
from huggingface_hub import constants

from ....errors import HubError


def address() -> str:
    """Return the address of the folder that all its files are in."""
    from torchvision.models import ViT_B_16_Weights

    return str(ViT_B_16_Weights.IMAGENET1K_V1.url).rpartition("/")[0]


def published_file(name: str) -> str:
    """Return the path of a published file in torch's cache; download it if it is not there.

    Args:
        name: Its name without suffix, which ends in the first digits of its SHA-256.

    Raises:
        HubError: It is not there and cannot be downloaded, or its SHA-256 is another.
    """
    path, url = Path(torch.hub.get_dir(), "checkpoints", f"{name}.pth"), f"{address()}/{name}.pth"
    if path.exists():
        return str(path)
    if constants.HF_HUB_OFFLINE:
        raise HubError(f"{path} is not there, and HF_HUB_OFFLINE forbids to download it: save {url} there")
    try:
        os.makedirs(path.parent, exist_ok=True)
        torch.hub.download_url_to_file(url, str(path), hash_prefix=name.rpartition("-")[2], progress=False)
    except (OSError, RuntimeError) as error:  # RuntimeError: another hash
        raise HubError(f"{url} cannot be downloaded to {path}: {error}") from error
    return str(path)

"""Pushing a saved model to the Hub: its files are checked first, then uploaded in one commit or not at all."""

import os
import re
from collections.abc import Collection, Sequence
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import huggingface_hub
from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError
from transformers import PreTrainedModel

from ..configuration_plain_vit import PlainViTConfig
from ..errors import CheckpointError, HubError, PushRefusedError
from ..files.marks import is_untouched
from .card import CARD, ModelFacts, addressed, card_text
from .contents import HOLDS, REPORT, Contents, gather
from .delivery import Delivery, Push
from .opening import Opened, open_folder
from .search import known_secrets, secrets_in

# Branch names that git rejects.
NO_BRANCH = re.compile(r"[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{|//|^/|/$|(^|/)\.|\.lock(/|$)|\.$|^@$|^-|^$")


def push_folder(
    folder: str | os.PathLike[str],
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    dry_run: bool = False,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    include_report: bool = False,
    message: str = "Upload model",
    tags: Sequence[str] = (),
    token: str | None = None,
) -> Push:
    """Push the folder of a saved model to the Hub, in one commit.

    Only the files of a model repository are uploaded: weights (safetensors), settings and the code that they name, the
    model card with the images that it shows, licence, label names and adapter. All other files are listed as left out.
    The model is opened first; the folder itself is not changed, and nothing in it is executed.

    This list is the protection. As a second check, texts are searched for the secrets of this machine, known token
    prefixes and what detect-secrets finds, and images are re-encoded from their pixels. Nothing is decoded: a secret
    that is encoded, or part of an image or a tensor, is not found.

    Files already uploaded by an interrupted push are not uploaded again. A plain-vit model without a model card
    (`README.md`) gets one; a card edited by a person on the Hub is kept. Old weights that are not replaced are deleted.

    Args:
        folder: Contains `config.json` and weights, or a peft adapter.
        repo_id: "user/name"; created if it does not exist.
        private: Make the repository private; fail if it exists and is public.
        revision: Branch to commit to, created if it does not exist (default: main).
        dry_run: Upload nothing, without network access; return what would be uploaded.
        include: Exact relative paths of additional files to upload: plain text, PNG or JPEG. "README.md" overwrites a
            card edited on the Hub.
        exclude: Patterns of relative paths not to upload; files that the model needs cannot be excluded.
        include_report: Also upload the report of a training run. It shows images of the dataset.
        message: Commit message.
        tags: Further tags for a generated model card.
        token: Access token (default: that of `hf auth login` or `HF_TOKEN`).

    Returns:
        What was uploaded, or would be.

    Raises:
        CheckpointError: The folder has no valid model: it does not open, contains NaN, or names missing code.
        PushRefusedError: Files contain secrets or must not be uploaded; the message lists all of them.
        HubError: There is no token, permission or network, or the repository was changed at the same time.
    """
    path = Path(folder).expanduser()
    check_repository(repo_id, token, revision=revision, needs_token=not dry_run)
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder: give the folder of a saved model.")
    known = known_secrets(token)
    if secrets_in(message, known):
        raise PushRefusedError(f"{path} was not pushed.", ["the commit message contains a secret"])
    opened = open_folder(path)
    contents = gather(path, opened, known, include=include, exclude=exclude, include_report=include_report)
    notes = [*opened.notes, *([HOLDS] if any(map(REPORT.fullmatch, contents.sent)) and include_report else [])]
    if not any(fnmatch(CARD, pattern) for pattern in exclude):
        _add_page(contents, path, opened, repo_id, known, tags)
    delivery = Delivery(
        api=HfApi(token=token, library_name="plain-vit"), repo_id=repo_id, contents=contents, private=private,
        revision=revision, message=message, overwrites_card=CARD in include, notes=notes,
        base_model=opened.adapter.base_model if opened.adapter else None,
    )  # fmt: skip
    return delivery.planned() if dry_run else delivery.delivered()


def push(
    model: PreTrainedModel,
    repo_id: str,
    *,
    image_processor: Any = None,
    private: bool = False,
    revision: str | None = None,
    message: str = "Upload model",
    tags: Sequence[str] = (),
    token: str | None = None,
) -> Push:
    """Save a model and push it as `push_folder` pushes a folder, with its model card.

    `model.push_to_hub` is transformers' own: it uploads what `save_pretrained` writes, unchecked, with a short card.

    Args:
        model: The model.
        repo_id: "user/name"; created if it does not exist.
        image_processor: Image processor of the model; without one, pipelines cannot use the repository.
        private: Make the repository private; fail if it exists and is public.
        revision: Branch to commit to, created if it does not exist (default: main).
        message: Commit message.
        tags: Further tags of the model card.
        token: Access token (default: that of `hf auth login` or `HF_TOKEN`).

    Returns:
        What was uploaded.

    Raises:
        CheckpointError: The model does not open again, or contains NaN.
        PushRefusedError: Some of its content must not be uploaded.
        HubError: There is no token, permission or network, or the repository was changed at the same time.
    """
    check_repository(repo_id, token, revision=revision)
    with TemporaryDirectory() as temporary:
        folder = Path(temporary, repo_id.rpartition("/")[2])
        model.save_pretrained(folder)
        if image_processor is not None:
            image_processor.save_pretrained(folder)
        return push_folder(folder, repo_id, private=private, revision=revision, message=message, tags=tags, token=token)


def check_repository(
    repo_id: str, token: str | None = None, *, revision: str | None = None, needs_token: bool = True
) -> None:
    """Check the arguments of a push before any work and without network access.

    Args:
        repo_id: "user/name".
        token: Access token (default: that of `hf auth login` or `HF_TOKEN`).
        revision: Branch to commit to.
        needs_token: Whether a token is required.

    Raises:
        HubError: The id or the branch name is invalid, or there is no token.
    """
    try:
        huggingface_hub.utils.validate_repo_id(repo_id)
    except HFValidationError as error:
        raise HubError(f"{repo_id!r} is not a valid repository id: {error}") from None
    if "/" not in repo_id:
        raise HubError(f"{repo_id!r} has no owner: expected user/name.")
    if revision is not None and (NO_BRANCH.search(revision) or not revision.isprintable()):
        raise HubError(f"{revision!r} is not a valid branch name: git allows no spaces, '..', '~', '^', ':' and so on.")
    if needs_token and token is None and huggingface_hub.get_token() is None:
        raise HubError("There is no token: run `hf auth login`, or set HF_TOKEN to a token with write access.")


def _add_page(
    contents: Contents, folder: Path, opened: Opened, repo_id: str, known: Collection[str], tags: Sequence[str]
) -> None:
    """Insert the repository id into a model card of ours, generated if missing; leave other cards unchanged."""
    page = (folder / CARD).read_bytes() if CARD in contents.sent else None
    if opened.adapter is not None and not opened.config:
        text = None if page is None else page.decode("utf-8-sig", errors="replace")
        if (new := opened.adapter.page(text, tags)) != text:
            page = new.encode()
    elif page is None and opened.config.get("model_type") == PlainViTConfig.model_type:
        page = card_text(folder, ModelFacts(tags=tuple(tags))).encode()
    if page is not None and is_untouched(page):
        contents.add_text(CARD, addressed(page, repo_id), known)


__all__ = ["Push", "check_repository", "push", "push_folder"]

"""Pushing a saved model to the Hub: its files are checked first, then uploaded in one commit or not at all."""

import os
import re
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import huggingface_hub
from huggingface_hub import CommitInfo, HfApi
from huggingface_hub.errors import HFValidationError
from transformers import AutoImageProcessor, PreTrainedModel
from transformers.utils import logging

from ..configuration_plain_vit import PlainViTConfig
from ..errors import CheckpointError, HubError, PushRefusedError
from ..files.marks import is_untouched
from ..files.reading import IMAGE_PROCESSOR_CONFIG, PROCESSOR_CONFIG
from .card import CARD, ModelFacts, addressed, card_text
from .contents import HOLDS, REPORT, Contents, gather
from .delivery import Delivery, Push, delivered
from .opening import Opened, open_folder, settings_alone
from .search import known_secrets, secrets_in

logger = logging.get_logger(__name__)

# What git rejects in a branch name.
NO_BRANCH = re.compile(r"[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{|//|^/|/$|(^|/)\.|\.lock(/|$)|\.$|^@$|^-|^$")
# The arguments of `save_pretrained(..., push_to_hub=True)` that are not about saving.
HUB_OPTIONS = ("commit_message", "commit_description", "create_pr", "private", "revision", "tags", "token")


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
    token: str | None = None,
) -> Push:
    """Push the folder of a saved model to the Hub, in one commit.

    Only the files of a model repository are uploaded: weights (safetensors), settings and the code that they name, the
    model card with the images that it shows, licence, label names and adapter. All other files are listed as left out.
    The model is opened first; the folder itself is not changed, and nothing in it is executed.

    This list is the protection. As a second look, texts are searched for the secrets of this machine, known token
    prefixes and what detect-secrets finds, and images are re-encoded from their pixels. Nothing is decoded: a secret
    that is encoded, or part of an image or a tensor, is not found.

    Files already uploaded by an interrupted push are not sent again. A model of ours without a model card (`README.md`)
    gets one; a card edited by a person on the Hub is kept. Old weights that are not replaced are deleted.

    Args:
        folder: Contains `config.json` and weights, or a peft adapter.
        repo_id: "user/name"; created if it does not exist.
        private: Make the repository private; fail if it exists and is public.
        revision: Branch to commit to, created if it does not exist (default: main).
        dry_run: Upload nothing, without network access; return what would be uploaded.
        include: Exact relative paths of additional files to upload: plain text, PNG or JPEG. "README.md" overwrites a
            card edited on the Hub; "model.safetensors:author" allows that key in the file's metadata.
        exclude: Patterns of relative paths not to upload; files that the model needs cannot be excluded.
        include_report: Also upload the report of a training run. It shows images of the dataset.
        message: Commit message.
        token: Access token (default: that of `hf auth login` or `HF_TOKEN`).

    Returns:
        What was uploaded, or would be.

    Raises:
        CheckpointError: The folder has no valid model: it does not open, contains NaN, or names missing code.
        PushRefusedError: lists every file that contains a secret or must not be uploaded.
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
        _add_page(contents, path, opened, repo_id, known)
    delivery = Delivery(
        repo_id=repo_id, contents=contents, private=private, revision=revision, message=message,
        overwrites_card=CARD in include, notes=notes, base_model=opened.base_model,
    )  # fmt: skip
    return delivery.planned() if dry_run else delivered(HfApi(token=token, library_name="plain-vit"), delivery)[0]


def push_saved(
    thing: Any,
    repo_id: str,
    *,
    image_processor: Any = None,
    commit_message: str | None = None,
    commit_description: str | None = None,
    private: bool | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    max_shard_size: int | str | None = None,
    tags: Sequence[str] | None = None,
    saving: Mapping[str, Any] | None = None,
) -> CommitInfo:
    """Save a model, an image processor or a configuration and push it as `push_folder` pushes a folder.

    Their `push_to_hub` calls this where this package is installed. A model is pushed with our model card, unless the
    repository has one, and with its image processor: the given one, or else that of the folder or repository that the
    model was loaded from, unless the repository has one.

    Args:
        thing: Object with `save_pretrained`.
        repo_id: "user/name", or only a name for the token's user.
        image_processor: Image processor of a model.
        commit_message: As in transformers, like the following arguments.
        commit_description: Commit description.
        private: Make the repository private.
        token: Access token.
        revision: Branch to commit to, created if it does not exist.
        create_pr: Open a pull request instead.
        max_shard_size: Maximum size of one weight file.
        tags: Tags of a model, for its card.
        saving: Other arguments of `save_pretrained`.

    Returns:
        The commit; the last one if nothing has changed.

    Raises:
        CheckpointError: The saved folder does not open.
        PushRefusedError: Some of its content must not be uploaded.
        HubError: There is no token, permission or network.
    """
    api = HfApi(token=token, library_name="plain-vit")
    if "/" not in repo_id:
        repo_id = f"{api.whoami()['name']}/{repo_id}"
    own_token = token if isinstance(token, str) else None
    check_repository(repo_id, own_token, revision=revision)
    is_model = isinstance(thing, PreTrainedModel)
    message = commit_message or f"Upload {'model' if is_model else type(thing).__name__}"
    known = known_secrets(token)
    if secrets_in(f"{message}\n{commit_description or ''}", known):
        raise PushRefusedError(f"{repo_id} was not changed.", ["the commit message contains a secret"])
    if is_model and max_shard_size is not None:
        saving = {"max_shard_size": max_shard_size, **(saving or {})}
    with TemporaryDirectory() as temporary:
        folder = Path(temporary, repo_id.rpartition("/")[2])
        thing.save_pretrained(folder, **(saving or {}))
        only_new = [CARD]
        if is_model and not _save_processor(thing, image_processor, folder):
            only_new.append(IMAGE_PROCESSOR_CONFIG)
        opened = open_folder(folder) if is_model else settings_alone(folder)
        contents = gather(folder, opened, known)
        if contents.left_out:
            logger.warning("Not uploaded, since not part of a model repository: %s", ", ".join(contents.left_out))
        if is_model:
            _add_page(contents, folder, opened, repo_id, known, tags or ())
        delivery = Delivery(
            repo_id=repo_id, contents=contents, private=bool(private), revision=revision, message=message,
            description=commit_description, create_pr=create_pr, only_new=only_new, notes=opened.notes,
            replaces_weights=is_model, base_model=opened.base_model,
        )  # fmt: skip
        return delivered(api, delivery)[1]


def save_and_push(thing: Any, folder: str | os.PathLike[str], **options: Any) -> None:
    """Save and push, for `save_pretrained(..., push_to_hub=True)` where this package is installed.

    Args:
        thing: As for `push_saved`.
        folder: Folder to save to.
        **options: Arguments of `save_pretrained`.
    """
    repo_id = options.pop("repo_id", None) or Path(folder).resolve().name
    hub = {name: options.pop(name) for name in HUB_OPTIONS if name in options}
    options.pop("push_to_hub", None)
    thing.save_pretrained(folder, **options)
    if options.get("is_main_process", True):
        push_saved(thing, repo_id, saving=options, **hub)


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
    contents: Contents, folder: Path, opened: Opened, repo_id: str, known: Collection[str], tags: Sequence[str] = ()
) -> None:
    """Insert the repository id into a model card of ours, generated if missing; other cards are not changed."""
    page = (folder / CARD).read_bytes() if CARD in contents.sent else None
    if opened.adapter is not None and not opened.config:
        text = None if page is None else page.decode("utf-8-sig", errors="replace")
        if (new := opened.adapter.page(text, tags)) != text:
            page = new.encode()
    elif page is None and opened.config.get("model_type") == PlainViTConfig.model_type:
        page = card_text(folder, ModelFacts(tags=tuple(tags))).encode()
    if page is not None and is_untouched(page):
        contents.add_text(CARD, addressed(page, repo_id), known)


def _save_processor(model: PreTrainedModel, given: Any, folder: Path) -> bool:
    """Save the image processor of a model, and return whether the caller gave it.

    If it was found instead, it must not replace the one in the repository.
    """
    processor = given or _processor_of(model)
    if processor is None:
        logger.warning("The model has no image processor: pass image_processor=, or push one separately.")
    else:
        processor.save_pretrained(folder)
    return given is not None


def _processor_of(model: PreTrainedModel) -> Any:
    """Return the image processor of the folder or cached repository that a model was loaded from, if any."""
    source = model.name_or_path
    revision = getattr(model.config, "_commit_hash", None)
    if not source or not Path(source).is_dir():
        names = (PROCESSOR_CONFIG, IMAGE_PROCESSOR_CONFIG) if source else ()
        tried = (huggingface_hub.try_to_load_from_cache(str(source), name, revision=revision) for name in names)
        cached = next((path for path in tried if isinstance(path, str)), None)
        if cached is None:
            return None
        source = str(Path(cached).parent)
    try:
        return AutoImageProcessor.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError):
        return None


__all__ = ["Push", "check_repository", "push_folder", "push_saved", "save_and_push"]

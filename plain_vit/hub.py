"""Pushing a saved model to the Hub: what would be sent is looked at first, and arrives in one commit or not at all."""

import os
import re
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

import huggingface_hub
from huggingface_hub import CommitOperationAdd, CommitOperationCopy, CommitOperationDelete, HfApi
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from .configuration_plain_vit import PlainViTConfig
from .errors import CheckpointError, HubError, PushRefusedError
from .files.reading import NOT_WEIGHTS, read_checkpoint
from .model_card import CARD, ModelFacts, addressed, card_text, is_untouched

LIMIT_BYTES = 5_000_000_000  # of one file; a larger one is a mistake more often than a model
TRIES = 4
TRANSIENT = (408, 429, 500, 502, 503, 504)
MAX_WAIT = 60.0  # seconds

# Weights of an earlier push would be loaded instead of the new ones, or beside them.
WEIGHTS = re.compile(r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?")

JUNK = re.compile(r"\.git|\.cache|__pycache__|\.ipynb_checkpoints|\.DS_Store|Thumbs\.db|\.plain-vit-.*")
TRAINING_FOLDERS = re.compile(r"best|checkpoints?|(checkpoint|step|epoch)[-_]\d+")
SECRET_NAMES = re.compile(
    r"\.env(\..*)?|\.netrc|\.npmrc|\.pypirc|\.git-credentials|id_(rsa|dsa|ecdsa|ed25519).*"
    r"|.*\.(pem|key|p12|pfx|keystore|kdbx)|(.*[._-])?(token|secrets?|credentials?|passwords?)([._-].*)?",
    re.IGNORECASE,
)
SECRETS = re.compile(
    rb"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----|\bhf_[A-Za-z0-9]{30,}\b|\bgh[pousr]_[A-Za-z0-9]{36}\b"
    rb"|\bgithub_pat_[A-Za-z0-9_]{60,}\b|\bAKIA[0-9A-Z]{16}\b|\bAIza[0-9A-Za-z_-]{35}\b|\bsk-[A-Za-z0-9_-]{32,}"
    rb"|\bxox[abprs]-[0-9A-Za-z-]{10,}"
)
NO_SECRETS = (".safetensors", ".npz", ".png", ".jpg", ".jpeg", ".gif", ".webp")  # numbers, in which anything occurs
SEARCHED_BYTES = 20_000_000
PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".joblib", ".tar")


@dataclass(frozen=True)
class Push:
    """What a push sends, or has sent.

    Args:
        repo_id: The repository.
        sent: Size in bytes of each file, by its path.
        left_out: Why each other file of the folder stays here.
        removed: Weights of an earlier push, which go.
        url: Of the commit; None for a dry run.
    """

    repo_id: str
    sent: Mapping[str, int]
    left_out: Mapping[str, str]
    removed: Sequence[str] = ()
    url: str | None = None

    def __str__(self) -> str:
        lines = [f"{'would send' if self.url is None else 'sent'} to {self.repo_id}:"]
        lines += [f"  {name} ({size:,} bytes)" for name, size in self.sent.items()]
        lines += [f"  left out {name}: {reason}" for name, reason in self.left_out.items()]
        lines += [f"  removed {name}: of an earlier push" for name in self.removed]
        total = f"  {len(self.sent)} files, {sum(self.sent.values()):,} bytes"
        return "\n".join([*lines, total, *([self.url] if self.url else [])])


@dataclass
class _Survey:
    """What a folder holds: what is sent, what stays here and why, and what is in the way."""

    sent: dict[str, Path] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


def push_folder(
    folder: str | os.PathLike[str],
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    dry_run: bool = False,
    allow: Sequence[str] = (),
    exclude: Sequence[str] = (),
    message: str = "Upload model",
    token: str | None = None,
) -> Push:
    """Send the folder of a saved model to the Hub, in one commit.

    What an interrupted push has uploaded is not sent again. A folder of ours without a page (`README.md`) is sent with
    one; a page that a person has edited on the Hub stays. Weights of an earlier push that are not replaced go.
    Checkpoints and optimizer states of a training run stay here. Nothing in the folder is executed.

    Args:
        folder: Holds `config.json` and weights; they are opened, to be sure that they are whole.
        repo_id: "user/name"; made if it is not there.
        private: Let nobody else see it. A repository that is public already is refused.
        revision: Branch to commit to, made if it is not there; the main one if not given.
        dry_run: Send nothing and need no network: return what would be sent.
        allow: Patterns of paths (such as "*.pt") that are sent although they would be left out or refused.
        exclude: Patterns of paths that stay here.
        message: Of the commit.
        token: Of the user who pushes; that of `hf auth login` or `HF_TOKEN` if not given.

    Returns:
        What was sent, or would be.

    Raises:
        CheckpointError: The folder holds no whole model.
        PushRefusedError: lists every file that looks like a secret, a pickle, or is larger than 5 GB.
        HubError: There is no token, permission or network, or the repository was changed at the same time.
    """
    path = Path(folder).expanduser()
    check_repository(repo_id, token, needs_token=not dry_run)
    if not path.is_dir():
        raise CheckpointError(f"{path} is no folder: give the folder of a saved model.")
    checkpoint = read_checkpoint(path)
    if checkpoint.config is None:
        raise CheckpointError(f"{path} holds no config.json: give the folder of a saved model.")
    survey = _survey(path, allow, exclude, token or huggingface_hub.get_token())
    if survey.faults:
        raise PushRefusedError(
            f"{path} was not pushed. Remove these files, leave them out with exclude, or insist with allow:",
            survey.faults,
        )
    ours = checkpoint.config.get("model_type") == PlainViTConfig.model_type
    contents: dict[str, Path | bytes] = {**survey.sent}
    if CARD in survey.sent:
        contents[CARD] = addressed(survey.sent[CARD].read_bytes(), repo_id)
    elif ours and CARD not in survey.left_out:
        contents[CARD] = addressed(card_text(path, ModelFacts()).encode(), repo_id)
    if dry_run:
        return Push(repo_id, _sizes(contents), survey.left_out)

    api = HfApi(token=token, library_name="plain-vit")
    with _clear_errors(repo_id):
        attempt = 1
        while True:
            try:
                return _send(api, repo_id, contents, survey.left_out, private, revision, message, CARD in allow)
            except (HTTPError, RuntimeError) as error:  # hf_xet raises RuntimeError
                status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
                if attempt == TRIES or (status is not None and status not in TRANSIENT):
                    raise
                time.sleep(min(MAX_WAIT, _asked_to_wait(error) or 2.0**attempt))
                attempt += 1


def check_repository(repo_id: str, token: str | None = None, *, needs_token: bool = True) -> None:
    """See, before any work and without the network, that something could be pushed.

    Args:
        repo_id: "user/name".
        token: Of the user who pushes; that of `hf auth login` or `HF_TOKEN` if not given.
        needs_token: Whether there has to be one.

    Raises:
        HubError: The id is none, or there is no token.
    """
    try:
        huggingface_hub.utils.validate_repo_id(repo_id)
    except HFValidationError as error:
        raise HubError(f"{repo_id!r} cannot be the name of a repository: {error}") from None
    if "/" not in repo_id:
        raise HubError(f"{repo_id!r} names no owner: expected user/name.")
    if needs_token and token is None and huggingface_hub.get_token() is None:
        raise HubError("There is no token: run `hf auth login`, or set HF_TOKEN to one that may write.")


def _send(
    api: HfApi,
    repo_id: str,
    contents: Mapping[str, Path | bytes],
    left_out: Mapping[str, str],
    private: bool,
    revision: str | None,
    message: str,
    overwrite_card: bool,
) -> Push:
    """Try once. All is looked up anew: if a commit arrived whose answer was lost, nothing is left to send."""
    api.create_repo(repo_id, private=private or None, exist_ok=True)
    if private and not api.repo_info(repo_id).private:
        raise HubError(
            f"{repo_id} is there and public: make it private in its settings first, or push without private."
        )
    if revision is not None:
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    head = api.repo_info(repo_id, revision=revision).sha
    there = api.list_repo_files(repo_id, revision=head)

    contents, left_out = dict(contents), dict(left_out)
    if CARD in contents and CARD in there and not overwrite_card:
        remote = Path(api.hf_hub_download(repo_id, CARD, revision=head)).read_bytes()
        if remote != contents[CARD] and not is_untouched(remote):
            del contents[CARD]
            left_out[CARD] = "the page on the Hub was edited by a person; allow README.md to overwrite it"
    removed = [name for name in there if WEIGHTS.fullmatch(name) and name not in contents]
    operations: list[CommitOperationAdd | CommitOperationCopy | CommitOperationDelete] = [
        *(CommitOperationAdd(name, content) for name, content in contents.items()),
        *(CommitOperationDelete(name) for name in removed),
    ]
    commit = api.create_commit(repo_id, operations, commit_message=message, revision=revision, parent_commit=head)
    return Push(repo_id, _sizes(contents), left_out, removed, commit.commit_url)


def _sizes(contents: Mapping[str, Path | bytes]) -> dict[str, int]:
    return {
        name: len(content) if isinstance(content, bytes) else content.stat().st_size
        for name, content in sorted(contents.items())
    }


# ---- what may leave ----


def _survey(folder: Path, allow: Sequence[str], exclude: Sequence[str], token: str | None) -> _Survey:
    """Look at every file of a folder."""
    survey = _Survey()
    for place, folders, names in os.walk(folder):
        for link in (name for name in folders if Path(place, name).is_symlink()):
            names.append(link)
        folders.sort()
        for path in (Path(place, name) for name in sorted(names)):
            name = path.relative_to(folder).as_posix()
            if any(fnmatch(name, pattern) for pattern in exclude):
                survey.left_out[name] = "excluded"
            elif any(fnmatch(name, pattern) for pattern in allow):
                survey.sent[name] = path
            elif reason := _leftover(name):
                survey.left_out[name] = reason
            elif fault := _fault(path, folder, token):
                survey.faults.append(f"{name} {fault}")
            else:
                survey.sent[name] = path
    return survey


def _leftover(name: str) -> str | None:
    """Return why a file is left out in any case."""
    *folders, file = name.split("/")
    if any(JUNK.fullmatch(part) for part in (*folders, file)):
        return "no part of a model"
    if any(TRAINING_FOLDERS.fullmatch(part) for part in folders):
        return "a checkpoint of the training"
    return "a state of the training" if NOT_WEIGHTS.search(file) else None


def _fault(path: Path, folder: Path, token: str | None) -> str | None:
    """Return what speaks against sending a file."""
    name = path.name
    if SECRET_NAMES.fullmatch(name):
        return "is named like a secret"
    if name.startswith(".") and name != ".gitattributes":
        return "is hidden"
    if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
        return f"is a link out of the folder, to {path.resolve()}"
    if not path.is_file():
        return "is no ordinary file"
    size = path.stat().st_size
    if size > LIMIT_BYTES:
        return f"has {size:,} bytes; without being allowed at most {LIMIT_BYTES:,} are sent"
    with path.open("rb") as file:
        start = file.read(2)
    if path.suffix in PICKLES or (start[:1] == b"\x80" and start[1:] in b"\2\3\4\5"):
        return "is a pickle, which runs code where it is loaded: save safetensors"
    if start == b"PK" and _holds_pickle(path):
        return "is an archive with a pickle in it: save safetensors"
    if size <= SEARCHED_BYTES and path.suffix not in NO_SECRETS:
        content = path.read_bytes()
        if SECRETS.search(content) or (token is not None and token.encode() in content):
            return "holds what looks like a secret key or token"
    return None


def _holds_pickle(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith((".pkl", ".pickle")) for name in archive.namelist())
    except zipfile.BadZipFile:
        return False


# ---- what the Hub says ----


@contextmanager
def _clear_errors(repo_id: str) -> Iterator[None]:
    """Say what went wrong on the Hub and what to do."""
    try:
        yield
    except HubError:
        raise
    except OfflineModeIsEnabled as error:
        raise HubError(f"{repo_id} was not pushed: the Hub is switched off, unset HF_HUB_OFFLINE.") from error
    except RepositoryNotFoundError as error:
        raise HubError(
            f"{repo_id} is not there, or this token may not see it: check the name and the token."
        ) from error
    except RevisionNotFoundError as error:
        raise HubError(f"{repo_id} has no branch of that name, and none could be made: {_said(error)}") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        reasons = {
            401: "the token was refused: run `hf auth login` with one that is valid",
            403: "this token may not write there: check the owner's name, or take a token that may write",
            409: "somebody else is changing it: push again",
            412: "it was changed while this push went on, and stays as that left it: look at it and push again",
            429: "the Hub takes no more for now: wait and push again",
        }
        reason = reasons.get(status, "the Hub has a fault of its own: push again later" if status >= 500 else "refused")
        raise HubError(f"{repo_id} was not changed: {reason} ({status}: {_said(error)}).") from error
    except ValueError as error:  # of the page's metadata
        raise HubError(f"{repo_id} was not changed: {error}") from error
    except (HTTPError, OSError, RuntimeError) as error:
        raise HubError(
            f"{repo_id} was not changed: the Hub cannot be reached at {huggingface_hub.constants.ENDPOINT} "
            f"({_said(error)}). Check the network and push again; what was uploaded is not sent again."
        ) from error


def _said(error: Exception) -> str:
    lines = str(getattr(error, "server_message", None) or error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _asked_to_wait(error: Exception) -> float | None:
    """Return the seconds after which the Hub wants to be asked again, where it says so."""
    headers = error.response.headers if isinstance(error, HfHubHTTPError) else {}
    said = headers.get("Retry-After", "")
    return float(said) if said.isdigit() else None

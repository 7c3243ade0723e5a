"""Upload of a push: one commit of the files that differ, retried after transient errors."""

import hashlib
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationCopy, CommitOperationDelete, HfApi
from huggingface_hub.errors import (
    HfHubHTTPError,
    HTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import get_session, hf_raise_for_status

from ..errors import CheckpointError, HubError, PlainViTError, printable
from ..files.marks import is_untouched
from .card import CARD
from .contents import NO_PART, Contents

TRIES = 4
TRANSIENT = (408, 429, 500, 502, 503, 504)
MAX_WAIT = 60.0  # seconds
SHOWN_OF_A_FOLDER = 5  # files left out; more of one folder are only counted

# Weights of an earlier push would be loaded instead of the new ones, or along with them.
WEIGHTS = re.compile(r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?")


@dataclass(frozen=True)
class Push:
    """The outcome of a push, or of a dry run.

    Args:
        repo_id: The repository.
        sent: Size in bytes of each uploaded file, by path.
        left_out: For each other file of the folder, the reason why it is not uploaded.
        removed: Weights of an earlier push that are deleted.
        unchanged: Files that the repository already has.
        reencoded: Pictures of which only the pixels are uploaded.
        notes: Checks that could not be made.
        url: URL of the commit; None for a dry run.
    """

    repo_id: str
    sent: Mapping[str, int]
    left_out: Mapping[str, str]
    removed: Sequence[str] = ()
    unchanged: Sequence[str] = ()
    reencoded: Sequence[str] = ()
    notes: Sequence[str] = ()
    url: str | None = None

    def __str__(self) -> str:
        lines = [f"{'would send' if self.url is None else 'sent'} to {self.repo_id}:"]
        if not self.sent and not self.removed:
            lines = [f"nothing to send: {self.repo_id} already has all {len(self.unchanged)} files"]
        lines += [f"  {name} ({size:,} bytes)" for name, size in self.sent.items()]
        lines += [f"  unchanged {name}" for name in self.unchanged if self.sent or self.removed]
        lines += [f"  removed {name}: from an earlier push" for name in self.removed]
        lines += [f"  re-encoded {name}: its pixels, without metadata" for name in self.reencoded]
        lines += [f"  note: {note}" for note in self.notes]
        lines += self._left_out_lines()
        total = f"  {len(self.sent)} files, {sum(self.sent.values()):,} bytes"
        return printable("\n".join([*lines, *([total] if self.sent else []), *([self.url] if self.url else [])]))

    def _left_out_lines(self) -> list[str]:
        """Return a line per file left out, or one per folder with many of them."""
        folders: dict[str, list[str]] = {}
        for name in self.left_out:
            folders.setdefault(name.partition("/")[0] if "/" in name else "", []).append(name)
        lines = []
        for folder, names in folders.items():
            if folder and len(names) > SHOWN_OF_A_FOLDER:
                lines.append(f"  left out {folder}/: {len(names)} files, {NO_PART}")
            else:
                lines += [f"  left out {name}: {self.left_out[name]}" for name in names]
        if NO_PART in self.left_out.values():
            lines.append("  (--include PATH adds such a file)")
        return lines


@dataclass(kw_only=True)
class Delivery:
    """The files to push and their destination.

    Args:
        repo_id: The repository.
        contents: The files.
        private: Whether the repository must be private.
        revision: Branch; main if None.
        message: Commit message.
        description: Commit description.
        create_pr: Open a pull request instead.
        overwrites_card: Replace a model card that a person has edited.
        only_new: Files that are not uploaded if the repository already has them.
        replaces_weights: Delete the weights of an earlier push.
        notes: Checks that could not be made, for the `Push`.
        base_model: Hub id of an adapter's base model, which must exist.
    """

    repo_id: str
    contents: Contents
    private: bool
    revision: str | None
    message: str
    description: str | None = None
    create_pr: bool = False
    overwrites_card: bool = False
    only_new: Sequence[str] = ()
    replaces_weights: bool = True
    notes: Sequence[str] = ()
    base_model: str | None = None

    def planned(self) -> Push:
        """Return the outcome of a push to an empty repository."""
        sizes = _sizes(self.contents.sent)
        return Push(self.repo_id, sizes, self.contents.left_out, reencoded=self.contents.reencoded, notes=self.notes)


@dataclass
class _State:
    """The state of the repository between attempts."""

    requested: bool = False  # it did not exist, and its creation was requested
    created: bool = False
    deleted: bool = False  # created for this push, then deleted again
    first_head: str | None = None  # of the created repository
    attempt: Push | None = None  # whose response may have been lost
    checked_card: bool = False


def delivered(api: HfApi, delivery: Delivery) -> tuple[Push, CommitInfo]:
    """Push, retrying after transient errors.

    Raises:
        HubError: The push failed; the message includes the state of the repository.
        CheckpointError: A file was changed after it was inspected.
    """
    state = _State()
    with _explain_errors(delivery, state):
        attempt = 1
        while True:
            try:
                return _send(api, delivery, state)
            except (HTTPError, RuntimeError) as error:  # hf_xet raises RuntimeError
                if attempt == TRIES or not _is_transient(error):
                    _remove_if_refused(api, delivery, state, error)
                    raise
                time.sleep(min(MAX_WAIT, _retry_after(error) or 2.0**attempt))
                attempt += 1
            except (ValueError, PlainViTError) as error:
                _remove_if_refused(api, delivery, state, error)
                raise


def _check_card(api: HfApi, text: str) -> None:
    """Let this Hub judge a card; `ModelCard.validate` sends it to the public one before huggingface_hub 2.4.

    Raises:
        ValueError: The card is refused; says why.
    """
    body, headers = {"repoType": "model", "content": text}, {"Accept": "text/plain"}
    answer = get_session().post(f"{api.endpoint}/api/validate-yaml", json=body, headers=headers)
    if answer.status_code == 400:
        raise ValueError(answer.text)
    hf_raise_for_status(answer)


def _send(api: HfApi, delivery: Delivery, state: _State) -> tuple[Push, CommitInfo]:
    """Make one attempt. The repository is read again: if an earlier commit did arrive, nothing remains to be sent."""
    repo_id, revision, contents = delivery.repo_id, delivery.revision, delivery.contents
    if CARD in contents.sent and not state.checked_card:
        _check_card(api, _content(contents.sent[CARD]).decode("utf-8-sig"))
        state.checked_card = True
    if delivery.base_model is not None and not api.repo_exists(delivery.base_model):
        raise HubError(
            f"{delivery.base_model}, the base model of the adapter, is not on the Hub or not visible with this token: "
            "push the base model first, or correct its id in adapter_config.json."
        )
    if not api.repo_exists(repo_id):
        state.requested = True
        api.create_repo(repo_id, private=delivery.private or None, exist_ok=True)
    state.created = state.requested
    about = api.repo_info(repo_id)
    state.first_head = state.first_head or about.sha
    if delivery.private and not about.private:
        raise HubError(
            f"{repo_id} exists and is public: make it private in its settings first, or push without private."
        )
    if revision is not None and not delivery.create_pr and not revision.startswith("refs/"):
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    head = api.repo_info(repo_id, revision=revision).sha or ""
    there = {entry.path: entry for entry in api.list_repo_tree(repo_id, recursive=True, revision=head)
             if isinstance(entry, RepoFile)}  # fmt: skip

    sending, left_out = dict(contents.sent), dict(contents.left_out)
    for name in delivery.only_new:
        if name in there and sending.pop(name, None) is not None:
            left_out[name] = "the repository already has one"
    if CARD in sending and CARD in there and not delivery.overwrites_card:
        remote = Path(api.hf_hub_download(repo_id, CARD, revision=head)).read_bytes()
        if remote != _content(sending[CARD]) and not is_untouched(remote):
            del sending[CARD]
            left_out[CARD] = "the model card on the Hub was edited by a person; include README.md to overwrite it"
    unchanged = [name for name, content in sending.items() if name in there and _is_same(content, there[name])]
    removed = [name for name in there if WEIGHTS.fullmatch(name) and name not in sending and delivery.replaces_weights]
    changed = {name: content for name, content in sending.items() if name not in unchanged}
    details: dict[str, Any] = {"reencoded": contents.reencoded, "notes": delivery.notes}
    if not changed and not removed:
        url = f"{huggingface_hub.constants.ENDPOINT}/{repo_id}/commit/{head}"
        info = CommitInfo(commit_url=url, commit_message=delivery.message, commit_description="", oid=head)
        done = state.attempt or Push(repo_id, {}, left_out, unchanged=unchanged, **details)
        return replace(done, url=url), info
    if moved := contents.changed():
        raise CheckpointError(f"{', '.join(moved)} changed after being inspected: push again.")
    push = Push(repo_id, _sizes(changed), left_out, removed, unchanged, **details)
    state.attempt = state.attempt or push
    operations: list[CommitOperationAdd | CommitOperationCopy | CommitOperationDelete] = [
        *(CommitOperationAdd(name, content) for name, content in changed.items()),
        *(CommitOperationDelete(name) for name in removed),
    ]
    commit = api.create_commit(
        repo_id, operations, commit_message=delivery.message, commit_description=delivery.description,
        revision=revision, parent_commit=head, create_pr=delivery.create_pr,
    )  # fmt: skip
    return replace(push, url=commit.commit_url), commit


def _content(content: Path | bytes) -> bytes:
    return content if isinstance(content, bytes) else content.read_bytes()


def _sizes(contents: Mapping[str, Path | bytes]) -> dict[str, int]:
    return {
        name: len(content) if isinstance(content, bytes) else content.stat().st_size
        for name, content in sorted(contents.items())
    }


def _is_same(content: Path | bytes, entry: RepoFile) -> bool:
    """Return whether the repository has this content, by the hash that the Hub stores."""
    size = len(content) if isinstance(content, bytes) else content.stat().st_size
    if size != entry.size:
        return False
    if entry.lfs is None:
        return hashlib.sha1(b"blob %d\0" % size + _content(content)).hexdigest() == entry.blob_id
    if isinstance(content, bytes):
        return hashlib.sha256(content).hexdigest() == entry.lfs.sha256
    with content.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == entry.lfs.sha256


def _is_transient(error: Exception) -> bool:
    """Return whether an error may be transient."""
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    return isinstance(error, (HTTPError, RuntimeError)) and (status is None or status in TRANSIENT)


def _remove_if_refused(api: HfApi, delivery: Delivery, state: _State, error: Exception) -> None:
    """Delete the repository created for a push that failed permanently, if it is still empty."""
    if state.created and not _is_transient(error):
        with suppress(HTTPError):  # a token may be allowed to create repositories but not to delete them
            if api.repo_info(delivery.repo_id).sha == state.first_head:
                api.delete_repo(delivery.repo_id)
                state.deleted = True


# ---- errors of the Hub ----


@contextmanager
def _explain_errors(delivery: Delivery, state: _State) -> Iterator[None]:
    """Raise errors of the Hub with the cause, the state of the repository, and what to do."""
    repo_id, branch = delivery.repo_id, delivery.revision
    try:
        yield
    except PlainViTError as error:
        if state.created and not state.deleted:
            raise type(error)(f"{error} {_state_of(repo_id, state)}.") from error
        raise
    except OfflineModeIsEnabled as error:
        raise HubError(f"{repo_id} was not pushed: offline mode is on, unset HF_HUB_OFFLINE.") from error
    except RepositoryNotFoundError as error:
        raise HubError(
            f"{repo_id} does not exist or is not visible with this token: check the name and the token."
        ) from error
    except RevisionNotFoundError as error:
        raise HubError(
            f"{_state_of(repo_id, state)}: it has no branch {branch!r}, and creating one failed ({_first_line(error)})."
        ) from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        reasons = {
            401: "the token was rejected: run `hf auth login` with a valid one",
            403: "this token has no write access: check the owner's name, or use a token with write access",
            409: "it is being changed by someone else: push again",
            412: "it was changed by someone else during this push: check that change and push again",
            429: "too many requests: wait and push again",
        }
        reason = reasons.get(status, "internal error of the Hub: push again later" if status >= 500 else "refused")
        if branch is not None:
            reason = f"branch {branch!r}: {reason}"
        raise HubError(f"{_state_of(repo_id, state)}: {reason} ({status}: {_first_line(error)}).") from error
    except ValueError as error:  # of the card's metadata
        raise HubError(f"{_state_of(repo_id, state)}: {_faults_of_card(str(error))}") from error
    except (HTTPError, OSError, RuntimeError) as error:
        raise HubError(
            f"{_state_of(repo_id, state)}: the Hub cannot be reached at {huggingface_hub.constants.ENDPOINT} "
            f"({_first_line(error)}). Check the network and push again; files already uploaded are not sent again."
        ) from error


def _state_of(repo_id: str, state: _State) -> str:
    """Describe the repository after a failed push."""
    if state.deleted:
        return f"{repo_id} was created for this push and, after the failure, deleted again"
    return f"{repo_id} was created for this push and is empty" if state.created else f"{repo_id} was not changed"


def _faults_of_card(answer: str) -> str:
    """Return the Hub's errors about the metadata of a model card."""
    try:
        faults = [fault["message"] for fault in json.loads(answer)["errors"]]
    except (ValueError, TypeError, KeyError):
        return answer
    return f"the metadata of {CARD}: {'; '.join(map(str, faults))}"


def _first_line(error: Exception) -> str:
    lines = str(getattr(error, "server_message", None) or error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _retry_after(error: Exception) -> float | None:
    """Return the seconds to wait before the next request, if the Hub states them."""
    headers = error.response.headers if isinstance(error, HfHubHTTPError) else {}
    seconds = headers.get("Retry-After", "")
    return float(seconds) if seconds.isdigit() else None

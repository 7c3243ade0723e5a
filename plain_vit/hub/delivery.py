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
from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationCopy, CommitOperationDelete, HfApi, ModelCard
from huggingface_hub.errors import (
    HfHubHTTPError,
    HTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile

from ..errors import CheckpointError, HubError, PlainViTError, printable
from ..files.marks import is_untouched
from ..model_card import CARD
from .contents import NO_PART, Contents

TRIES = 4
TRANSIENT = (408, 429, 500, 502, 503, 504)
MAX_WAIT = 60.0  # seconds
SHOWN_OF_A_FOLDER = 5  # files that stay here; more of one folder are counted

# Weights of an earlier push would be loaded instead of the new ones, or beside them.
WEIGHTS = re.compile(r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?")


@dataclass(frozen=True)
class Push:
    """What a push sends, or has sent.

    Args:
        repo_id: The repository.
        sent: Size in bytes of each file, by its path.
        left_out: Why each other file of the folder stays here.
        removed: Weights of an earlier push, which go.
        unchanged: Files that the repository has already.
        cleaned: Files that go without the metadata of their pictures.
        notes: What could not be tried before.
        url: Of the commit; None for a dry run.
    """

    repo_id: str
    sent: Mapping[str, int]
    left_out: Mapping[str, str]
    removed: Sequence[str] = ()
    unchanged: Sequence[str] = ()
    cleaned: Sequence[str] = ()
    notes: Sequence[str] = ()
    url: str | None = None

    def __str__(self) -> str:
        lines = [f"{'would send' if self.url is None else 'sent'} to {self.repo_id}:"]
        if not self.sent and not self.removed:
            lines = [f"nothing to send: {self.repo_id} has all {len(self.unchanged)} files as they are"]
        lines += [f"  {name} ({size:,} bytes)" for name, size in self.sent.items()]
        lines += [f"  unchanged {name}" for name in self.unchanged if self.sent or self.removed]
        lines += [f"  removed {name}: of an earlier push" for name in self.removed]
        lines += [f"  without its metadata: {name}" for name in self.cleaned]
        lines += [f"  note: {note}" for note in self.notes]
        lines += self._staying()
        total = f"  {len(self.sent)} files, {sum(self.sent.values()):,} bytes"
        return printable("\n".join([*lines, *([total] if self.sent else []), *([self.url] if self.url else [])]))

    def _staying(self) -> list[str]:
        """Return a line per file that stays here, and one for all of a folder that has many."""
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
            lines.append("  (--include PATH sends such a file besides)")
        return lines


@dataclass(kw_only=True)
class Delivery:
    """What goes where.

    Args:
        repo_id: The repository.
        contents: Of the push.
        private: Whether nobody else may see it.
        revision: Branch; the main one if None.
        message: Of the commit.
        description: Of the commit.
        create_pr: Open a pull request instead.
        overwrites_card: Replace a page that a person has edited.
        only_new: Files that are left out where the repository has them.
        replaces_weights: Remove the weights of an earlier push.
        notes: For the `Push`.
        base_model: Hub id of the model that an adapter is for, without which it is of no use.
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
        """Return what would be sent to an empty repository."""
        sizes = _sizes(self.contents.sent)
        return Push(self.repo_id, sizes, self.contents.left_out, cleaned=self.contents.cleaned, notes=self.notes)


@dataclass
class _State:
    """What is known of the repository after some tries."""

    asked_for_it: bool = False  # it was not there, and was asked for
    made: bool = False
    gone: bool = False  # made for this push, and removed again
    first_head: str | None = None  # of the one that was made
    attempt: Push | None = None  # whose answer may have been lost
    checked_card: bool = False


def delivered(api: HfApi, delivery: Delivery) -> tuple[Push, CommitInfo]:
    """Send, and try again where a fault passes.

    Raises:
        HubError: It could not be sent; says in which state the repository is.
        CheckpointError: A file was changed after it was looked at.
    """
    state = _State()
    with _explain_errors(delivery, state):
        attempt = 1
        while True:
            try:
                return _send(api, delivery, state)
            except (HTTPError, RuntimeError) as error:  # hf_xet raises RuntimeError
                if attempt == TRIES or not _passes(error):
                    _remove_if_refused(api, delivery, state, error)
                    raise
                time.sleep(min(MAX_WAIT, _asked_to_wait(error) or 2.0**attempt))
                attempt += 1
            except (ValueError, PlainViTError) as error:
                _remove_if_refused(api, delivery, state, error)
                raise


def _send(api: HfApi, delivery: Delivery, state: _State) -> tuple[Push, CommitInfo]:
    """Try once. All is looked up anew: if a commit arrived whose answer was lost, nothing is left to send."""
    repo_id, revision, contents = delivery.repo_id, delivery.revision, delivery.contents
    if CARD in contents.sent and not state.checked_card:
        ModelCard(_content(contents.sent[CARD]).decode("utf-8-sig")).validate(repo_type="model")
        state.checked_card = True
    if delivery.base_model is not None and not api.repo_exists(delivery.base_model):
        raise HubError(
            f"{delivery.base_model} is not on the Hub, or this token may not see it, and the adapter is for it: push "
            "the base model first, or write its id into adapter_config.json."
        )
    if not api.repo_exists(repo_id):
        state.asked_for_it = True
        api.create_repo(repo_id, private=delivery.private or None, exist_ok=True)
    state.made = state.asked_for_it
    about = api.repo_info(repo_id)
    state.first_head = state.first_head or about.sha
    if delivery.private and not about.private:
        raise HubError(
            f"{repo_id} is there and public: make it private in its settings first, or push without private."
        )
    if revision is not None and not delivery.create_pr and not revision.startswith("refs/"):
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    head = api.repo_info(repo_id, revision=revision).sha or ""
    there = {entry.path: entry for entry in api.list_repo_tree(repo_id, recursive=True, revision=head)
             if isinstance(entry, RepoFile)}  # fmt: skip

    sending, left_out = dict(contents.sent), dict(contents.left_out)
    for name in delivery.only_new:
        if name in there and sending.pop(name, None) is not None:
            left_out[name] = "the repository has one"
    if CARD in sending and CARD in there and not delivery.overwrites_card:
        remote = Path(api.hf_hub_download(repo_id, CARD, revision=head)).read_bytes()
        if remote != _content(sending[CARD]) and not is_untouched(remote):
            del sending[CARD]
            left_out[CARD] = "the page on the Hub was edited by a person; include README.md to overwrite it"
    unchanged = [name for name, content in sending.items() if name in there and _is_same(content, there[name])]
    removed = [name for name in there if WEIGHTS.fullmatch(name) and name not in sending and delivery.replaces_weights]
    changed = {name: content for name, content in sending.items() if name not in unchanged}
    about_it: dict[str, Any] = {"cleaned": contents.cleaned, "notes": delivery.notes}
    if not changed and not removed:
        url = f"{huggingface_hub.constants.ENDPOINT}/{repo_id}/commit/{head}"
        info = CommitInfo(commit_url=url, commit_message=delivery.message, commit_description="", oid=head)
        done = state.attempt or Push(repo_id, {}, left_out, unchanged=unchanged, **about_it)
        return replace(done, url=url), info
    if moved := contents.changed():
        raise CheckpointError(f"{', '.join(moved)} changed after being looked at: push again.")
    push = Push(repo_id, _sizes(changed), left_out, removed, unchanged, **about_it)
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
    """Tell whether the repository holds this content, by the hash that the Hub keeps of it."""
    size = len(content) if isinstance(content, bytes) else content.stat().st_size
    if size != entry.size:
        return False
    if entry.lfs is None:
        return hashlib.sha1(b"blob %d\0" % size + _content(content)).hexdigest() == entry.blob_id
    if isinstance(content, bytes):
        return hashlib.sha256(content).hexdigest() == entry.lfs.sha256
    with content.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == entry.lfs.sha256


def _passes(error: Exception) -> bool:
    """Tell a fault that may pass from a refusal."""
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    return isinstance(error, (HTTPError, RuntimeError)) and (status is None or status in TRANSIENT)


def _remove_if_refused(api: HfApi, delivery: Delivery, state: _State, error: Exception) -> None:
    """Remove the repository that was made for a push which is refused for good, if nothing has arrived there."""
    if state.made and not _passes(error):
        with suppress(HTTPError):  # a token may be allowed to make repositories and not to remove them
            if api.repo_info(delivery.repo_id).sha == state.first_head:
                api.delete_repo(delivery.repo_id)
                state.gone = True


# ---- what the Hub says ----


@contextmanager
def _explain_errors(delivery: Delivery, state: _State) -> Iterator[None]:
    """Say what went wrong on the Hub, how the repository is now, and what to do."""
    repo_id, branch = delivery.repo_id, delivery.revision
    try:
        yield
    except PlainViTError as error:
        if state.made and not state.gone:
            raise type(error)(f"{error} {_as_it_is(repo_id, state)}.") from error
        raise
    except OfflineModeIsEnabled as error:
        raise HubError(f"{repo_id} was not pushed: the Hub is switched off, unset HF_HUB_OFFLINE.") from error
    except RepositoryNotFoundError as error:
        raise HubError(
            f"{repo_id} is not there, or this token may not see it: check the name and the token."
        ) from error
    except RevisionNotFoundError as error:
        raise HubError(
            f"{_as_it_is(repo_id, state)}: it has no branch {branch!r}, and none could be made ({_said(error)})."
        ) from error
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
        if branch is not None:
            reason = f"branch {branch!r}: {reason}"
        raise HubError(f"{_as_it_is(repo_id, state)}: {reason} ({status}: {_said(error)}).") from error
    except ValueError as error:  # of the page's metadata
        raise HubError(f"{_as_it_is(repo_id, state)}: {_faults_of_card(str(error))}") from error
    except (HTTPError, OSError, RuntimeError) as error:
        raise HubError(
            f"{_as_it_is(repo_id, state)}: the Hub cannot be reached at {huggingface_hub.constants.ENDPOINT} "
            f"({_said(error)}). Check the network and push again; what was uploaded is not sent again."
        ) from error


def _as_it_is(repo_id: str, state: _State) -> str:
    """Say how a failed push has left the repository."""
    if state.gone:
        return f"{repo_id} was made for this push and, as it was refused, removed again"
    return f"{repo_id} was made for this push and is empty" if state.made else f"{repo_id} was not changed"


def _faults_of_card(answer: str) -> str:
    """Return what the Hub finds wrong in the metadata of a page."""
    try:
        faults = [fault["message"] for fault in json.loads(answer)["errors"]]
    except (ValueError, TypeError, KeyError):
        return answer
    return f"the metadata of {CARD}: {'; '.join(map(str, faults))}"


def _said(error: Exception) -> str:
    lines = str(getattr(error, "server_message", None) or error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _asked_to_wait(error: Exception) -> float | None:
    """Return the seconds after which the Hub wants to be asked again, where it says so."""
    headers = error.response.headers if isinstance(error, HfHubHTTPError) else {}
    said = headers.get("Retry-After", "")
    return float(said) if said.isdigit() else None

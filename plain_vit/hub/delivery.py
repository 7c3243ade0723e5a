"""Upload of a push: one commit of the files that differ, retried after transient errors."""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import CommitOperationAdd, CommitOperationCopy, CommitOperationDelete, HfApi
from huggingface_hub.errors import (
    HfHubHTTPError,
    HTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils.sha import git_hash

from ..errors import CheckpointError, HubError, PlainViTError, printable
from ..files.marks import is_untouched
from .card import CARD
from .contents import NO_PART, Contents

TRIES = 4
TRANSIENT = (408, 429, 500, 502, 503, 504)
MAX_WAIT = 60.0  # seconds
SHOWN_OF_A_FOLDER = 5  # files left out; more files of a folder are only counted

# Weights of an earlier push would be loaded instead of the new ones, or along with them.
WEIGHTS = re.compile(r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?")
EDITED_CARD = "the model card on the Hub was edited by a person; include README.md to overwrite it"
REASONS = {
    401: "the token was rejected: run `hf auth login` with a valid one",
    403: "this token has no write access: check the owner's name, or use a token with write access",
    409: "it is being changed by someone else: push again",
    412: "it was changed by someone else during this push: check that change and push again",
    429: "too many requests: wait and push again",
}


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
    """The files to push, their destination, and the state of the repository between attempts.

    Args:
        api: Client of the Hub.
        repo_id: The repository.
        contents: The files.
        private: Whether the repository must be private.
        revision: Branch; main if None.
        message: Commit message.
        overwrites_card: Replace a model card that a person has edited.
        notes: Checks that could not be made, for the `Push`.
        base_model: Hub id of an adapter's base model, which must exist.
    """

    api: HfApi
    repo_id: str
    contents: Contents
    private: bool
    revision: str | None
    message: str
    overwrites_card: bool = False
    notes: Sequence[str] = ()
    base_model: str | None = None

    requested: bool = field(default=False, init=False)  # the repository did not exist, and its creation was requested
    created: bool = field(default=False, init=False)
    attempt: Push | None = field(default=None, init=False)  # whose response may have been lost

    def planned(self) -> Push:
        """Return the outcome of a push to an empty repository."""
        sizes = {
            name: len(content) if isinstance(content, bytes) else content.stat().st_size
            for name, content in sorted(self.contents.sent.items())
        }
        return Push(self.repo_id, sizes, self.contents.left_out, reencoded=self.contents.reencoded, notes=self.notes)

    def delivered(self) -> Push:
        """Push, retrying after transient errors.

        Raises:
            HubError: The push failed; the message includes the state of the repository.
            CheckpointError: A file was changed after it was inspected.
        """
        with self._explain_errors():
            for attempt in range(1, TRIES):
                try:
                    return self._send()
                except (HTTPError, RuntimeError) as error:  # hf_xet raises RuntimeError
                    if not _is_transient(error):
                        raise
                    time.sleep(min(MAX_WAIT, _retry_after(error) or 2.0**attempt))
            return self._send()

    def _send(self) -> Push:
        """Make one attempt. The repository is read again: if an earlier commit arrived, nothing remains to upload."""
        api, repo_id, sent = self.api, self.repo_id, self.contents.sent
        self._prepare_repository()
        head = api.repo_info(repo_id, revision=self.revision).sha or ""
        entries = api.list_repo_tree(repo_id, recursive=True, revision=head)
        there = {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}

        left_out = dict(self.contents.left_out)
        if CARD in sent and CARD in there and not self.overwrites_card:
            remote = Path(api.hf_hub_download(repo_id, CARD, revision=head)).read_bytes()
            if remote != sent[CARD] and not is_untouched(remote):
                left_out[CARD] = EDITED_CARD
        added = [CommitOperationAdd(name, content) for name, content in sorted(sent.items()) if name not in left_out]
        unchanged = [each.path_in_repo for each in added if _is_same(each, there.get(each.path_in_repo))]
        changed = [each for each in added if each.path_in_repo not in unchanged]
        removed = [name for name in there if WEIGHTS.fullmatch(name) and name not in sent]
        sizes = {each.path_in_repo: each.upload_info.size for each in changed}
        push = Push(repo_id, sizes, left_out, removed, unchanged, self.contents.reencoded, self.notes)
        if not changed and not removed:
            return replace(self.attempt or push, url=f"{huggingface_hub.constants.ENDPOINT}/{repo_id}/commit/{head}")
        if moved := self.contents.changed():
            raise CheckpointError(f"{', '.join(moved)} changed after being inspected: push again.")
        self.attempt = self.attempt or push
        operations: list[CommitOperationAdd | CommitOperationCopy | CommitOperationDelete] = [
            *changed, *map(CommitOperationDelete, removed),
        ]  # fmt: skip
        commit = api.create_commit(
            repo_id, operations, commit_message=self.message, revision=self.revision, parent_commit=head
        )
        return replace(push, url=commit.commit_url)

    def _prepare_repository(self) -> None:
        """Create repository and branch if they do not exist.

        Raises:
            HubError: The base model is not on the Hub, or the repository is public and must be private.
        """
        api, repo_id = self.api, self.repo_id
        if self.base_model is not None and not api.repo_exists(self.base_model):
            raise HubError(
                f"{self.base_model}, the base model of the adapter, is not on the Hub or not visible with this token: "
                "push the base model first, or correct its id in adapter_config.json."
            )
        if not api.repo_exists(repo_id):
            self.requested = True
            api.create_repo(repo_id, private=self.private or None, exist_ok=True)
        self.created = self.requested
        if self.private and not api.repo_info(repo_id).private:
            raise HubError(
                f"{repo_id} exists and is public: make it private in its settings first, or push without private."
            )
        if self.revision is not None and not self.revision.startswith("refs/"):
            api.create_branch(repo_id, branch=self.revision, exist_ok=True)

    # ---- errors of the Hub ----

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        """Raise errors of the Hub with the cause, the state of the repository, and what to do."""
        repo_id, branch = self.repo_id, self.revision
        try:
            yield
        except PlainViTError as error:
            if self.created:
                raise type(error)(f"{error} {self._state()}.") from error
            raise
        except OfflineModeIsEnabled as error:
            raise HubError(f"{repo_id} was not pushed: offline mode is on, unset HF_HUB_OFFLINE.") from error
        except RepositoryNotFoundError as error:
            raise HubError(
                f"{repo_id} does not exist or is not visible with this token: check the name and the token."
            ) from error
        except RevisionNotFoundError as error:
            raise HubError(
                f"{self._state()}: it has no branch {branch!r}, and creating one failed ({_first_line(error)})."
            ) from error
        except HfHubHTTPError as error:
            status = error.response.status_code
            reason = REASONS.get(status, "internal error of the Hub: push again later" if status >= 500 else "refused")
            if branch is not None:
                reason = f"branch {branch!r}: {reason}"
            raise HubError(f"{self._state()}: {reason} ({status}: {_first_line(error)}).") from error
        except ValueError as error:  # about the card's metadata: a line of huggingface_hub, then one per fault
            faults = "; ".join(line.removeprefix("- ") for line in str(error).splitlines()[1:])
            said = f"the metadata of {CARD}: {faults}" if faults else error
            raise HubError(f"{self._state()}: {said}") from error
        except (HTTPError, OSError, RuntimeError) as error:
            raise HubError(
                f"{self._state()}: the Hub cannot be reached at {huggingface_hub.constants.ENDPOINT} "
                f"({_first_line(error)}). Check the network and push again; files already uploaded are not sent again."
            ) from error

    def _state(self) -> str:
        """Describe the repository after a failed push."""
        state = "was created for this push and is empty" if self.created else "was not changed"
        return f"{self.repo_id} {state}"


def _is_same(added: CommitOperationAdd, entry: RepoFile | None) -> bool:
    """Return whether the repository has this content, by the hash that the Hub stores."""
    if entry is None or added.upload_info.size != entry.size:
        return False
    if entry.lfs is not None:
        return added.upload_info.sha256.hex() == entry.lfs.sha256
    with added.as_file() as file:
        return git_hash(file.read()) == entry.blob_id


def _is_transient(error: Exception) -> bool:
    """Return whether an error of the network may be transient."""
    return not isinstance(error, HfHubHTTPError) or error.response.status_code in TRANSIENT


def _first_line(error: Exception) -> str:
    lines = str(getattr(error, "server_message", None) or error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _retry_after(error: Exception) -> float | None:
    """Return the seconds to wait before the next request, if the Hub's response states them."""
    headers: Any = error.response.headers if isinstance(error, HfHubHTTPError) else {}
    seconds = headers.get("Retry-After", "")
    return float(seconds) if seconds.isdigit() else None

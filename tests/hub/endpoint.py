"""A small Hub on 127.0.0.1, for tests over real HTTP: huggingface_hub's own client pushes to it and loads from it.

In a test, ask for the fixture `hub` (in conftest.py). It starts a Hub in `tmp_path` and points this process to it, with
an empty cache and the token of the user `alice`, until the test ends:

    def test_something(hub: HubEndpoint) -> None:
        model.push_to_hub("alice/model")
        AutoModel.from_pretrained("alice/model")
        assert hub.files("alice/model")["config.json"]
        hub.fail("POST", "/commit/", status=500)              # the next commit; what has been asked is in hub.requests
        hub.drop("PUT", "/lfs/", after=1000, times=2)         # the connection, after so many bytes of the upload
        hub.drop("GET", r"/lfs/|model\\.safetensors", after=7)  # or of the download

Another process meets it with `env=hub.environment(tmp_path / "cache")` (also: `token=None`, `offline=True`). A test of
`datasets` imports it at the top of its file, so that the fixture can point it here, and fills a repository with

    hub.add_repository("alice/digits", "dataset", {"train.csv": b"..."})
    datasets.load_dataset("alice/digits")

Users are alice and mallory, with tokens as `TOKENS` says. Repositories, commits and files lie below the root as plain
files; a large file is one of the kinds that the Hub keeps in LFS, and goes through its protocol.
"""

import base64
import hashlib
import json
import os
import re
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

# token: (user, role)
TOKENS = {"hf_write": ("alice", "write"), "hf_read": ("alice", "read"), "hf_mallory": ("mallory", "write")}

# What the Hub's .gitattributes of a new repository sends to LFS, as far as it matters here; also whatever is larger.
LARGE = re.compile(r"\.(arrow|bin|ckpt|gz|h5|msgpack|npy|npz|onnx|parquet|pickle|pkl|pt|pth|safetensors|tar|zip)$")
LARGE_BYTES = 10 * 1024 * 1024


@dataclass
class Fault:
    """A fault of the next requests of a kind."""

    method: str
    path: str
    times: int
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    after: int | None = None
    late: bool = False


class Refused(Exception):
    """An answer other than 200, with the headers by which the client distinguishes errors."""

    def __init__(self, status: int, message: str, code: str = "", **headers: str) -> None:
        super().__init__(message)
        self.status = status
        self.headers = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {}), **headers}


class HubEndpoint:
    """A running Hub.

    Attributes:
        url: Where it is, for `HF_ENDPOINT`.
        requests: What it was asked, as (method, path, status); a dropped connection has status 0.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.requests: list[tuple[str, str, int]] = []
        self.faults: list[Fault] = []
        self.lock = threading.RLock()
        (root / "objects").mkdir(parents=True)
        handler = type("BoundHandler", (Handler,), {"hub": self})
        self.servers = [ThreadingHTTPServer(("127.0.0.1", 0), handler) for _ in range(2)]
        # Large files come from another host, as on the Hub: the client sends its token to the first alone.
        hosts = ("127.0.0.1", "localhost")
        self.url, self.storage_url = (
            f"http://{host}:{server.server_address[1]}" for host, server in zip(hosts, self.servers, strict=True)
        )
        for server in self.servers:
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self) -> None:
        for server in self.servers:
            server.shutdown()
            server.server_close()

    # ---- for tests ----

    def environment(self, cache: Path, *, token: str | None = "hf_write", offline: bool = False) -> dict[str, str]:
        """Return the environment of a process that talks to this Hub, with its own cache."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        environment |= {"HF_ENDPOINT": self.url, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1",
                        "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": str(int(offline))}  # fmt: skip
        return environment | ({"HF_TOKEN": token} if token else {})

    def redirect(self, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
        """Point the libraries of this process, which have read their environment already, to this Hub."""
        from huggingface_hub import constants, hf_api
        from transformers.utils import hub as transformers_hub

        monkeypatch.setenv("HF_TOKEN", "hf_write")
        for name, value in {
            "ENDPOINT": self.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": self.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_DISABLE_TELEMETRY": True,
            "HF_HUB_CACHE": str(cache / "hub"),
        }.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setattr(hf_api.api, "endpoint", self.url)
        if hasattr(transformers_hub, "_hf_api"):
            monkeypatch.setattr(transformers_hub, "_hf_api", None)
        if "datasets.config" in sys.modules:
            config = sys.modules["datasets.config"]
            monkeypatch.setattr(config, "HF_ENDPOINT", self.url)
            monkeypatch.setattr(config, "HUB_DATASETS_URL", self.url + "/datasets/{repo_id}/resolve/{revision}/{path}")
            monkeypatch.setattr(config, "HF_HUB_OFFLINE", False)
            monkeypatch.setattr(config, "HF_DATASETS_CACHE", cache / "datasets")

    def fail(
        self, method: str, path: str, *, status: int, times: int = 1, headers: Mapping[str, str] | None = None
    ) -> None:
        """Answer the next requests whose path has this regular expression with an error."""
        self.faults.append(Fault(method, path, times, status, dict(headers or {})))

    def drop(self, method: str, path: str, *, after: int = 0, times: int = 1) -> None:
        """Close the connection of the next such requests after so many bytes of the upload or download."""
        self.faults.append(Fault(method, path, times, after=after))

    def lose_answer(self, method: str, path: str, *, times: int = 1) -> None:
        """Carry out the next such requests, but close the connection instead of answering."""
        self.faults.append(Fault(method, path, times, late=True))

    def add_repository(
        self, repo_id: str, kind: str = "model", files: Mapping[str, bytes] | None = None, *, private: bool = False
    ) -> str:
        """Create a repository with these files, and return its commit."""
        repository = Repository.new(repo_id, kind, private)
        if files:
            entries = {path: self.store(path, data) for path, data in files.items()}
            repository.commit("main", "Add files", {**repository.files("main"), **entries})
        self.save(repository)
        return repository.branches["main"]

    def files(self, repo_id: str, kind: str = "model", revision: str = "main") -> dict[str, bytes]:
        """Return every file of a repository at a revision."""
        entries = self.repository(repo_id, kind).files(revision)
        return {path: self.object(entry["lfs"] or entry["oid"]).read_bytes() for path, entry in entries.items()}

    # ---- storage ----

    def object(self, oid: str) -> Path:
        return self.root / "objects" / oid

    def store(self, path: str, data: bytes) -> dict[str, Any]:
        """Keep a file's content and return its entry in a commit."""
        if LARGE.search(path) or len(data) > LARGE_BYTES:
            sha256 = hashlib.sha256(data).hexdigest()
            self.object(sha256).write_bytes(data)
            return large_entry(sha256, len(data))
        oid = git_oid(data)
        self.object(oid).write_bytes(data)
        return {"oid": oid, "size": len(data), "lfs": None}

    def path(self, repo_id: str, kind: str) -> Path:
        return self.root / f"{kind}s" / f"{repo_id}.json"

    def repository(self, repo_id: str, kind: str) -> "Repository":
        return Repository(**json.loads(self.path(repo_id, kind).read_text()))

    def save(self, repository: "Repository") -> None:
        path = self.path(repository.repo_id, repository.kind)
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(".new")
        new.write_text(json.dumps(vars(repository)))
        new.replace(path)


@dataclass
class Repository:
    """One repository: its commits by their id, each with all files, and the names that point to them."""

    repo_id: str
    kind: str
    private: bool
    commits: dict[str, dict[str, Any]]
    branches: dict[str, str]
    tags: dict[str, str]

    @classmethod
    def new(cls, repo_id: str, kind: str, private: bool) -> "Repository":
        repository = cls(repo_id, kind, private, {}, {}, {})
        repository.commit("main", "initial commit", {})
        return repository

    def commit(self, branch: str, title: str, files: Mapping[str, Any]) -> str:
        date = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())
        commit = {"parent": self.branches.get(branch), "title": title, "date": date, "files": dict(files)}
        oid = hashlib.sha1(json.dumps([self.repo_id, self.kind, len(self.commits), commit]).encode()).hexdigest()
        self.commits[oid] = commit
        self.branches[branch] = oid
        return oid

    def resolve(self, revision: str) -> str:
        """Return the commit that a branch, a tag or a commit's own id means."""
        for names in (self.branches, self.tags):
            if revision in names:
                return names[revision]
        if revision in self.commits:
            return revision
        raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")

    def files(self, revision: str) -> dict[str, dict[str, Any]]:
        return self.commits[self.resolve(revision)]["files"]

    def listed(self, path: str, revision: str) -> dict[str, Any]:
        """Return the Hub's description of a file."""
        commit = self.resolve(revision)
        entry = self.commits[commit]["files"][path]
        said = {"type": "file", "path": path, "size": entry["size"], "oid": entry["oid"]}
        if entry["lfs"]:
            said["lfs"] = {"oid": entry["lfs"], "size": entry["size"], "pointerSize": len(pointer(entry))}
        about = self.commits[commit]
        return said | {"lastCommit": {"id": commit, "title": about["title"], "date": about["date"]}}

    def folders(self, revision: str) -> set[str]:
        return {str(parent) for path in self.files(revision) for parent in Path(path).parents} - {"."}


def git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def pointer(entry: Mapping[str, Any]) -> bytes:
    lines = ["version https://git-lfs.github.com/spec/v1", f"oid sha256:{entry['lfs']}", f"size {entry['size']}", ""]
    return "\n".join(lines).encode()


def large_entry(sha256: str, size: int) -> dict[str, Any]:
    return {"oid": git_oid(pointer({"lfs": sha256, "size": size})), "size": size, "lfs": sha256}


class Handler(BaseHTTPRequestHandler):
    """One connection; requests are found in `ROUTES` and answered by the methods named there."""

    hub: HubEndpoint
    protocol_version = "HTTP/1.1"

    def handle_request(self) -> None:
        self.url = urllib.parse.urlsplit(self.path)
        self.query = {name: values[-1] for name, values in urllib.parse.parse_qs(self.url.query).items()}
        self.body = b""
        fault = self.fault()
        if fault is not None and fault.after is not None and self.command in ("PUT", "POST"):
            self.rfile.read(min(fault.after, int(self.headers.get("Content-Length", 0))))
            return self.hang_up()
        self.body = self.read_body()
        self.cut = fault.after if fault is not None else None
        self.late = fault is not None and fault.late
        try:
            if fault is not None and fault.status is not None:
                raise Refused(fault.status, f"fault {fault.status}", **fault.headers)
            for method, pattern, answer in ROUTES:
                match = re.fullmatch(pattern, self.url.path)
                if match and method == self.command.replace("HEAD", "GET"):
                    found = {name: urllib.parse.unquote(value or "") for name, value in match.groupdict().items()}
                    with self.hub.lock:
                        return answer(self, **found)
            raise Refused(404, f"no such page: {self.path}")
        except Refused as refused:
            self.send(refused.status, json.dumps({"error": str(refused)}).encode(), refused.headers)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_request

    def fault(self) -> Fault | None:
        with self.hub.lock:
            for fault in self.hub.faults:
                if fault.times and fault.method == self.command and re.search(fault.path, self.path):
                    fault.times -= 1
                    return fault
        return None

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            chunks = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(chunks)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def send(self, status: int, data: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        if self.late:
            return self.hang_up()
        self.hub.requests.append((self.command, self.path, status))
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.cut is not None and self.cut < len(data):
            self.wfile.write(data[: self.cut])
            return self.hang_up()
        self.wfile.write(data)

    def send_json(self, said: object, status: int = 200) -> None:
        self.send(status, json.dumps(said).encode(), {"Content-Type": "application/json"})

    def hang_up(self) -> None:
        self.hub.requests.append((self.command, self.path, 0))
        self.wfile.flush()
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Stay quiet: `requests` is the log."""

    # ---- who may do what ----

    def user(self) -> tuple[str | None, str | None]:
        """Return the name and the role of who asks; both None for the anonymous."""
        authorization = self.headers.get("Authorization")
        if authorization is None:
            return None, None
        token = authorization.removeprefix("Bearer ")
        if token not in TOKENS:
            raise Refused(401, "Invalid credentials in Authorization header")
        return TOKENS[token]

    def readable(self, repo_id: str, kind: str) -> Repository:
        user, _ = self.user()
        if self.hub.path(repo_id, kind).exists():
            repository = self.hub.repository(repo_id, kind)
            if not repository.private or user == repo_id.split("/")[0]:
                return repository
        raise Refused(404 if user else 401, "Repository not found", "RepoNotFound")

    def writable(self, repo_id: str, kind: str) -> Repository:
        repository = self.readable(repo_id, kind)
        user, role = self.user()
        if user is None:
            raise Refused(401, "Repository not found", "RepoNotFound")
        if user != repo_id.split("/")[0] or role != "write":
            raise Refused(403, f"You don't have the rights to write to {repo_id}")
        return repository

    # ---- answers ----

    def whoami(self) -> None:
        user, role = self.user()
        if user is None:
            raise Refused(401, "Invalid username or password.")
        token = {"displayName": "test", "role": role}
        self.send_json({"type": "user", "name": user, "orgs": [], "auth": {"accessToken": token}})

    def create(self) -> None:
        asked = json.loads(self.body)
        user, role = self.user()
        if user is None:
            raise Refused(401, "Invalid username or password.")
        owner, kind = asked.get("organization") or user, asked.get("type", "model")
        if owner != user or role != "write":
            raise Refused(403, f"You don't have the rights to create a {kind} under the namespace {owner}")
        repo_id = f"{owner}/{asked['name']}"
        url = f"{self.hub.url}/{'' if kind == 'model' else kind + 's/'}{repo_id}"
        if self.hub.path(repo_id, kind).exists():
            said = {"error": f"You already created this {kind} repo", "url": url, "name": repo_id}
            return self.send_json(said, status=409)
        private = asked.get("visibility") == "private" or bool(asked.get("private"))
        self.hub.save(Repository.new(repo_id, kind, private))
        self.send_json({"url": url, "name": repo_id})

    def delete(self) -> None:
        asked = json.loads(self.body)
        repo_id, kind = f"{asked.get('organization') or self.user()[0]}/{asked['name']}", asked.get("type", "model")
        self.writable(repo_id, kind)
        self.hub.path(repo_id, kind).unlink()
        self.send_json({})

    def validate_yaml(self) -> None:
        """Say what the Hub says of a card's metadata: an error where it is no YAML, a warning where it is empty."""
        match = re.match(r"\s*---\r?\n(.*?)\r?\n---[ \t]*(\r?\n|$)", json.loads(self.body)["content"], re.DOTALL)
        if match is None:
            return self.send_json({"errors": [], "warnings": [{"message": "empty or missing yaml metadata"}]})
        try:
            data = yaml.safe_load(match[1])
        except yaml.YAMLError as error:
            return self.send_json({"errors": [{"message": f"no YAML: {error}"}], "warnings": []}, status=400)
        errors = [{"message": fault} for fault in metadata_faults(data)]
        self.send_json({"errors": errors, "warnings": []}, status=400 if errors else 200)

    def info(self, kind: str, repo_id: str, revision: str = "") -> None:
        repository = self.readable(repo_id, kind)
        commit = repository.resolve(revision or "main")
        said: dict[str, Any] = {"_id": repo_id, "id": repo_id, "author": repo_id.split("/")[0], "sha": commit,
                "private": repository.private, "gated": False, "disabled": False, "downloads": 0, "likes": 0,
                "tags": [], "lastModified": repository.commits[commit]["date"],
                "siblings": [{"rfilename": path} for path in repository.files(commit)]}  # fmt: skip
        self.send_json(said | ({"modelId": repo_id} if kind == "model" else {}))

    def tree(self, kind: str, repo_id: str, revision: str, folder: str = "") -> None:
        repository = self.readable(repo_id, kind)
        files, folders = repository.files(revision), repository.folders(revision)
        if folder and folder not in folders:
            raise Refused(404, f"{folder} does not exist on {revision}", "EntryNotFound")
        prefix = f"{folder}/" if folder else ""
        deep = self.query.get("recursive", "").lower() in ("true", "1")
        listed: list[dict[str, Any]] = []
        listed += [{"type": "directory", "path": path, "size": 0, "oid": git_oid(path.encode())} for path in folders]
        listed += [repository.listed(path, revision) for path in files]
        inside = [entry for entry in listed if entry["path"].startswith(prefix)]
        self.send_json([entry for entry in inside if deep or "/" not in entry["path"].removeprefix(prefix)])

    def paths_info(self, kind: str, repo_id: str, revision: str) -> None:
        repository = self.readable(repo_id, kind)
        as_json = self.headers.get("Content-Type", "").startswith("application/json")
        asked = json.loads(self.body) if as_json else urllib.parse.parse_qs(self.body.decode())
        paths = [path.strip("/") for path in asked.get("paths", [])]
        said = [repository.listed(path, revision) for path in paths if path in repository.files(revision)]
        folders = repository.folders(revision).intersection(paths)
        said += [{"type": "directory", "path": path, "size": 0, "oid": git_oid(path.encode())} for path in folders]
        self.send_json(said)

    def branch(self, kind: str, repo_id: str, name: str) -> None:
        repository = self.writable(repo_id, kind)
        if name in repository.branches:
            raise Refused(409, f"Reference already exists: refs/heads/{name}")
        start = json.loads(self.body or b"{}").get("startingPoint", "main")
        repository.branches[name] = repository.resolve(start)
        self.hub.save(repository)
        self.send_json({})

    def tag(self, kind: str, repo_id: str, name: str) -> None:
        repository = self.writable(repo_id, kind)
        tag = json.loads(self.body)["tag"]
        if tag in repository.tags:
            raise Refused(409, f"Tag reference exists already: {tag}")
        repository.tags[tag] = repository.resolve(name)
        self.hub.save(repository)
        self.send_json({})

    def preupload(self, kind: str, repo_id: str, revision: str) -> None:
        repository = self.writable(repo_id, kind)
        there = repository.files(revision)
        said = []
        for file in json.loads(self.body)["files"]:
            large = LARGE.search(file["path"]) or file["size"] > LARGE_BYTES
            entry = there.get(file["path"])
            oid = (entry["lfs"] or entry["oid"]) if entry else None
            mode = "lfs" if large else "regular"
            said.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self.send_json({"files": said})

    def lfs_batch(self, kind: str, repo_id: str) -> None:
        self.writable(repo_id, kind)
        said: list[dict[str, Any]] = []
        for asked in json.loads(self.body)["objects"]:
            entry: dict[str, Any] = {"oid": asked["oid"], "size": asked["size"]}
            if not self.hub.object(asked["oid"]).exists():  # what is there is not sent again
                entry["actions"] = {"upload": {"href": f"{self.hub.storage_url}/lfs/{asked['oid']}"},
                                    "verify": {"href": f"{self.hub.url}/lfs-verify"}}  # fmt: skip
            said.append(entry)
        self.send_json({"transfer": "basic", "objects": said})

    def lfs_put(self, oid: str) -> None:
        assert "Authorization" not in self.headers
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise Refused(400, "the content does not match its hash")
        new = self.hub.object(f"{oid}.new")
        new.write_bytes(self.body)
        new.replace(self.hub.object(oid))
        self.send(200)

    def lfs_verify(self) -> None:
        asked = json.loads(self.body)
        stored = self.hub.object(asked["oid"])
        if not stored.exists() or stored.stat().st_size != asked["size"]:
            raise Refused(404, f"{asked['oid']} was not uploaded")
        self.send_json({})

    def lfs_get(self, oid: str) -> None:
        self.send_file(self.hub.object(oid).read_bytes(), {"ETag": f'"{oid}"'})

    def commit(self, kind: str, repo_id: str, revision: str) -> None:
        repository = self.writable(repo_id, kind)
        head = repository.resolve(revision)
        if revision not in repository.branches:
            raise Refused(404, f"{revision} is no branch", "RevisionNotFound")
        files, title = dict(repository.files(head)), ""
        for line in self.body.splitlines():
            key, value = (said := json.loads(line))["key"], said["value"]
            if key == "header":
                title = value["summary"]
                if value.get("parentCommit", head) != head:
                    raise Refused(412, "A commit has happened since. Please refresh and try again.")
            elif key == "file":
                files[value["path"]] = self.hub.store(value["path"], base64.b64decode(value["content"]))
            elif key == "lfsFile":
                stored = self.hub.object(value["oid"])
                if not stored.exists():
                    raise Refused(400, f"lfs object {value['oid']} was not uploaded")
                files[value["path"]] = large_entry(value["oid"], stored.stat().st_size)
            elif key in ("deletedFile", "deletedFolder"):
                path = value["path"].rstrip("/")
                gone = [name for name in files if name == path or name.startswith(f"{path}/")]
                if not gone:
                    raise Refused(404, f"A file with this name doesn't exist: {path}", "EntryNotFound")
                for name in gone:
                    del files[name]
            else:
                raise Refused(400, f"unknown operation {key}")
        oid = repository.commit(revision, title, files)
        self.hub.save(repository)
        self.send_json({"commitUrl": f"{self.hub.url}/{repo_id}/commit/{oid}", "commitOid": oid, "success": True})

    def file(self, kind: str, repo_id: str, revision: str, path: str) -> None:
        repository = self.readable(repo_id, kind)
        commit = repository.resolve(revision)
        entry = repository.files(commit).get(path)
        if entry is None:
            raise Refused(404, "Entry not found", "EntryNotFound", **{"X-Repo-Commit": commit})
        headers = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if entry["lfs"]:
            linked = {"X-Linked-ETag": f'"{entry["lfs"]}"', "X-Linked-Size": str(entry["size"])}
            place = {"Location": f"{self.hub.storage_url}/lfs/{entry['lfs']}"}
            return self.send(302, b"", {**headers, **linked, **place})
        self.send_file(self.hub.object(entry["oid"]).read_bytes(), {**headers, "ETag": f'"{entry["oid"]}"'})

    def send_file(self, data: bytes, headers: Mapping[str, str]) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked is None:
            length = {"Content-Length": str(len(data))}  # of HEAD too
            return self.send(200, data, {**headers, **length})
        start, end = int(asked[1]), int(asked[2] or len(data) - 1)
        if start >= len(data):
            raise Refused(416, "Range not satisfiable", **{"Content-Range": f"bytes */{len(data)}"})
        end = min(end, len(data) - 1)
        self.send(206, data[start : end + 1], {**headers, "Content-Range": f"bytes {start}-{end}/{len(data)}"})


def metadata_faults(data: object) -> list[str]:
    """Return the errors of the Hub's server for a card's metadata, as far as the types are documented."""
    if not isinstance(data, dict):
        return ["the metadata is not a mapping"]
    texts = ("license", "license_name", "license_link", "library_name", "pipeline_tag", "base_model_relation")
    lists = ("tags", "datasets", "metrics", "base_model", "language")
    faults = [f'"{name}" must be a string' for name in texts if not isinstance(data.get(name, ""), str)]
    for name in lists:
        values = data.get(name, [])
        if not isinstance(values, str) and not (
            isinstance(values, list) and all(isinstance(value, str) for value in values)
        ):
            faults.append(f'"{name}" must be a string or a list of strings')
    if data.get("license") == "other" and "license_name" not in data:
        faults.append('"license_name" is needed beside license: other')
    for model in data.get("model-index", []):
        for result in model.get("results", [{}]):
            missing = {"task", "dataset", "metrics"} - result.keys()
            faults += [f'"model-index[0].results[0].{name}" is required' for name in sorted(missing)]
    return faults


_API = r"/api/(?P<kind>model|dataset|space)s/(?P<repo_id>[\w.-]+/[\w.-]+)"
ROUTES: list[tuple[str, str, Callable[..., None]]] = [
    ("GET", "/api/whoami-v2", Handler.whoami),
    ("POST", "/api/repos/create", Handler.create),
    ("DELETE", "/api/repos/delete", Handler.delete),
    ("POST", "/api/validate-yaml", Handler.validate_yaml),
    ("GET", _API, Handler.info),
    ("GET", _API + "/revision/(?P<revision>[^/]+)", Handler.info),
    ("GET", _API + "/tree/(?P<revision>[^/]+)(/(?P<folder>.+))?", Handler.tree),
    ("POST", _API + "/paths-info/(?P<revision>[^/]+)", Handler.paths_info),
    ("POST", _API + "/branch/(?P<name>[^/]+)", Handler.branch),
    ("POST", _API + "/tag/(?P<name>[^/]+)", Handler.tag),
    ("POST", _API + "/preupload/(?P<revision>[^/]+)", Handler.preupload),
    ("POST", _API + "/commit/(?P<revision>[^/]+)", Handler.commit),
    ("PUT", "/lfs/(?P<oid>[0-9a-f]{64})", Handler.lfs_put),
    ("GET", "/lfs/(?P<oid>[0-9a-f]{64})", Handler.lfs_get),
    ("POST", "/lfs-verify", Handler.lfs_verify),
]
for _kind, _prefix in (("model", ""), ("dataset", "datasets/"), ("space", "spaces/")):
    _id = rf"/{_prefix}(?P<repo_id>(?!datasets/|spaces/|api/)[\w.-]+/[\w.-]+)"

    def _batch(handler: Handler, repo_id: str, kind: str = _kind) -> None:
        handler.lfs_batch(kind, repo_id)

    def _file(handler: Handler, repo_id: str, revision: str, path: str, kind: str = _kind) -> None:
        handler.file(kind, repo_id, revision, path)

    ROUTES += [
        ("POST", _id + r"\.git/info/lfs/objects/batch", _batch),
        ("GET", _id + "/resolve/(?P<revision>[^/]+)/(?P<path>.+)", _file),
    ]

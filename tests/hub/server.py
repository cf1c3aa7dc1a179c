"""A hub on this machine: as much of its HTTP interface as the real `huggingface_hub` client asks for."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from typing import Any, Literal
from urllib.parse import parse_qs, unquote, urlparse

OWNER, TOKEN, READER = "someone", "hf_writer", "hf_reader"
Failure = int | Literal["drop"] | None


@dataclass
class Repository:
    """Commits of one model or data set, newest last: commit id, message and files."""

    private: bool = False
    commits: list[tuple[str, str, dict[str, bytes]]] = field(default_factory=list)

    @property
    def head(self) -> str:
        return self.commits[-1][0]

    @property
    def files(self) -> dict[str, bytes]:
        return self.commits[-1][2]

    def commit(self, message: str, files: dict[str, bytes]) -> str:
        commit = hashlib.sha1(f"{len(self.commits)}{message}".encode()).hexdigest()
        self.commits.append((commit, message, files))
        return commit

    def at(self, revision: str) -> dict[str, bytes] | None:
        if revision == "main":
            return self.files
        return next((files for commit, _, files in self.commits if commit == revision), None)


class Hub:
    """The server: `hub.repositories["someone/name"].files`, and `hub.fail` to make requests fail.

    Data sets have names of their own: "datasets/someone/name".

    Attributes:
        fail: asked for each request by method and path: a status to answer with, "drop" to cut the line, or None.
        requests: method and path of everything that was asked.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.large: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.fail: Callable[[str, str], Failure] = lambda method, path: None
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def publish(self, name: str, files: Path | dict[str, bytes], *, private: bool = False) -> None:
        """A new repository with the files of a folder, or with these."""
        if isinstance(files, Path):
            there = (path for path in files.rglob("*") if path.is_file())
            files = {path.relative_to(files).as_posix(): path.read_bytes() for path in there}
        self.repositories[name] = Repository(private=private)
        self.repositories[name].commit("all of it", files)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None: ...

    def do_GET(self) -> None:
        asked = urlparse(self.path)
        path, self.query = unquote(asked.path), parse_qs(asked.query)
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.hub.requests.append((self.command, path))
        failure = self.hub.fail(self.command, path)
        if failure == "drop":
            self.close_connection = True
            self.connection.close()
        elif failure is not None:
            self._json({"error": "refused by the test"}, status=failure)
        else:
            self._route(path)

    do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815

    @property
    def _token(self) -> str:
        return (self.headers.get("Authorization") or "").removeprefix("Bearer ")

    def _route(self, path: str) -> None:
        name, actions = "((?:datasets/)?[^/]+/[^/]+)", "preupload|commit|revision|tree|paths-info"
        writes = r"/api/repos/create|/api/models/.+/(preupload|commit)/.+|.+\.git/info/lfs/objects/batch"
        if re.fullmatch(writes, path) and self._token != TOKEN:
            self._json({"error": "Invalid username or password."}, status=401)
        elif path == "/api/repos/create":
            self._create(json.loads(self.body))
        elif path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        elif path == "/api/whoami-v2":
            self._json({"type": "user", "name": OWNER, "orgs": []}, status=200 if self._token else 401)
        elif path.startswith("/lfs/"):
            self._receive_large(path.removeprefix("/lfs/"))
        elif path == "/verify":
            self._json({})
        elif found := re.fullmatch(r"/(.+)\.git/info/lfs/objects/batch", path):
            self._batch(json.loads(self.body))
        elif found := re.fullmatch(rf"/api/(?:models/|(?=datasets/)){name}(?:/({actions})/([^/]+)(?:/(.*))?)?", path):
            self._information(*found.groups())
        elif found := re.fullmatch(rf"/{name}/resolve/([^/]+)/(.+)", path):
            self._resolve(*found.groups())
        else:
            self._json({"error": "unknown"}, status=404)

    def _create(self, wanted: dict[str, Any]) -> None:
        name = wanted["name"] if "/" in wanted["name"] else f"{wanted.get('organization') or OWNER}/{wanted['name']}"
        known = name in self.hub.repositories
        if not known:
            repository = Repository(private=bool(wanted.get("private") or wanted.get("visibility") == "private"))
            repository.commit("initial commit", {".gitattributes": b""})
            self.hub.repositories[name] = repository
        self._json({"url": f"{self.hub.endpoint}/{name}", "id": name}, status=409 if known else 200)

    def _repository(self, name: str) -> Repository | None:
        repository = self.hub.repositories.get(name)
        hidden = repository is not None and repository.private and self._token not in (TOKEN, READER)
        if repository is None or hidden:
            # As the hub: who may not read a repository is not told whether it exists.
            self._json({"error": "Repository not found"}, status=401 if not self._token else 404, code="RepoNotFound")
            return None
        return repository

    def _information(self, name: str, what: str | None, revision: str | None, path: str | None) -> None:
        repository = self._repository(name)
        if repository is None:
            return
        if what == "preupload":
            files = json.loads(self.body)["files"]
            modes = {file["path"]: "lfs" if file["path"].endswith(".safetensors") else "regular" for file in files}
            answer = [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes.items()]
            self._json({"files": answer})
        elif what == "commit":
            self._commit(name, repository)
        elif (files_there := repository.at(revision or "main")) is None:
            self._json({"error": "Revision not found"}, status=404, code="RevisionNotFound")
        elif what == "paths-info":
            wanted = parse_qs(self.body.decode())["paths"]
            self._json([entry for entry in _entries(files_there) if entry["path"] in wanted])
        elif what == "tree":
            inside = [entry for entry in _entries(files_there) if not path or entry["path"].startswith(f"{path}/")]
            if self.query.get("recursive", ["false"])[0].lower() != "true":
                depth = path.count("/") + 1 if path else 0
                inside = [entry for entry in inside if entry["path"].count("/") == depth]
            if path and not inside:
                self._json({"error": "Entry not found"}, status=404, code="EntryNotFound")
            else:
                self._json(inside)
        else:
            commit = repository.head if revision in (None, "main") else revision
            siblings = [{"rfilename": path} for path in sorted(files_there)]
            name = name.removeprefix("datasets/")
            self._json({"id": name, "sha": commit, "private": repository.private, "siblings": siblings, "tags": []})

    def _batch(self, wanted: dict[str, Any]) -> None:
        objects = [
            {"oid": o["oid"], "size": o["size"]}
            | (
                {}
                if o["oid"] in self.hub.large
                else {"actions": {"upload": {"href": f"{self.hub.endpoint}/lfs/{o['oid']}"},
                                  "verify": {"href": f"{self.hub.endpoint}/verify"}}}
            )
            for o in wanted["objects"]
        ]  # fmt: skip
        self._json({"transfer": "basic", "objects": objects})

    def _receive_large(self, oid: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != oid:
            self._json({"error": "wrong content"}, status=400)
            return
        self.hub.large[oid] = self.body
        self._json({})

    def _commit(self, name: str, repository: Repository) -> None:
        files, message = dict(repository.files), ""
        for line in self.body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header":
                message = value["summary"]
            elif item["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                files[value["path"]] = self.hub.large[value["oid"]]
            elif item["key"] == "deletedFile":
                del files[value["path"]]  # one that is not there is an error, as of the real hub
        commit = repository.commit(message, files)
        url = f"{self.hub.endpoint}/{name}/commit/{commit}"
        self._json({"success": True, "commitUrl": url, "commitOid": commit, "hookOutput": ""})

    def _resolve(self, name: str, revision: str, path: str) -> None:
        repository = self._repository(name)
        if repository is None:
            return
        files = repository.at(revision)
        if files is None:
            self._json({"error": "Revision not found"}, status=404, code="RevisionNotFound")
        elif path not in files:
            self._json({"error": "Entry not found"}, status=404, code="EntryNotFound")
        else:
            commit = repository.head if revision == "main" else revision
            etag = hashlib.sha256(files[path]).hexdigest()
            self._send(files[path], 200, {"ETag": f'"{etag}"', "X-Repo-Commit": commit})

    def _json(self, value: Any, status: int = 200, code: str | None = None) -> None:
        headers = {"Content-Type": "application/json"} | ({"X-Error-Code": code} if code else {})
        self._send(json.dumps(value).encode(), status, headers)

    def _send(self, body: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _entries(files: dict[str, bytes]) -> list[dict[str, Any]]:
    """What lies in a repository, folders too."""
    folders = {str(folder) for path in files for folder in PurePosixPath(path).parents} - {"."}
    found = [{"type": "directory", "path": folder, "oid": ""} for folder in sorted(folders)]
    return found + [{"type": "file", "path": path, "size": len(body), "oid": ""} for path, body in files.items()]

"""A small Hugging Face Hub on this machine, as far as huggingface_hub asks one for models; faults can be injected.

Large files lie on a second server under another host's name, as on the real Hub, where no token may be sent.
"""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

LARGE = (".safetensors", ".bin", ".gguf")
DEAD_ADDRESS = "http://localhost:9"  # the discard service, which nobody runs


@dataclass
class Asked:
    """One request as it came, and what was sent in return, so far."""

    method: str
    path: str
    range: str | None
    token: str | None
    status: int
    n_sent_bytes: int = 0
    encoding: str | None = None  # what it accepts


@dataclass(slots=True)
class Fault:
    """What is to go wrong with the next `times` requests whose path contains `path`.

    status and headers replace the answer; location redirects; the content is cut (honestly) to `shorten` bytes, turned
    over in its last byte, sent in pieces with `pause_s` between them, or broken off after `drop_after` bytes.
    """

    path: str
    method: str = "GET"
    times: int = 10**9
    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    location: str = ""
    shorten: int = -1
    corrupt: bool = False
    pause_s: float = 0.0
    drop_after: int = -1


@dataclass
class Hub:
    """What lies on the server: model -> revision -> commit, and commit -> file name -> content."""

    address: str = ""
    large_address: str = ""
    revisions: dict[str, dict[str, str]] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    contents: dict[str, bytes] = field(default_factory=dict)  # by digest
    tokens: dict[str, str] = field(default_factory=dict)  # of private models
    gated: set[str] = field(default_factory=set)
    listed: list[dict[str, Any]] = field(default_factory=list)  # what a search looks through
    faults: list[Fault] = field(default_factory=list)
    log: list[Asked] = field(default_factory=list)
    ignores_ranges: bool = False
    closing: threading.Event = field(default_factory=threading.Event)

    def publish(self, model: str, files: Path | Mapping[str, bytes], revision: str = "main") -> str:
        """Makes `files` the model's newest commit, whose hash is returned."""
        if isinstance(files, Path):
            files = {file.name: file.read_bytes() for file in files.iterdir() if file.is_file()}
        commit = hashlib.sha1(repr((model, sorted(files), [digest(n, files[n]) for n in sorted(files)])).encode())
        self.commits[commit.hexdigest()] = dict(files)
        self.contents |= {digest(name, content): content for name, content in files.items()}
        self.revisions.setdefault(model, {})[revision] = commit.hexdigest()
        return commit.hexdigest()

    def fetched(self) -> set[str]:
        """Names of the files whose content was asked for, and empties the log."""
        names = {digest(name, content): name for files in self.commits.values() for name, content in files.items()}
        asked = {
            request.path.rpartition("/")[2] for request in self.log if request.method == "GET" and not _is_api(request)
        }
        self.log.clear()
        return {names.get(name, name) for name in asked}

    def ranges(self) -> list[str | None]:
        """Of the requests for large files, in order."""
        return [request.range for request in self.log if request.path.startswith("/large/")]

    def take_fault(self, method: str, path: str) -> Fault | None:
        for fault in self.faults:
            if fault.times > 0 and fault.method == method and fault.path in path:
                fault.times -= 1
                return fault
        return None


@contextmanager
def running_hub() -> Iterator[Hub]:
    """The server, on two ports of this machine, for the length of the block."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), handler) for _ in range(2)]
    hub.address = f"http://127.0.0.1:{servers[0].server_port}"
    hub.large_address = f"http://localhost:{servers[1].server_port}"
    for server in servers:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield hub
    finally:
        hub.closing.set()
        for server in servers:
            server.shutdown()
            server.server_close()


def digest(name: str, content: bytes) -> str:
    """What the Hub knows a file by."""
    if name.endswith(LARGE):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _is_api(request: Asked) -> bool:
    return request.path.startswith("/api/")


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        fault = self.hub.take_fault(self.command, path) or Fault("")
        if fault.status:
            self._send(fault.status, dict(fault.headers), fault.body, fault)
        elif fault.location:
            self._send(302, {"Location": fault.location}, b"", fault)
        elif path.startswith("/large/"):
            self._send(200, {}, self.hub.contents[path.rpartition("/")[2]], fault)
        elif path == "/api/models":
            self._search(fault)
        elif path.startswith("/api/models/"):
            model, _, revision = path.removeprefix("/api/models/").partition("/revision/")
            self._list(model, revision or "main", fault)
        elif "/resolve/" not in path:
            self._refuse(404, "", fault)
        else:
            model, _, rest = path.removeprefix("/").partition("/resolve/")
            known = (*self.hub.commits, *self.hub.revisions.get(model, ()))  # a revision may hold slashes, a file too
            revision = next((each for each in known if rest.startswith(each + "/")), rest.rpartition("/")[0])
            self._resolve(model, revision, rest.removeprefix(revision + "/"), fault)

    def _list(self, model: str, revision: str, fault: Fault) -> None:
        commit = self._commit(model, revision, fault)
        if commit:
            siblings = [_listed(name, content) for name, content in self.hub.commits[commit].items()]
            body = json.dumps({"id": model, "sha": commit, "siblings": siblings}).encode()
            self._send(200, {"Content-Type": "application/json"}, body, fault)

    def _search(self, fault: Fault) -> None:
        asked = parse_qs(urlsplit(self.path).query)
        words = asked.get("search", [""])[0].lower()
        found = [entry for entry in self.hub.listed if words in entry["id"].lower()]
        body = json.dumps(found[: int(asked.get("limit", ["1000"])[0])]).encode()
        self._send(200, {"Content-Type": "application/json"}, body, fault)

    def _resolve(self, model: str, revision: str, name: str, fault: Fault) -> None:
        commit = self._commit(model, revision, fault)
        if not commit:
            return
        if model in self.hub.gated and self._token() != self.hub.tokens.get(model):
            self._refuse(403, "GatedRepo", fault)
            return
        content = self.hub.commits[commit].get(name)
        if content is None:
            self._refuse(404, "EntryNotFound", fault, {"X-Repo-Commit": commit})
            return
        etag = digest(name, content)
        headers = {"X-Repo-Commit": commit, "ETag": f'"{etag}"'}
        if name.endswith(LARGE):
            headers |= {"X-Linked-Size": str(len(content)), "X-Linked-ETag": f'"{etag}"'}
            self._send(302, headers | {"Location": f"{self.hub.large_address}/large/{etag}"}, b"", fault)
        else:
            self._send(200, headers, content, fault)

    def _commit(self, model: str, revision: str, fault: Fault) -> str | None:
        """The commit asked for; None where it is refused."""
        revisions = self.hub.revisions.get(model)
        is_private = model in self.hub.tokens and model not in self.hub.gated
        if revisions is None or (is_private and self._token() != self.hub.tokens[model]):
            self._refuse(401 if self._token() is None else 404, "RepoNotFound", fault)
            return None
        commit = revision if revision in self.hub.commits else revisions.get(revision)
        if commit is None:
            self._refuse(404, "RevisionNotFound", fault)
        return commit

    def _refuse(self, status: int, code: str, fault: Fault, headers: Mapping[str, str] | None = None) -> None:
        self._send(status, {"X-Error-Code": code} | dict(headers or {}), b"", fault)

    def _token(self) -> str | None:
        return self.headers.get("Authorization", "").removeprefix("Bearer ") or None

    def _send(self, status: int, headers: dict[str, str], content: bytes, fault: Fault) -> None:
        asked_range = self.headers.get("Range")
        if asked_range and status == 200 and not self.hub.ignores_ranges:
            first, _, last = asked_range.removeprefix("bytes=").partition("-")
            end = min(int(last) + 1, len(content)) if last else len(content)
            headers |= {"Content-Range": f"bytes {first}-{end - 1}/{len(content)}"}
            status, content = 206, content[int(first) : end]
        if fault.corrupt:
            content = content[:-1] + bytes([content[-1] ^ 1])
        if fault.shorten >= 0:
            content = content[: fault.shorten]
        path = unquote(urlsplit(self.path).path)
        asked = Asked(self.command, path, asked_range, self._token(), status)
        asked.encoding = self.headers.get("Accept-Encoding")
        if not path.startswith("/api/") or path.startswith("/api/models/"):  # a library may ask for news of its own
            self.hub.log.append(asked)  # before the answer, after which a test may look
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self._send_body(content, fault, asked)

    def _send_body(self, content: bytes, fault: Fault, asked: Asked) -> None:
        if fault.drop_after >= 0:
            content = content[: fault.drop_after]
            self.close_connection = True
        size = max(1, len(content) // 100) if fault.pause_s else max(1, len(content))
        try:
            for start in range(0, len(content), size):
                if fault.pause_s and self.hub.closing.wait(fault.pause_s):
                    self.close_connection = True
                    break
                self.wfile.write(content[start : start + size])
                asked.n_sent_bytes += len(content[start : start + size])
        except OSError:  # the client has gone
            self.close_connection = True


def _listed(name: str, content: bytes) -> dict[str, Any]:
    entry = {"rfilename": name, "size": len(content), "blobId": hashlib.sha1(content).hexdigest()}
    if not name.endswith(LARGE):
        return entry | {"blobId": digest(name, content)}
    return entry | {"lfs": {"sha256": digest(name, content), "size": len(content), "pointerSize": 134}}

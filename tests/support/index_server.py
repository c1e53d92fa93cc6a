"""A package index on this machine: pages and files over real HTTP, and wheels and source distributions to put there."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import tarfile
import threading
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

JSON = "application/vnd.pypi.simple.v1+json"
NAME = "made-up-upstream"
PACKAGE = "made_up_upstream"
OTHER = "made_up_other"
"""A second distribution, whose files begin with its name; all the rest is of the first one."""


def wheel(files: Mapping[str, str], when: tuple[int, int, int, int, int, int] = (2026, 3, 4, 5, 6, 8)) -> bytes:
    """Return a wheel with these files, all written at one moment."""
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w") as archive:
        for name, text in files.items():
            archive.writestr(zipfile.ZipInfo(name, when), text)
    return raw.getvalue()


def sdist(top: str, files: Mapping[str, str], when: int = 1_772_600_000) -> bytes:
    """Return a source distribution with these files, all written at one moment."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as archive:
        for name, text in files.items():
            item = tarfile.TarInfo(f"{top}/{name}")
            item.size, item.mtime = len(text.encode()), when
            archive.addfile(item, io.BytesIO(text.encode()))
    return raw.getvalue()


def module(text: str, package: str = PACKAGE) -> dict[str, str]:
    """Return the files of the made-up upstream with this text of its one module."""
    return {f"{package}/__init__.py": "", f"{package}/layers.py": text}


@dataclass
class Index:
    """The answers of the server; a test may change them between two requests."""

    address: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    uploaded: dict[str, str] = field(default_factory=dict)
    yanked: dict[str, str] = field(default_factory=dict)
    speaks_json: bool = True
    has_project_json: bool = True
    status: int = 200
    served: dict[str, bytes] = field(default_factory=dict)
    """Contents that are sent instead of those of a file."""
    headers: dict[str, str] = field(default_factory=dict)
    """Headers that are sent with every page."""
    asked: list[str] = field(default_factory=list)
    """Every path that was asked for."""

    @property
    def endpoint(self) -> str:
        return f"{self.address}/simple/"

    def publish(self, name: str, content: bytes, uploaded: str | None = "2026-01-02T03:04:05.678901Z") -> str:
        """Add a file; return its SHA-256."""
        self.files[name] = content
        if uploaded:
            self.uploaded[name] = uploaded
        return hashlib.sha256(content).hexdigest()

    def answer(self, path: str) -> tuple[int, str, bytes]:
        """Return status, type and body."""
        if path.startswith("/files/"):
            name = path.removeprefix("/files/")
            content = self.served.get(name, self.files.get(name))
            return (200, "application/octet-stream", content) if content is not None else (404, "text/plain", b"")
        if self.status != 200:
            return self.status, "text/plain", b""
        if path == f"/simple/{NAME}/":
            mine = [name for name in self.files if not name.startswith(OTHER)]
            return (200, JSON, self._json(NAME, mine)) if self.speaks_json else (200, "text/html", self._html())
        if path == f"/simple/{OTHER.replace('_', '-')}/":
            return 200, JSON, self._json(OTHER, [name for name in self.files if name.startswith(OTHER)])
        if path == f"/pypi/{PACKAGE}/json" and self.has_project_json:
            return 200, "application/json", self._project()
        return 404, "text/plain", b""

    def _json(self, distribution: str, names: Iterable[str]) -> bytes:
        files: list[dict[str, Any]] = []
        for name in names:
            content = self.files[name]
            file: dict[str, Any] = {"filename": name, "url": f"{self.address}/files/{name}"}
            file["hashes"] = {"sha256": hashlib.sha256(content).hexdigest()}
            file["yanked"] = self.yanked.get(name, False)
            if name in self.uploaded:
                file["upload-time"] = self.uploaded[name]
            files.append(file)
        return json.dumps({"meta": {"api-version": "1.1"}, "name": distribution, "files": files}).encode()

    def _html(self) -> bytes:
        lines = [
            f'<a href="../../files/{name}#sha256={hashlib.sha256(content).hexdigest()}"'
            + (f' data-yanked="{self.yanked[name]}"' if name in self.yanked else "")
            + f">{name}</a>"
            for name, content in self.files.items()
        ]
        return "\n".join(["<!doctype html><html><body>", *lines, "</body></html>"]).encode()

    def _project(self) -> bytes:
        files = [
            {"filename": name, "upload_time": uploaded.partition(".")[0].rstrip("Z")}
            for name, uploaded in self.uploaded.items()
        ]
        return json.dumps({"releases": {"any": files}}).encode()


@contextlib.contextmanager
def serving() -> Iterator[Index]:
    """Serve an empty index until the end of the block."""
    index = Index()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            index.asked.append(self.path)
            status, kind, body = index.answer(self.path)
            self.send_response(status)
            self.send_header("Content-Type", kind)
            for name, value in index.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with contextlib.suppress(ConnectionError):  # a client may have read enough
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Keep quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    index.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield index
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

"""A real HTTP server on this machine that answers as GitHub's REST API does, with a budget of requests."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Reply:
    """One answer; `body` is sent as JSON, or as it is when it is bytes."""

    body: Any = None
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    delay: float = 0.0
    """Seconds before it is sent."""
    hang_up: bool = False
    """Close the connection instead of answering."""
    endless: bool = False
    """Send the body again and again, until the client hangs up."""


@dataclass(frozen=True)
class Request:
    path: str
    headers: Mapping[str, str]


class Host:
    """The server. `replies[path]` are the answers of a path, in order; the last one is repeated."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.replies: dict[str, list[Reply]] = {}
        self.requests: list[Request] = []
        self.budget: int | None = None
        self.reset = int(time.time()) + 3600

    def put(self, path: str, *replies: Any) -> None:
        self.replies[path] = [each if isinstance(each, Reply) else Reply(each) for each in replies]

    def paths(self) -> list[str]:
        return [request.path for request in self.requests]

    def issue(self, repository: str, number: int, **changes: Any) -> None:
        """Put an issue; `pull_request=` makes it the answer of the issues endpoint for a pull request."""
        self.put(f"/repos/{repository}/issues/{number}", issue(repository, number, **changes))

    def pull(self, repository: str, number: int, **changes: Any) -> None:
        self.put(f"/repos/{repository}/pulls/{number}", pull(repository, number, **changes))

    def releases(self, repository: str, *releases: dict[str, Any]) -> None:
        self.put(f"/repos/{repository}/releases?per_page=100", list(releases))

    def compare(self, repository: str, commit: str, tag: str, status: str) -> None:
        body = {"status": status, "ahead_by": 3, "behind_by": 0, "total_commits": 3, "commits": [], "files": []}
        self.put(f"/repos/{repository}/compare/{commit}...{tag}?per_page=1", body)


def issue(repository: str, number: int, **changes: Any) -> dict[str, Any]:
    """Return an issue with the fields that the host sends."""
    return {
        "url": f"https://api.github.com/repos/{repository}/issues/{number}",
        "repository_url": f"https://api.github.com/repos/{repository}",
        "html_url": f"https://github.com/{repository}/issues/{number}",
        "id": 1,
        "number": number,
        "title": "a title that nobody keeps",
        "user": {"login": "somebody"},
        "labels": [],
        "state": "open",
        "state_reason": None,
        "comments": 0,
        "created_at": "2026-03-01T10:00:00Z",
        "updated_at": "2026-03-01T10:00:00Z",
        "closed_at": None,
        "body": "a text that nobody keeps",
        **changes,
    }


def pull(repository: str, number: int, **changes: Any) -> dict[str, Any]:
    """Return an open pull request for main, with the commit of the trial merge that an open one has."""
    branch = changes.pop("branch", "main")
    base = {"label": f"o:{branch}", "ref": branch, "sha": "b" * 40, "repo": {"default_branch": "main", "id": 7}}
    return {
        **issue(repository, number),
        "html_url": f"https://github.com/{repository}/pull/{number}",
        "draft": False,
        "merged_at": None,
        "merged": False,
        "merge_commit_sha": "e" * 40,
        "base": base,
        "head": {"ref": "topic", "sha": "d" * 40},
        **changes,
    }


def merged(day: str, commit: str = "a" * 40, **changes: Any) -> dict[str, Any]:
    """Return the changed fields of a pull request that was merged at noon of a day."""
    moment = f"{day}T12:00:00Z"
    return {"state": "closed", "closed_at": moment, "merged_at": moment, "merge_commit_sha": commit, **changes}


def release(tag: str, day: str, **changes: Any) -> dict[str, Any]:
    """Return a release published at noon of a day."""
    return {
        "tag_name": tag,
        "name": tag,
        "target_commitish": "main",
        "draft": False,
        "prerelease": False,
        "created_at": f"{day}T11:00:00Z",
        "published_at": f"{day}T12:00:00Z",
        "assets": [],
        **changes,
    }


LIMIT_TEXT = {"message": "API rate limit exceeded for 203.0.113.7.", "documentation_url": "https://docs.github.com"}
NOT_FOUND = Reply({"message": "Not Found", "documentation_url": "https://docs.github.com", "status": "404"}, 404)


@contextmanager
def running() -> Iterator[Host]:
    """Run a host while the block lasts."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    host = Host(f"http://127.0.0.1:{server.server_address[1]}")
    server.host = host  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield host
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        host: Host = self.server.host  # type: ignore[attr-defined]
        host.requests.append(Request(self.path, dict(self.headers)))
        if host.budget == 0:
            self._send(Reply(LIMIT_TEXT, 403, self._budget(host)))
            return
        replies = host.replies.get(self.path, [NOT_FOUND])
        reply = replies.pop(0) if len(replies) > 1 else replies[0]
        time.sleep(reply.delay)
        if reply.hang_up:
            self.close_connection = True
            return
        if host.budget is not None:
            host.budget -= 1
        self._send(reply, self._budget(host))

    def _budget(self, host: Host) -> dict[str, str]:
        if host.budget is None:
            return {}
        return {"X-RateLimit-Remaining": str(host.budget), "X-RateLimit-Reset": str(host.reset)}

    def _send(self, reply: Reply, more: Mapping[str, str] | None = None) -> None:
        raw = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
        self.send_response(reply.status)
        for name, value in {**reply.headers, **(more or {})}.items():
            self.send_header(name, value)
        if reply.endless:
            self._send_for_ever(raw)
            return
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def _send_for_ever(self, raw: bytes) -> None:
        self.send_header("Connection", "close")
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            while True:
                self.wfile.write(raw)

    def log_message(self, format: str, *args: object) -> None:
        """Keep quiet."""

"""The HTTP client of GitHub: its limits, the redirects that it follows, and the credentials that it never sends."""

from __future__ import annotations

import gzip
import json
import time
import zlib
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path

import github_host
import pytest
from github_host import NOT_FOUND, Host, Reply

from megacpp_overlays.errors import UpkeepError
from megacpp_overlays.upkeep import bounded_http
from megacpp_overlays.upkeep.sweep.github import Client
from megacpp_overlays.upkeep.sweep.host_errors import (
    GoneError,
    NoAnswerError,
    RateLimitError,
    UnreachableError,
)

PATH = "/repos/o/r/issues/1"


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setenv("no_proxy", "*")
    with github_host.running() as host:
        yield host


@pytest.fixture
def client(host: Host) -> Callable[..., Client]:
    def make(token: str | None = None, **changes: object) -> Client:
        settings = {"timeout": (2.0, 2.0), "backoff": 0.01, **changes}
        return Client(host.address, token, **settings)  # type: ignore[arg-type]

    return make


def test_a_redirect_to_another_host_is_not_followed(host: Host, client: Callable[..., Client]) -> None:
    with github_host.running() as elsewhere:
        elsewhere.put(PATH, github_host.issue("o/r", 1))
        host.put(PATH, Reply(None, 302, {"Location": elsewhere.address + PATH}))

        with pytest.raises(NoAnswerError, match="leads to another host"):
            client("secret").get(PATH)

        assert elsewhere.requests == []


def test_the_token_goes_with_every_request_and_nowhere_else(host: Host, client: Callable[..., Client]) -> None:
    host.put(PATH, Reply(None, 301, {"Location": "/repositories/7/issues/1"}))
    host.put("/repositories/7/issues/1", github_host.issue("o/r", 1))

    client("secret").get(PATH)

    assert [request.headers["Authorization"] for request in host.requests] == ["Bearer secret"] * 2


def test_credentials_of_a_netrc_file_are_not_sent(
    host: Host, client: Callable[..., Client], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("default login user password hidden\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    host.put(PATH, github_host.issue("o/r", 1))

    client().get(PATH)

    assert "Authorization" not in host.requests[0].headers


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1"])
@pytest.mark.parametrize("variable", ["http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"])
def test_no_proxy_sees_requests_to_this_machine(
    host: Host, monkeypatch: pytest.MonkeyPatch, name: str, variable: str
) -> None:
    host.put(PATH, github_host.issue("o/r", 1))
    monkeypatch.setenv("no_proxy", "")
    with github_host.running() as proxy:
        monkeypatch.setenv(variable, proxy.address)

        Client(host.address.replace("127.0.0.1", name), "secret").get(PATH)

        assert proxy.requests == []
    assert [request.headers["Authorization"] for request in host.requests] == ["Bearer secret"]


def test_a_proxy_is_used_for_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "")
    with github_host.running() as proxy:
        monkeypatch.setenv("http_proxy", proxy.address)
        proxy.put(f"http://ghe.invalid{PATH}", github_host.issue("o/r", 1))

        assert Client("http://ghe.invalid", None).get(PATH)["number"] == 1


def test_a_token_does_not_travel_in_the_open() -> None:
    with pytest.raises(UpkeepError, match="not encrypted"):
        Client("http://ghe.example/api/v3", "secret")


@pytest.mark.parametrize(
    "address",
    ["", "api.github.com", "ftp://x", "https://", "https://x/?a=1", "https://x/#a", "https://[::1", "https://x:port"],
)
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(UpkeepError, match=r"is no address of an API; it looks like https://api\.github\.com"):
        Client(address, None)


@pytest.mark.parametrize(
    "address",
    [
        "https://user:hidden@ghe.example/api/v3",
        "https://hidden@ghe.example",
        "user:hidden@ghe.example",
        "https://ghe.example/api/v3?access_token=hidden",
        "https://ghe.example/api/v3#hidden",
    ],
)
def test_credentials_in_an_address_are_refused_and_not_shown(address: str) -> None:
    with pytest.raises(UpkeepError, match=r"address of (the|an) API") as caught:
        Client(address, None)

    assert "hidden" not in str(caught.value)


def test_an_address_may_have_a_path_and_a_slash(host: Host) -> None:
    host.put(f"/api/v3{PATH}", github_host.issue("o/r", 1))

    assert Client(f"{host.address}/api/v3/", None).get(PATH)["number"] == 1


def test_a_spent_budget_stops_and_says_when_to_come_back(host: Host, client: Callable[..., Client]) -> None:
    host.budget = 0

    with pytest.raises(RateLimitError) as caught:
        client().get(PATH)

    assert caught.value.until == datetime.fromtimestamp(host.reset, timezone.utc)
    assert f"until {caught.value.until:%Y-%m-%d %H:%M:%S} UTC" in str(caught.value)


def test_nothing_is_asked_once_the_budget_is_known_to_be_spent(host: Host, client: Callable[..., Client]) -> None:
    host.put(PATH, github_host.issue("o/r", 1))
    host.budget = 1
    asking = client()
    asking.get(PATH)

    with pytest.raises(RateLimitError):
        asking.get("/repos/o/r/issues/2")

    assert host.paths() == [PATH]
    assert asking.left == 0


def test_a_budget_that_was_renewed_is_used_again(host: Host, client: Callable[..., Client]) -> None:
    host.put(PATH, github_host.issue("o/r", 1))
    host.budget, host.reset = 1, int(time.time()) - 1
    asking = client()
    asking.get(PATH)
    host.budget = 60

    assert asking.get(PATH)["number"] == 1
    assert asking.left == 59


@pytest.mark.parametrize(
    ("reply", "seconds"),
    [
        (Reply({"message": "You have exceeded a secondary rate limit."}, 403, {"Retry-After": "120"}), 120),
        (Reply({"message": "slow down"}, 429), 60),
        (Reply({"message": "slow down"}, 429, {"Retry-After": "2"}), 2),
        (Reply({"message": "You have exceeded a secondary rate limit."}, 403), 60),
        (Reply({"message": "slow down"}, 429, {"Retry-After": "9" * 14}), 7 * 24 * 3600),
        (Reply({"message": "slow down"}, 429, {"Retry-After": "9" * 5000}), 60),
        (Reply({}, 403, {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "9" * 14}), 7 * 24 * 3600),
    ],
    ids=["retry-after", "429", "429-retry-after", "secondary", "three million years", "no number", "reset"],
)
def test_a_host_that_asks_to_wait_is_not_asked_again(
    host: Host, client: Callable[..., Client], reply: Reply, seconds: int
) -> None:
    host.put(PATH, reply)
    asking = client()
    with pytest.raises(RateLimitError) as caught:
        asking.get(PATH)

    with pytest.raises(RateLimitError):
        asking.get(PATH)

    assert len(host.requests) == 1
    wait = (caught.value.until - datetime.now(timezone.utc)).total_seconds()
    assert seconds - 10 < wait <= seconds


TWICE_PACKED = gzip.compress(gzip.compress(b"{}"))
FAILED = {
    "a refusal that is no limit": (Reply({"message": "Resource not accessible"}, 403), "answered 403 Forbidden"),
    "a list": (Reply([{"number": 1}]), "the answer is no object"),
    "an empty list": (Reply([]), "the answer is no object"),
    "a redirect to no address": (Reply({}, 302, {"Location": "http://[nonsense"}), "leads to an invalid address"),
    "a ring of redirects": (Reply(None, 301, {"Location": PATH}), "more than 5 redirects"),
    "a host that hangs up": (Reply(hang_up=True), "no whole answer"),
    **{
        f"a body without an end, {status}": (
            Reply(b" " * (1 << 20), status, endless=True),
            "no whole answer: the answer is longer than 67108864 bytes",
        )
        for status in (200, 403, 500)
    },
    **{
        f"a body packed by {packed}": (
            Reply(TWICE_PACKED, headers={"Content-Encoding": packed}),
            f"packed as '{packed}', which was not requested",
        )
        for packed in ("br", "zstd", "gzip, gzip")
    },
}
"""Replies that are no answer, each with the expected error."""


@pytest.mark.parametrize("reply", FAILED)
def test_a_reply_that_is_no_answer_is_one_failed_answer_with_its_reason(
    host: Host, client: Callable[..., Client], reply: str
) -> None:
    sent, says = FAILED[reply]
    host.put(PATH, sent)

    with pytest.raises(NoAnswerError, match=says):
        client().get(PATH)


@pytest.mark.parametrize("reply", [NOT_FOUND, Reply({"message": "This issue was deleted"}, 410)], ids=["404", "410"])
def test_a_missing_address_is_gone(host: Host, client: Callable[..., Client], reply: Reply) -> None:
    host.put(PATH, reply)

    with pytest.raises(GoneError, match="not there"):
        client().get(PATH)


def test_a_broken_answer_and_a_broken_connection_are_tried_again(host: Host, client: Callable[..., Client]) -> None:
    host.put(PATH, Reply(None, 502), Reply(hang_up=True), github_host.issue("o/r", 1))
    asking = client()

    assert asking.get(PATH)["number"] == 1
    assert len(host.requests) == 3
    assert asking.asked == 1


def test_a_host_that_stays_broken_is_one_failed_answer(host: Host, client: Callable[..., Client]) -> None:
    host.put(PATH, Reply({"message": "Server Error"}, 500))

    with pytest.raises(NoAnswerError, match="the host answered 500"):
        client().get(PATH)

    assert len(host.requests) == 4


def test_a_slow_answer_is_one_failed_answer(host: Host, client: Callable[..., Client]) -> None:
    host.put(PATH, Reply(github_host.issue("o/r", 1), delay=0.5))

    with pytest.raises(NoAnswerError, match="no whole answer"):
        client(timeout=(2.0, 0.05)).get(PATH)


@pytest.mark.parametrize("body", [b"<html>hello", b'{"number": 1', b'"text"', b"[1]"])
def test_garbage_is_one_failed_answer(host: Host, client: Callable[..., Client], body: bytes) -> None:
    host.put(PATH, Reply(body), github_host.issue("o/r", 1))

    with pytest.raises(NoAnswerError, match=r"not the JSON that it should be|the answer is no object"):
        client().get(PATH)

    assert client().get(PATH)["number"] == 1


LONG = b" " * 2 * bounded_http.LARGEST_ANSWER


@pytest.mark.parametrize(("packed", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_a_body_that_is_packed_counts_as_it_is_unpacked(
    host: Host, client: Callable[..., Client], packed: str, pack: Callable[[bytes], bytes]
) -> None:
    small = pack(json.dumps(github_host.issue("o/r", 1)).encode())
    headers = {"Content-Encoding": packed}
    host.put(PATH, Reply(pack(LONG), headers=headers), Reply(small, headers=headers))

    with pytest.raises(NoAnswerError, match="is longer than 67108864 bytes"):
        client().get(PATH)

    assert client().get(PATH)["number"] == 1
    assert host.requests[0].headers["Accept-Encoding"] == "gzip, deflate"


@pytest.mark.parametrize("name", ["127.0.0.1:1", "absent.invalid"])
def test_an_address_without_a_server_is_unreachable(name: str) -> None:
    with pytest.raises(UnreachableError, match=f"{name} cannot be reached"):
        Client(f"http://{name}", None, backoff=0.01).get(PATH)


@pytest.mark.parametrize("name", ["http_proxy", "all_proxy"])
def test_a_proxy_that_is_not_there_is_unreachable(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "")

    with pytest.raises(UnreachableError, match="proxy"):
        Client("http://ghe.invalid", None, backoff=0.01).get(PATH)


def test_pages_are_read_as_far_as_they_are_asked_for(host: Host, client: Callable[..., Client]) -> None:
    for page in (1, 2, 3):
        link = {"Link": f'<{host.address}/list?page={page + 1}>; rel="next"'} if page < 3 else {}
        host.put(f"/list?page={page}", Reply([{"number": page, "state": "open"}], headers=link))

    every = [page[0]["number"] for page in client().pages("/list?page=1")]
    first = next(iter(client().pages("/list?page=1")))

    assert every == [1, 2, 3]
    assert first[0]["number"] == 1
    assert len(host.requests) == 4


def test_a_list_that_is_none_is_one_failed_answer(host: Host, client: Callable[..., Client]) -> None:
    host.put("/list", {"number": 1})

    with pytest.raises(NoAnswerError, match="no list"):
        list(client().pages("/list"))

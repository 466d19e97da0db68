"""https:// servers with a certificate of a real authority: who is trusted, and what is said."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.certificates import OPENSSL, make_authority, make_server_context
from support.vllm_stand_in import VllmStandIn

from courtside.chat.openai_client import OpenAIClient
from courtside.engines.served.pool import ReplicaPool
from courtside.engines.served.requests import Request
from courtside.errors import RunError, UserError
from courtside.recipe.endpoint import EndpointConfig
from courtside.recipe.server import ServerConfig
from courtside.types import Message

pytestmark = pytest.mark.skipif(OPENSSL is None, reason="no openssl to make certificates with")
VERSION = Request(path="/version", parse=lambda answer: str(answer["version"]))


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_authority(tmp_path_factory.mktemp("tls") / "ca")


@pytest.fixture(scope="module")
def server(authority: Path) -> Iterator[VllmStandIn]:
    server = VllmStandIn(tls=make_server_context(authority))
    yield server
    server.close()


@pytest.fixture(autouse=True)
def no_authorities(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)


def ask(url: str) -> str:
    pool = ReplicaPool(ServerConfig(urls=(url,), model="tiny"), field="teacher.server")
    try:
        return pool.ask_all([VERSION])[0]
    finally:
        pool.close()


def test_an_authority_in_the_environment_is_trusted(
    server: VllmStandIn, authority: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(authority))
    assert ask(server.url) == "0.32.0"


def test_an_unknown_authority_is_refused_at_once(server: VllmStandIn) -> None:
    """Not after the retries, whose waits would take half a minute."""
    with pytest.raises(
        RunError,
        match=r"teacher.server.urls: https://127.* is not trusted \(unable to get local issuer.*"
        r"set SSL_CERT_FILE to a PEM file",
    ):
        ask(server.url)


def test_a_certificate_for_another_host_is_refused(
    authority: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(authority))
    other = VllmStandIn(tls=make_server_context(authority, host="DNS:elsewhere.example"))
    with pytest.raises(RunError, match=r"IP address mismatch.*must name the host"):
        ask(other.url)
    other.close()


def test_a_server_without_tls_is_told(authority: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = VllmStandIn()
    with pytest.raises(RunError, match=r"does not speak TLS on this port. Use http://"):
        ask(plain.url.replace("http:", "https:"))
    plain.close()


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_authorities_that_cannot_be_read_are_an_error(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "ca.pem"
    if content is not None:
        file.write_text(content)
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    with pytest.raises(UserError, match=r"SSL_CERT_FILE = .*no certificates can be read"):
        ask("https://127.0.0.1:1")


def test_chat_endpoints_say_the_same(server: VllmStandIn) -> None:
    config = EndpointConfig(base_url=f"{server.url}/v1", model="tiny", max_retries=5)
    client = OpenAIClient(
        config, field="reader.endpoint", max_new_tokens=1, temperature=0.0, shorten="shorten it"
    )
    with pytest.raises(RunError, match=r"reader.endpoint.base_url = .*set SSL_CERT_FILE"):
        client([[Message(role="user", content="a")]])

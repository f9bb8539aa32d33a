import asyncio
import base64
import json
import ssl
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from cryptography import x509

from tidegate_contract.errors import Retry
from tidegate_operator.gate.tls import Identity, parse_certificate, watch
from tidegate_operator.kube.access import Access
from tidegate_operator.kube.client import Client


def secret_of(certificate: Any, **changes: str) -> dict[str, Any]:
    data = {
        "tls.crt": certificate.chain,
        "tls.key": certificate.key,
        "ca.crt": certificate.authority.encode(),
    }
    encoded = {name: base64.b64encode(value).decode() for name, value in data.items()}
    return {"data": encoded | changes}


async def common_name(port: int, context: ssl.SSLContext) -> str:
    """Who answers at a port, by its certificate."""
    _, writer = await asyncio.open_connection(
        "127.0.0.1", port, ssl=context, server_hostname="gate.svc"
    )
    der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    await writer.wait_closed()
    return x509.load_der_x509_certificate(der).subject.rfc4514_string()


def test_secret_reads_as_its_certificate(a_certificate: Any) -> None:
    certificate = a_certificate()
    assert parse_certificate(secret_of(certificate)) == certificate


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        pytest.param({"tls.key": ""}, "the Secret has no tls.key yet", id="empty"),
        pytest.param({"tls.crt": "@"}, "Secret key tls.crt is not base64", id="not-base64"),
    ],
)
def test_secret_without_a_certificate_is_awaited(
    changes: Any, sentence: str, a_certificate: Any
) -> None:
    with pytest.raises(Retry, match=sentence):
        parse_certificate(secret_of(a_certificate(), **changes))


def test_secret_as_the_chart_makes_it_is_awaited() -> None:
    with pytest.raises(Retry, match=r"no tls\.crt yet"):
        parse_certificate({"metadata": {}})


def test_certificate_shows_its_key_to_no_log(a_certificate: Any) -> None:
    certificate = a_certificate()
    assert "PRIVATE KEY" in certificate.key.decode()
    assert "PRIVATE" not in f"{certificate!r} {certificate}"


def test_identity_changes_under_a_listening_server(a_certificate: Any, trusting: Any) -> None:
    first, second = a_certificate("first"), a_certificate("second")

    async def body() -> None:
        identity = Identity()
        identity.load(first)
        held: list[asyncio.StreamWriter] = []
        server = await asyncio.start_server(
            lambda _, writer: held.append(writer), "127.0.0.1", 0, ssl=identity.context
        )
        port = server.sockets[0].getsockname()[1]
        assert await common_name(port, trusting(first)) == "CN=first"
        identity.load(second)
        assert await common_name(port, trusting(second)) == "CN=second"
        assert identity.authority == second.authority
        for writer in held:
            writer.close()
        server.close()
        await server.wait_closed()

    asyncio.run(body())


def test_identity_keeps_the_old_pair_when_the_new_one_does_not_match(
    a_certificate: Any, trusting: Any
) -> None:
    first, second = a_certificate("first"), a_certificate("second")
    torn = replace(second, _key=first.key)

    async def body() -> None:
        identity = Identity()
        identity.load(first)
        with pytest.raises(ssl.SSLError):
            identity.load(torn)
        server = await asyncio.start_server(
            lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=identity.context
        )
        port = server.sockets[0].getsockname()[1]
        assert await common_name(port, trusting(first)) == "CN=first"
        server.close()
        await server.wait_closed()

    asyncio.run(body())


@pytest.mark.parametrize("ends_at_once", [False, True], ids=["after a restart", "broken server"])
def test_certificate_is_loaded_without_a_storm_of_requests(
    a_certificate: Any, ends_at_once: bool
) -> None:
    secret = secret_of(a_certificate()) | {"metadata": {"name": "s", "resourceVersion": "7"}}
    seen: list[str] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        seen.append(request.query_string)
        if "watch" not in request.query:
            return web.json_response(secret)
        response = web.StreamResponse()
        await response.prepare(request)
        event: dict[str, Any] = {"type": "ADDED", "object": secret}
        if "resourceVersion" in request.query:  # older than anything that the server remembers
            event = {"type": "ERROR", "object": {"kind": "Status", "code": 410}}
        await response.write(json.dumps(event).encode() + b"\n")
        if "resourceVersion" not in request.query and not ends_at_once:
            await asyncio.Event().wait()
        return response

    async def whole() -> Identity:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handle)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        identity = Identity()
        access = Access(server=f"http://127.0.0.1:{runner.addresses[0][1]}")
        async with Client(access) as client:
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await watch(client, identity, "system", "s")
        await runner.cleanup()
        return identity

    assert asyncio.run(whole()).is_loaded
    assert len(seen) <= 4

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tidegate_contract.errors import Reject, Retry
from tidegate_operator.kube import errors
from tidegate_operator.kube.access import Access, load_access
from tidegate_operator.kube.client import APPLY_PATCH, Client
from tidegate_operator.kube.errors import parse_error
from tidegate_operator.kube.kinds import NODES, PDBS, RUNS


@pytest.mark.parametrize(
    ("code", "reason", "want", "verdict"),
    [
        (400, "BadRequest", errors.Invalid, Reject),
        (401, "Unauthorized", errors.Unauthorized, Retry),
        (403, "Forbidden", errors.Forbidden, Retry),
        (404, "NotFound", errors.NotFound, Retry),
        (409, "AlreadyExists", errors.AlreadyExists, Retry),
        (409, "Conflict", errors.Conflict, Retry),
        (410, "Expired", errors.Gone, Retry),
        (415, "", errors.Invalid, Reject),
        (422, "Invalid", errors.Invalid, Reject),
        (429, "TooManyRequests", errors.Unavailable, Retry),
        (500, "", errors.Unavailable, Retry),
        (0, "", errors.Unavailable, Retry),
    ],
)
def test_error_of_status_is_typed_under_a_verdict(
    code: int, reason: str, want: type, verdict: type
) -> None:
    error = parse_error("GET /x", code, {"reason": reason, "message": "no"})
    assert type(error) is want
    assert isinstance(error, verdict)
    assert str(error) == f"GET /x: no (HTTP {code})"


def test_error_with_retry_after_carries_the_delay() -> None:
    error = parse_error("GET /x", 429, {"details": {"retryAfterSeconds": 3}})
    assert isinstance(error, Retry)
    assert error.delay_seconds == 3


@pytest.mark.parametrize(
    ("path", "want"),
    [
        (NODES.path(name="a/b"), "/api/v1/nodes/a%2Fb"),
        (PDBS.path("ns"), "/apis/policy/v1/namespaces/ns/poddisruptionbudgets"),
        (RUNS.path(), "/apis/tidegate.io/v1alpha1/checkpointruns"),
        (
            RUNS.path("ns", "r", "status"),
            "/apis/tidegate.io/v1alpha1/namespaces/ns/checkpointruns/r/status",
        ),
    ],
)
def test_path_of_object(path: str, want: str) -> None:
    assert path == want


async def call_recorded(tmp_path: Path, **access: Any) -> list[dict[str, Any]]:
    """One apply through a real socket; gives what the server saw."""
    seen: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(
            {
                "type": request.content_type,
                "query": dict(request.query),
                "token": request.headers.get("Authorization"),
                "body": json.loads(await request.read()),
            }
        )
        return web.json_response({"kind": "Node"})

    app = web.Application()
    app.router.add_patch("/api/v1/nodes/a", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with Client(Access(server=server, **access)) as client:
            await client.apply(NODES.path(name="a"), {"kind": "Node"}, "me")
            if token_file := access.get("token_file"):
                fresh = tmp_path / "fresh"
                fresh.write_text("second\n")
                fresh.replace(token_file)
                await client.apply(NODES.path(name="a"), {"kind": "Node"}, "me")
    finally:
        await runner.cleanup()
    return seen


def test_client_apply_is_forced_under_the_manager(tmp_path: Path) -> None:
    (seen,) = asyncio.run(call_recorded(tmp_path))
    assert seen["type"] == APPLY_PATCH
    assert seen["query"] == {"fieldManager": "me", "force": "true"}
    assert seen["body"] == {"kind": "Node"}
    assert seen["token"] is None


def test_client_token_file_is_read_again_when_replaced(tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("first\n")
    seen = asyncio.run(call_recorded(tmp_path, token_file=token_file))
    assert [one["token"] for one in seen] == ["Bearer first", "Bearer second"]


def test_client_without_server_raises_unavailable() -> None:
    async def main() -> None:
        async with Client(Access(server="http://127.0.0.1:1")) as client:
            await client.get("/api")

    with pytest.raises(errors.Unavailable, match="GET /api: "):
        asyncio.run(main())


def test_access_outside_a_pod_without_kubeconfig_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(Reject, match="set KUBECONFIG"):
        asyncio.run(load_access())


def test_access_by_kubeconfig_gives_server_and_token(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": "http://example:1/"}}],
        "users": [{"name": "u", "user": {"token": "secret"}}],
    }
    (tmp_path / "config").write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    access = asyncio.run(load_access())
    assert (access.server, access.token, access.tls) == ("http://example:1", "secret", None)


def test_access_by_missing_kubeconfig_is_rejected(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(Reject, match=r"KUBECONFIG=.*none cannot be used"):
        asyncio.run(load_access())

"""A thin JSON client of the API server: paths in, decoded objects out, one exception per verdict.

Owns the HTTP session. Knows no models and retries nothing; its callers' loops do. One event loop.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Self

import aiohttp

from tidegate_operator.kube.access import Access, load_access
from tidegate_operator.kube.errors import ApiError, Unauthorized, Unavailable, parse_error
from tidegate_operator.kube.kinds import Kind

Object = dict[str, Any]

APPLY_PATCH = "application/apply-patch+yaml"
MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_PATCH = "application/strategic-merge-patch+json"

REQUEST_SECONDS = 15.0
CONNECT_SECONDS = 5.0
PAGE_SIZE = 500


class Client:
    """One session with one API server; use as an async context manager."""

    def __init__(self, access: Access) -> None:
        """Keeps the access; opens nothing until entered."""
        self._access = access
        self._token = ""
        self._token_stamp: tuple[int, int] | None = None
        self._session: aiohttp.ClientSession | None = None

    @classmethod
    async def connect(cls) -> Self:
        """A client by KUBECONFIG or the pod's service account.

        Raises:
            Reject: there is neither.
        """
        return cls(await load_access())

    async def __aenter__(self) -> Self:
        """Opens the session."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=REQUEST_SECONDS, connect=CONNECT_SECONDS),
            headers={"Accept": "application/json", "User-Agent": "tidegate"},
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        """Closes the session and its connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def get(self, path: str) -> Object:
        """One object.

        Raises:
            NotFound: there is none.
            ApiError: any other refusal; see `kube.errors`.
        """
        return await self._call("GET", path)

    async def list_page(self, path: str, params: Mapping[str, str]) -> Object:
        """One page of a list, as the server gives it.

        Raises:
            Gone: the page's continue token is too old; begin again.
        """
        return await self._call("GET", path, params=params)

    async def list_all(self, kind: Kind, namespace: str = "", selector: str = "") -> list[Object]:
        """All objects of a kind, page by page; for kinds with few objects.

        Args:
            kind: what to list.
            namespace: empty for all namespaces.
            selector: label selector; empty for all objects.
        """
        params = {"limit": str(PAGE_SIZE)} | ({"labelSelector": selector} if selector else {})
        items: list[Object] = []
        while True:
            page = await self.list_page(kind.path(namespace), params)
            items += page.get("items") or []
            token = page.get("metadata", {}).get("continue")
            if not token:
                return items
            params["continue"] = token

    async def create(self, path: str, body: Mapping[str, Any], *, manager: str = "") -> Object:
        """Creates an object; `path` is the list's.

        Raises:
            AlreadyExists: the name is taken.
        """
        return await self._call("POST", path, body=body, params=_manager(manager))

    async def patch(
        self,
        path: str,
        body: Mapping[str, Any],
        *,
        media_type: str = MERGE_PATCH,
        manager: str = "",
    ) -> Object:
        """Patches an object or its subresource.

        A `metadata.resourceVersion` in the body makes it conditional.

        Raises:
            Conflict: the object changed since that version.
        """
        return await self._call(
            "PATCH", path, body=body, params=_manager(manager), media_type=media_type
        )

    async def apply(self, path: str, body: Mapping[str, Any], manager: str) -> Object:
        """Server-side apply, forced: the body is the manager's whole set of fields.

        What the manager applied before and leaves out now is deleted. The body needs apiVersion,
        kind and metadata.name; a `metadata.resourceVersion` in it makes the apply conditional.

        Raises:
            Conflict: the object changed since that version.
            Invalid: a value breaks the schema.
            Unavailable: also when the served schema lacks a field of the body.
        """
        params = {"fieldManager": manager, "force": "true"}
        return await self._call("PATCH", path, body=body, params=params, media_type=APPLY_PATCH)

    async def delete(self, path: str, *, uid: str = "") -> None:
        """Deletes an object; with `uid` only that one and no successor of the same name.

        Raises:
            NotFound: it is gone already.
            Conflict: another object has the name now.
        """
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
        await self._call("DELETE", path, body=body if uid else None)

    @asynccontextmanager
    async def stream(
        self, path: str, params: Mapping[str, str], inactivity_seconds: float
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Opens a watch; gives its lines, each one event.

        Args:
            path: of the list.
            params: query of the watch.
            inactivity_seconds: silence after which the stream counts as dead.

        Raises:
            Unavailable: the connection broke or was silent for too long.
            Gone: the resourceVersion is too old; list again.
        """
        timeout = aiohttp.ClientTimeout(
            total=None, connect=CONNECT_SECONDS, sock_read=inactivity_seconds
        )
        what = f"WATCH {path}"
        try:
            async with self._request("GET", path, params=params, timeout=timeout) as response:
                if response.status >= 400:
                    raise self._refused(what, response.status, await response.read())
                yield _lines(response.content)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unavailable(f"{what}: {_why(error)}") from error

    async def _call(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        params: Mapping[str, str] | None = None,
        media_type: str = "application/json",
    ) -> Object:
        data = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        headers = {"Content-Type": media_type} if data is not None else {}
        what = f"{method} {path}"
        try:
            request = self._request(method, path, params=params, data=data, headers=headers)
            async with request as response:
                answer, code = await response.read(), response.status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unavailable(f"{what}: {_why(error)}") from error
        if code >= 400:
            raise self._refused(what, code, answer)
        return _decoded(what, answer)

    def _request(
        self, method: str, path: str, *, headers: Mapping[str, str] | None = None, **rest: Any
    ) -> Any:
        if self._session is None:
            raise RuntimeError("the client is used outside its context manager")
        access = self._access
        if access.tls is not None:
            rest["ssl"] = access.tls
        return self._session.request(
            method,
            access.server + path,
            headers={**self._authorization(), **(headers or {})},
            server_hostname=access.server_name or None,
            proxy=access.proxy or None,
            **rest,
        )

    def _authorization(self) -> dict[str, str]:
        token = self._access.token or self._file_token()
        return {"Authorization": f"Bearer {token}"} if token else {}

    def _file_token(self) -> str:
        # kubelet replaces the file by a symlink swap: another inode, so inode and mtime tell.
        path = self._access.token_file
        if path is None:
            return ""
        facts = path.stat()
        stamp = (facts.st_ino, facts.st_mtime_ns)
        if stamp != self._token_stamp:
            self._token, self._token_stamp = path.read_text().strip(), stamp
        return self._token

    def _refused(self, what: str, code: int, answer: bytes) -> ApiError:
        error = parse_error(what, code, _status(answer))
        if isinstance(error, Unauthorized):
            self._token_stamp = None
        return error


def _manager(manager: str) -> dict[str, str]:
    return {"fieldManager": manager} if manager else {}


def _decoded(what: str, answer: bytes) -> Object:
    try:
        found = json.loads(answer)
    except (ValueError, RecursionError) as error:
        raise Unavailable(f"{what}: the answer is no JSON") from error
    if not isinstance(found, dict):
        raise Unavailable(f"{what}: the answer is no JSON object")
    return found


def _status(answer: bytes) -> Object:
    # Proxies and overloaded servers answer plain text; it is then the message.
    try:
        found = json.loads(answer)
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict):
        return found
    return {"message": answer[:300].decode(errors="replace").strip()}


def _why(error: BaseException) -> str:
    if isinstance(error, TimeoutError | asyncio.TimeoutError):
        return "no answer in time"
    return str(error) or type(error).__name__


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    # StreamReader.readline refuses lines above its buffer size; one pod may have 1.5 MiB.
    parts: list[bytes] = []
    async for chunk in content.iter_any():
        head, *rest = chunk.split(b"\n")
        parts.append(head)
        for piece in rest:
            if line := b"".join(parts):
                yield line
            parts = [piece]

"""The gate's certificate: read from its Secret by the API, and changed under a listening server.

By the API and not by a mount: a Secret that is written late, or rotated, is in use at once. The
controller makes what is loaded here. One event loop; `watch` is its only task.
"""

import asyncio
import base64
import binascii
import logging
import os
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tidegate_contract.errors import Retry, TidegateError
from tidegate_operator.kube.backoff import Backoff
from tidegate_operator.kube.client import Client
from tidegate_operator.kube.kinds import SECRETS
from tidegate_operator.kube.watch import SHORT_WATCH_SECONDS, parse_event

CERTIFICATE, KEY, AUTHORITY = "tls.crt", "tls.key", "ca.crt"
WATCH_SECONDS = 300
INACTIVITY_SECONDS = 330.0
RETRY = Backoff(first_seconds=0.5, longest_seconds=15.0)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """What the Secret holds; the key is in no repr.

    Attributes:
        chain: PEM of the serving certificate and what leads to its authority.
        authority: PEM text that clients check it against.
    """

    chain: bytes
    authority: str
    _key: bytes

    @property
    def key(self) -> bytes:
        """PEM of the private key."""
        return self._key

    def __repr__(self) -> str:
        """Names the class alone: a log must never hold the key."""
        return "Certificate(…)"


class Identity:
    """The TLS context that servers listen with; its certificate may change while they do.

    Attributes:
        context: for `asyncio` servers; new handshakes use the newest certificate.
        authority: PEM text for clients; empty before the first certificate.
    """

    def __init__(self) -> None:
        """Has no certificate yet; no handshake succeeds."""
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.authority = ""
        self._current: Certificate | None = None
        self._loaded = asyncio.Event()

    @property
    def is_loaded(self) -> bool:
        """Whether there is a certificate."""
        return self._current is not None

    async def wait_loaded(self) -> None:
        """Returns once there is a certificate."""
        await self._loaded.wait()

    def load(self, certificate: Certificate) -> None:
        """Serves with another certificate from the next handshake on.

        Raises:
            ssl.SSLError: certificate and key do not belong together; the old pair stays in use.
        """
        if certificate == self._current:
            return
        # Tried on another context first: the live one takes the certificate before it looks at the
        # key, and would be left with half of a pair.
        _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), certificate)
        _load(self.context, certificate)
        self._current, self.authority = certificate, certificate.authority
        self._loaded.set()
        logger.info("certificate loaded")


def parse_certificate(secret: Mapping[str, Any]) -> Certificate:
    """The certificate in a Secret.

    Raises:
        Retry: a key is still missing, or its value is not base64; the controller writes them.
    """
    data = secret.get("data") or {}
    values = []
    for name in (CERTIFICATE, KEY, AUTHORITY):
        try:
            values.append(base64.b64decode(data.get(name) or "", validate=True))
        except binascii.Error as error:
            raise Retry(f"Secret key {name} is not base64") from error
        if not values[-1]:
            raise Retry(f"the Secret has no {name} yet")
    chain, key, authority = values
    return Certificate(chain=chain, authority=authority.decode("ascii", "replace"), _key=key)


async def watch(client: Client, identity: Identity, namespace: str, name: str) -> None:
    """Keeps `identity` equal to the Secret until cancelled.

    Only `watch` of this one Secret is needed, so the account cannot read others.
    """
    failures, told = 0, ""
    while True:
        try:
            await _pass(client, identity, namespace, name)
            failures, told = 0, ""
        except (TidegateError, ssl.SSLError) as error:
            failures += 1
            if str(error) != told:
                told = str(error)
                logger.warning("certificate not loaded", extra={"error": told})
            await asyncio.sleep(RETRY.delay(failures))


async def _pass(client: Client, identity: Identity, namespace: str, name: str) -> None:
    """Loads the Secret as it is and at each change, until the server ends the watch."""
    # Without a resourceVersion a watch begins with the object as it is. That of a Secret which
    # nobody has written for long is too old once the API server was restarted, for ever.
    params = {
        "watch": "1",
        "fieldSelector": f"metadata.name={name}",
        "timeoutSeconds": str(WATCH_SECONDS),
    }
    path, opened = SECRETS.path(namespace), time.monotonic()
    async with client.stream(path, params, INACTIVITY_SECONDS) as lines:
        async for line in lines:
            _, secret = parse_event(path, line)
            try:
                identity.load(parse_certificate(secret))
            except (Retry, ssl.SSLError) as error:
                logger.info("waiting for a certificate", extra={"error": str(error)})
    if time.monotonic() - opened < SHORT_WATCH_SECONDS:
        raise Retry(f"WATCH {path}: the server ended it at once")


def _load(context: ssl.SSLContext, certificate: Certificate) -> None:
    with _as_file(certificate.chain) as chain, _as_file(certificate.key) as key:
        context.load_cert_chain(chain, key)


@contextmanager
def _as_file(content: bytes) -> Iterator[str]:
    """Content under a path, in memory only: the private key never reaches a disk."""
    descriptor = os.memfd_create("tidegate", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)

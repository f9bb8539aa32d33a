"""Who sends a report: a projected token of our audience, reviewed by the API server.

Reviews are remembered for a short while by the token's digest; the token itself is neither kept
nor logged. One event loop.
"""

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from tidegate_contract import keys
from tidegate_contract.errors import Reject
from tidegate_operator.kube.client import Client
from tidegate_operator.kube.kinds import TOKEN_REVIEWS

REMEMBERED_SECONDS = 30.0
MOST_REMEMBERED = 4096
MAX_TOKEN = 16 << 10

_ACCOUNT = "system:serviceaccount:"
_POD_NAME = "authentication.kubernetes.io/pod-name"
_POD_UID = "authentication.kubernetes.io/pod-uid"


@dataclass(frozen=True, slots=True, kw_only=True)
class PodIdentity:
    """The pod that a token was made for.

    Attributes:
        namespace, pod, uid: of the pod.
    """

    namespace: str
    pod: str
    uid: str


class Reviewer(Protocol):
    """Whoever can tell a token's pod."""

    async def review(self, token: str) -> PodIdentity:
        """The pod of a token.

        Raises:
            Reject: the token is no good here.
            Retry: the API server cannot say now.
        """


class TokenReviewer:
    """Asks the API server, and remembers the answer for `REMEMBERED_SECONDS`."""

    def __init__(self, client: Client, clock: Callable[[], float] = time.monotonic) -> None:
        """Remembers nothing yet.

        Args:
            client: of the API server.
            clock: seconds, monotonic.
        """
        self._client = client
        self._clock = clock
        self._known: OrderedDict[bytes, tuple[float, PodIdentity]] = OrderedDict()

    async def review(self, token: str) -> PodIdentity:
        """The pod of a token.

        Raises:
            Reject: the token is no good here.
            Retry: the API server cannot say now.
        """
        digest = hashlib.sha256(token.encode()).digest()
        found = self._known.get(digest)
        if found is not None and self._clock() < found[0]:
            return found[1]
        identity = parse_review(await self._ask(token))
        self._known[digest] = (self._clock() + REMEMBERED_SECONDS, identity)
        self._known.move_to_end(digest)
        while len(self._known) > MOST_REMEMBERED:
            self._known.popitem(last=False)
        return identity

    async def _ask(self, token: str) -> Mapping[str, Any]:
        body = {
            "apiVersion": TOKEN_REVIEWS.api_version,
            "kind": TOKEN_REVIEWS.kind,
            "spec": {"token": token, "audiences": [keys.TOKEN_AUDIENCE]},
        }
        answer = await self._client.create(TOKEN_REVIEWS.path(), body)
        return answer.get("status") or {}


def parse_bearer(header: str) -> str:
    """The token of an Authorization header.

    Raises:
        Reject: there is none.
    """
    scheme, _, token = header.partition(" ")
    token = token.strip()
    is_sound = token.isascii() and 0 < len(token) <= MAX_TOKEN
    if scheme.lower() != "bearer" or not is_sound:
        raise Reject("a report needs the header Authorization: Bearer TOKEN")
    return token


def parse_review(status: Mapping[str, Any]) -> PodIdentity:
    """The pod that a review's status names.

    Raises:
        Reject: the token was refused, is of another audience, or is bound to no pod.
    """
    if not status.get("authenticated"):
        raise Reject("the token was refused by the API server")
    # An API server that knows nothing of audiences would authenticate any token.
    if keys.TOKEN_AUDIENCE not in (status.get("audiences") or ()):
        raise Reject(f"the token is not of audience {keys.TOKEN_AUDIENCE}")
    user = status.get("user") or {}
    extra = user.get("extra") or {}
    name, uid = (next(iter(extra.get(field) or ()), "") for field in (_POD_NAME, _POD_UID))
    username = str(user.get("username") or "")
    namespace = username.removeprefix(_ACCOUNT).partition(":")[0]
    if not username.startswith(_ACCOUNT) or not (namespace and name and uid):
        raise Reject("the token is bound to no pod: use the one that the sidecar's volume projects")
    return PodIdentity(namespace=namespace, pod=name, uid=uid)

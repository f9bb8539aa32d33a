"""What the API server refused, one exception per answer that callers tell apart.

```
TidegateError
└── ApiError            code, reason
    ├── Forbidden       403: a right is missing           (Retry: it may be given back)
    ├── Unauthorized    401: the credential is no longer good (Retry: the token file is read again)
    ├── NotFound        404                               (Retry: it may be created)
    ├── AlreadyExists   409 of a create                   (Retry: read it, then decide again)
    ├── Conflict        409 otherwise: somebody wrote in between (Retry)
    ├── Gone            410: that resourceVersion is no longer kept (Retry: list again)
    ├── Invalid         400, 422: the request itself is wrong (Reject)
    └── Unavailable     429, 5xx, no connection, no answer in time (Retry)
```
"""

from collections.abc import Mapping
from typing import Any

from tidegate_contract.errors import Reject, Retry, TidegateError


class ApiError(TidegateError):
    """Base of all answers that are no success.

    Attributes:
        code: HTTP status; 0 when there was no answer.
        reason: the server's CamelCase word, as in `NotFound`; may be empty.
    """

    def __init__(self, message: str, code: int = 0, reason: str = "") -> None:
        """Keeps the sentence, the HTTP status and the server's word."""
        super().__init__(message)
        self.code = code
        self.reason = reason


class Forbidden(ApiError, Retry):
    """The account lacks a right."""


class Unauthorized(ApiError, Retry):
    """The credential was not accepted."""


class NotFound(ApiError, Retry):
    """There is no such object, or no such kind."""


class AlreadyExists(ApiError, Retry):
    """A create met an object of the same name."""


class Conflict(ApiError, Retry):
    """The object changed since it was read, or another manager owns the field."""


class Gone(ApiError, Retry):
    """The resourceVersion or the page is no longer kept."""


class Invalid(ApiError, Reject):
    """The server will never take this request."""


class Unavailable(ApiError, Retry):
    """The server could not answer now."""


_BY_CODE: dict[int, type[ApiError]] = {
    400: Invalid,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: Gone,
    422: Invalid,
    429: Unavailable,
}


def parse_error(what: str, code: int, status: Mapping[str, Any]) -> ApiError:
    """The exception for one refused request or one ERROR of a watch.

    Args:
        what: the request, as in `PATCH /api/v1/nodes/a`.
        code: HTTP status.
        status: the decoded `Status` object; may be empty.
    """
    reason = str(status.get("reason") or "")
    kind = _BY_CODE.get(code, Unavailable if code >= 500 or code == 0 else Invalid)
    if kind is Conflict and reason == "AlreadyExists":
        kind = AlreadyExists
    detail = status.get("message") or "the API server gave no reason"
    error = kind(f"{what}: {detail} (HTTP {code})", code, reason)
    if isinstance(error, Retry):
        error.delay_seconds = float(_retry_after(status) or error.delay_seconds)
    return error


def _retry_after(status: Mapping[str, Any]) -> int:
    details = status.get("details")
    seconds = details.get("retryAfterSeconds") if isinstance(details, Mapping) else None
    return seconds if isinstance(seconds, int) else 0

"""The exceptions of Tidegate: three verdicts under one base.

```
TidegateError
├── Retry      the world may heal; `delay_seconds` says when to look again
├── Reject     the user must change something; names the field and what is allowed
└── Corrupt    failed verification; never read again, never deleted silently
```

Every module of every package raises these; nothing here performs I/O.
"""


class TidegateError(Exception):
    """Base of all errors that Tidegate raises on purpose."""


class Retry(TidegateError):
    """The same call may succeed later.

    Attributes:
        delay_seconds: how long the caller should wait at least before it looks again.
    """

    def __init__(self, message: str, delay_seconds: float = 10.0) -> None:
        """Keeps the sentence for people and the delay for the caller's loop."""
        super().__init__(message)
        self.delay_seconds = delay_seconds


class Reject(TidegateError):
    """The input or the configuration is wrong; trying again changes nothing."""


class Corrupt(TidegateError):
    """Bytes or a document failed verification; whoever meets it takes another copy."""

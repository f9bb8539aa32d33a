"""The exceptions of Tidegate: three verdicts under one base.

```
TidegateError
├── Retry      the world may heal; `delay_seconds` says when to look again
├── Reject     the user must change something; names the field and what is allowed
└── Corrupt    failed verification; never read again, never deleted silently
    └── DamagedFile    names the file of a step folder, so that it can be set aside
```

Every module of every package raises these; nothing here performs I/O.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidegate_contract.seal import FileEntry


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


class DamagedFile(Corrupt):
    """A file of a step folder is not what its seal says; whoever meets it sets it aside.

    Attributes:
        entry: what the file should be.
    """

    def __init__(self, message: str, entry: "FileEntry") -> None:
        """Keeps the sentence and the entry."""
        super().__init__(message)
        self.entry = entry

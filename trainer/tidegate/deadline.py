"""Calls that may hang in the kernel, kept away from the main thread.

A parallel file system that does not answer costs one daemon thread, never the trainer.
"""

import threading
from collections.abc import Callable
from typing import TypeVar

from tidegate_contract.errors import Retry

T = TypeVar("T")


def run_within(seconds: float, what: str, action: Callable[[], T]) -> T:
    """The result of `action`, run on a daemon thread.

    Args:
        seconds: how long to wait for it.
        what: for the sentence, such as "reading the remote tier".
        action: must not use anything that belongs to another thread.

    Raises:
        Retry: it did not end in time; its thread is left behind.
        Exception: whatever `action` raised.
    """
    results: list[T] = []
    errors: list[Exception] = []

    def work() -> None:
        try:
            results.append(action())
        except Exception as error:  # noqa: BLE001  # raised again on the calling thread
            errors.append(error)

    thread = threading.Thread(target=work, name="tidegate-deadline", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise Retry(f"{what} did not end within {seconds:.0f} s")
    return results[0]

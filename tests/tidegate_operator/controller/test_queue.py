import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tidegate_operator.controller.queue import Item, Queue, Subject

A, B = Item(Subject.RUN, "ns", "a"), Item(Subject.RUN, "ns", "b")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


Body = Callable[[Queue, Clock], Coroutine[Any, Any, None]]


def with_queue(body: Body) -> Callable[[], None]:
    """Runs a test's body in a loop, with a queue whose clock the test moves."""

    def run() -> None:
        async def main() -> None:
            clock = Clock()
            async with asyncio.timeout(2):
                await body(Queue(clock), clock)

        asyncio.run(main())

    run.__name__ = body.__name__
    return run


async def is_empty(queue: Queue) -> bool:
    try:
        async with asyncio.timeout(0.01):
            queue.add(item := await queue.take())
            queue.done(item)
    except TimeoutError:
        return True
    return False


@with_queue
async def test_queue_gives_keys_once_in_the_order_they_are_due(queue: Queue, clock: Clock) -> None:
    for item, delay in ((B, 2), (A, 1), (B, 2), (A, 5)):
        queue.add(item, delay)
    assert queue.depth == 0
    clock.now = 10
    assert queue.depth == 2
    assert [await queue.take(), await queue.take()] == [A, B]
    assert await is_empty(queue)


@with_queue
async def test_queue_earlier_time_wins_and_the_later_one_is_forgotten(
    queue: Queue, clock: Clock
) -> None:
    queue.add(A, 60)
    queue.add(A)
    assert await queue.take() == A
    queue.done(A)
    clock.now = 100
    assert await is_empty(queue)


@with_queue
async def test_queue_key_at_work_is_given_again_only_when_done(queue: Queue, clock: Clock) -> None:
    queue.add(A)
    await queue.take()
    queue.add(A)
    queue.add(B)
    assert await queue.take() == B
    assert await is_empty(queue)
    clock.now = 7
    assert queue.longest_work == 7
    queue.done(A)
    assert await queue.take() == A


@with_queue
async def test_queue_waiting_taker_is_woken(queue: Queue, clock: Clock) -> None:
    taker = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    queue.add(A)
    assert await taker == A


@pytest.mark.parametrize("takers", [1, 3])
def test_queue_real_delay_is_waited_for(takers: int) -> None:
    async def main() -> None:
        queue = Queue()
        queue.add(A, 0.05)
        tasks = [asyncio.create_task(queue.take()) for _ in range(takers)]
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED, timeout=2)
        assert [await one for one in done] == [A]
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)

    asyncio.run(main())

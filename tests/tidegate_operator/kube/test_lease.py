"""The Lease's protocol against a Lease in memory; the real API server's is tested on the ground."""

import asyncio
from collections.abc import Mapping
from typing import Any, cast

import pytest

from tidegate_operator.kube.client import Client
from tidegate_operator.kube.errors import AlreadyExists, Conflict, NotFound, Unavailable
from tidegate_operator.kube.lease import Lease, LeaseLost, LeaseTimes


class OneLease:
    """The API server's view of one Lease, and the seconds of everybody's clock."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.now = 0.0
        self.is_down = False
        self.is_hanging = False

    @property
    def spec(self) -> dict[str, Any]:
        assert self.lease is not None
        return cast("dict[str, Any]", self.lease["spec"])

    async def _answer(self) -> None:
        if self.is_hanging:
            await asyncio.sleep(60)
        if self.is_down:
            raise Unavailable("down")

    async def get(self, _: str) -> dict[str, Any]:
        await self._answer()
        if self.lease is None:
            raise NotFound("none")
        return {"metadata": dict(self.lease["metadata"]), "spec": dict(self.spec)}

    async def create(self, _: str, body: Mapping[str, Any]) -> None:
        await self._answer()
        if self.lease is not None:
            raise AlreadyExists("there")
        self.lease = {"metadata": {"resourceVersion": "1"}, "spec": dict(body["spec"])}

    async def patch(self, _: str, body: Mapping[str, Any]) -> None:
        await self._answer()
        assert self.lease is not None
        version = self.lease["metadata"]["resourceVersion"]
        if body["metadata"]["resourceVersion"] != version:
            raise Conflict("changed")
        self.lease["metadata"]["resourceVersion"] = str(int(version) + 1)
        self.spec.update(body["spec"])

    def claim(self, holder: str, retry: float = 0.001) -> Lease:
        times = LeaseTimes(duration=15, renew_deadline=10, retry=retry)
        client = cast("Client", self)
        return Lease(client, "ns", "name", holder, times=times, clock=lambda: self.now)


async def cannot_acquire(lease: Lease) -> bool:
    try:
        async with asyncio.timeout(0.03):
            await lease.acquire()
    except TimeoutError:
        return True
    return False


def test_lease_held_by_another_is_taken_only_when_it_stood_still_for_its_duration() -> None:
    async def main() -> None:
        server = OneLease()
        first, second = server.claim("first"), server.claim("second")
        await first.acquire()
        assert await cannot_acquire(second)
        server.now = 14
        await first._try()
        server.now = 20
        assert await cannot_acquire(second)
        server.now = 36
        await second.acquire()
        assert (server.spec["holderIdentity"], server.spec["leaseTransitions"]) == ("second", 1)
        with pytest.raises(LeaseLost, match="another holder"):
            async with asyncio.timeout(1):
                await first.hold()
        assert not first.is_held

    asyncio.run(main())


def test_lease_released_is_taken_at_once() -> None:
    async def main() -> None:
        server = OneLease()
        first, second = server.claim("first"), server.claim("second")
        await first.acquire()
        assert await cannot_acquire(second)
        await first.release()
        await second.acquire()
        assert server.spec["holderIdentity"] == "second"
        await first.release()
        assert server.spec["holderIdentity"] == "second"

    asyncio.run(main())


def test_lease_that_others_had_in_between_is_lost() -> None:
    async def main() -> None:
        server = OneLease()
        lease = server.claim("first")
        await lease.acquire()
        server.spec["holderIdentity"] = ""
        with pytest.raises(LeaseLost, match="another holder"):
            async with asyncio.timeout(1):
                await lease.hold()

    asyncio.run(main())


def test_lease_that_cannot_be_renewed_is_lost_before_others_may_take_it() -> None:
    async def main() -> None:
        server = OneLease()
        lease = server.claim("first")
        await lease.acquire()
        server.is_down = True
        holding = asyncio.create_task(lease.hold())
        await asyncio.sleep(0.02)
        assert not holding.done()
        server.now = 10
        with pytest.raises(LeaseLost, match="could not be renewed for 10 s: down"):
            await holding

    asyncio.run(main())


def test_lease_request_that_hangs_does_not_outlive_the_deadline() -> None:
    async def main() -> None:
        server = OneLease()
        lease = server.claim("first")
        await lease.acquire()
        server.is_hanging, server.now = True, 9.98
        holding = asyncio.create_task(lease.hold())
        await asyncio.sleep(0.01)
        server.now = 10.1
        with pytest.raises(LeaseLost, match="no answer in time"):
            async with asyncio.timeout(1):
                await holding

    asyncio.run(main())


def test_lease_of_two_that_race_for_it_goes_to_one() -> None:
    async def main() -> None:
        server = OneLease()
        claims = [server.claim(f"c{number}") for number in range(5)]
        await claims[0].acquire()
        await claims[0].release()
        results = await asyncio.gather(
            *(claim._try() for claim in claims[1:]), return_exceptions=True
        )
        assert results.count(True) == 1
        assert sum(claim.is_held for claim in claims) == 1

    asyncio.run(main())

"""One active process by a Lease; given back at the end, so that a successor need not wait.

Owns the protocol of `coordination.k8s.io` Leases and nothing else. The holder's clock is compared
with nobody's: a Lease counts as expired once it did not change for its duration *as seen here*.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from tidegate_contract.errors import TidegateError
from tidegate_operator.kube.client import Client, Object
from tidegate_operator.kube.errors import AlreadyExists, ApiError, NotFound
from tidegate_operator.kube.kinds import LEASES
from tidegate_operator.kube.times import format_micro_time

logger = logging.getLogger(__name__)


class LeaseLost(TidegateError):
    """Another process may be active now; this one must end at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTimes:
    """Clocks of a Lease, in seconds.

    Attributes:
        duration: silence after which others may take it.
        renew_deadline: without a renewal for so long the holder gives up; shorter than `duration`.
        retry: between two tries.
    """

    duration: int = 15
    renew_deadline: float = 10.0
    retry: float = 2.0


DEFAULT_TIMES = LeaseTimes()


class Lease:
    """A claim on being the active one.

    `acquire`, then `hold` beside the work, then `release`; all in one event loop.
    """

    def __init__(
        self,
        client: Client,
        namespace: str,
        name: str,
        holder: str,
        *,
        times: LeaseTimes = DEFAULT_TIMES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Touches nothing yet.

        Args:
            client: of the API server.
            namespace: of the Lease.
            name: of the Lease.
            holder: identity of this process, unique among its rivals.
            times: the Lease's clocks.
            clock: monotonic seconds.
        """
        self._client = client
        self._namespace = namespace
        self._name = name
        self._holder = holder
        self._times = times
        self._clock = clock
        self._seen: tuple[str, float] = ("", 0.0)
        self._renewed = 0.0
        self.is_held = False

    async def acquire(self) -> None:
        """Returns once this process is the active one; tries for ever."""
        is_told = False
        while True:
            try:
                if await self._try():
                    logger.info("lease acquired", extra={"lease": self._name})
                    return
            except ApiError as error:
                if not is_told:
                    logger.warning("lease not acquired yet", extra={"error": str(error)})
                is_told = True
            await asyncio.sleep(self._times.retry)

    async def hold(self) -> None:
        """Renews until cancelled.

        Raises:
            LeaseLost: another process took it, or it could not be renewed in time.
        """
        while True:
            await asyncio.sleep(self._times.retry)
            try:
                await self._renew()
            except LeaseLost:
                self.is_held = False
                raise

    async def release(self) -> None:
        """Lets a successor in at once; a failure only makes it wait for the duration."""
        if not self.is_held:
            return
        self.is_held = False
        try:
            found = await self._client.get(self._path)
            if found.get("spec", {}).get("holderIdentity") == self._holder:
                await self._write(found, holder="", is_taken_over=False)
                logger.info("lease released", extra={"lease": self._name})
        except ApiError as error:
            logger.warning("lease could not be released", extra={"error": str(error)})

    async def _renew(self) -> None:
        lost_at = self._renewed + self._times.renew_deadline
        where = f"lease {self._namespace}/{self._name}"
        try:
            # A request that hangs must not outlive the deadline: then another one is active.
            async with asyncio.timeout(max(0.0, lost_at - self._clock())):
                is_ours = await self._try()
        except (ApiError, TimeoutError) as error:
            if self._clock() >= lost_at:
                cause = str(error) or "no answer in time"
                seconds = f"{self._times.renew_deadline:.0f} s"
                raise LeaseLost(f"{where} could not be renewed for {seconds}: {cause}") from error
            return
        if not is_ours:
            raise LeaseLost(f"{where} has another holder")

    async def _try(self) -> bool:
        # The time of the request, not of its answer: others count from when it was written.
        asked = self._clock()
        try:
            is_ours = await self._write_if_free(await self._client.get(self._path))
        except NotFound:
            is_ours = await self._create()
        if is_ours:
            self._renewed, self.is_held = asked, True
        return is_ours

    async def _write_if_free(self, found: Object) -> bool:
        holder = found.get("spec", {}).get("holderIdentity") or ""
        if holder not in ("", self._holder) and not self._is_expired(found):
            return False
        if self.is_held and holder != self._holder:
            return False
        await self._write(found, holder=self._holder, is_taken_over=holder != self._holder)
        return True

    def _is_expired(self, found: Object) -> bool:
        version, now = found["metadata"]["resourceVersion"], self._clock()
        if version != self._seen[0]:
            self._seen = (version, now)
        duration = found.get("spec", {}).get("leaseDurationSeconds") or self._times.duration
        return now - self._seen[1] > duration

    async def _create(self) -> bool:
        body = {
            "apiVersion": LEASES.api_version,
            "kind": LEASES.kind,
            "metadata": {"name": self._name, "namespace": self._namespace},
            "spec": self._spec(self._holder, transitions=0) | {"acquireTime": _now()},
        }
        try:
            await self._client.create(LEASES.path(self._namespace), body)
        except AlreadyExists:
            return False
        return True

    async def _write(self, found: Object, *, holder: str, is_taken_over: bool) -> None:
        transitions = int(found.get("spec", {}).get("leaseTransitions") or 0)
        spec = self._spec(holder, transitions + is_taken_over)
        if is_taken_over:
            spec["acquireTime"] = _now()
        # The version makes it conditional: of two that take an expired Lease, one gets a Conflict.
        version = found["metadata"]["resourceVersion"]
        await self._client.patch(
            self._path, {"metadata": {"resourceVersion": version}, "spec": spec}
        )

    def _spec(self, holder: str, transitions: int) -> dict[str, Any]:
        return {
            "holderIdentity": holder,
            "leaseDurationSeconds": self._times.duration if holder else 1,
            "leaseTransitions": transitions,
            "renewTime": _now(),
        }

    @property
    def _path(self) -> str:
        return LEASES.path(self._namespace, self._name)


def _now() -> str:
    return format_micro_time(datetime.now(UTC))

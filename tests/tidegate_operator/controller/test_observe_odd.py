"""Objects that nobody foresaw, in the controller's own lists."""

import asyncio
from typing import Any

import pytest

from tidegate_operator.api import parse_policy
from tidegate_operator.controller import observe
from tidegate_operator.controller.observe import World
from tidegate_operator.controller.queue import Queue
from tidegate_operator.kube.kinds import POLICIES, Key


class FakeClient:
    """Lists two policies and nothing else."""

    async def list_all(self, kind: Any) -> list[Any]:
        names = ("odd", "sound") if kind is POLICIES else ()
        spec = {"remote": {"type": "Tier", "tier": "pfs"}}
        return [
            {"metadata": {"namespace": "team-a", "name": name, "uid": name}, "spec": spec}
            for name in names
        ]


def test_list_with_an_odd_object_takes_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    parse = parse_policy

    def parse_odd(raw: Any) -> Any:
        if raw["metadata"]["name"] == "odd":
            raise OverflowError("odd")
        return parse(raw)

    monkeypatch.setattr(observe, "parse_policy", parse_odd)
    world = World(FakeClient(), Queue())  # type: ignore[arg-type]
    asyncio.run(world._list())
    assert set(world.policies) == {Key("team-a", "sound")}

import asyncio
from typing import Any

import pytest

from tidegate_contract.errors import Reject
from tidegate_operator.gate.tokens import (
    REMEMBERED_SECONDS,
    PodIdentity,
    TokenReviewer,
    parse_bearer,
    parse_review,
)

EXTRA = {
    "authentication.kubernetes.io/pod-name": ["p0"],
    "authentication.kubernetes.io/pod-uid": ["u0"],
}
STATUS: dict[str, Any] = {
    "authenticated": True,
    "audiences": ["tidegate"],
    "user": {"username": "system:serviceaccount:team-a:default", "extra": EXTRA},
}


def test_review_names_the_tokens_pod() -> None:
    assert parse_review(STATUS) == PodIdentity(namespace="team-a", pod="p0", uid="u0")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        pytest.param({"authenticated": False}, "was refused", id="refused"),
        pytest.param({"audiences": ["api"]}, "not of audience tidegate", id="other-audience"),
        pytest.param({"audiences": None}, "not of audience tidegate", id="no-audience"),
        pytest.param(
            {"user": {"username": "system:serviceaccount:team-a:default"}}, "to no pod", id="no-pod"
        ),
        pytest.param({"user": {"username": "admin", "extra": EXTRA}}, "to no pod", id="a-person"),
    ],
)
def test_review_that_proves_no_pod_is_refused(changes: Any, sentence: str) -> None:
    with pytest.raises(Reject, match=sentence):
        parse_review(STATUS | changes)


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer ", "Basic abc", "Bearer \udcff", "Bearer " + "x" * 20000]
)
def test_header_without_a_token_is_refused(header: str) -> None:
    with pytest.raises(Reject, match="Authorization: Bearer TOKEN"):
        parse_bearer(header)


def test_reviewer_remembers_for_a_while_and_each_token_by_itself() -> None:
    class FakeClient:
        """Counts reviews; the real API server's answers are tested on the ground."""

        def __init__(self) -> None:
            self.asked: list[str] = []

        async def create(self, path: str, body: Any) -> Any:
            assert path == "/apis/authentication.k8s.io/v1/tokenreviews"
            assert body["spec"]["audiences"] == ["tidegate"]
            self.asked.append(body["spec"]["token"])
            return {"status": STATUS}

    async def body() -> None:
        now = [0.0]
        client = FakeClient()
        reviewer = TokenReviewer(client, clock=lambda: now[0])  # type: ignore[arg-type]
        for token in ("a", "a", "b"):
            await reviewer.review(token)
        assert client.asked == ["a", "b"]
        now[0] = REMEMBERED_SECONDS
        await reviewer.review("a")
        assert client.asked == ["a", "b", "a"]

    asyncio.run(body())

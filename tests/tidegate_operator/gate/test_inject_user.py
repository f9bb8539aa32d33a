"""The trainer is told as which user its sidecar runs: it trusts that user's files."""

from typing import Any

import pytest

from tidegate_contract import keys
from tidegate_operator.gate.inject import build_patch

SIDECAR = {"name": keys.SIDECAR_CONTAINER, "image": "x"}
CASES: dict[str, tuple[Any, Any, Any, str]] = {
    "unset-is-root": ({}, {}, {}, "0"),
    "root-forbidden": ({"runAsNonRoot": True}, {}, {}, "64738"),
    "root-forbidden-to-the-trainer": ({}, {"runAsNonRoot": True}, {}, "64738"),
    "pod": ({"runAsUser": 1000, "runAsNonRoot": True}, {}, {}, "1000"),
    "trainer-over-pod": ({"runAsUser": 1000}, {"runAsUser": 2000}, {}, "2000"),
    "policy-over-both": (
        {"runAsUser": 1000, "runAsNonRoot": True},
        {"runAsUser": 2000},
        {"runAsUser": 3000},
        "3000",
    ),
}


def uids_of(pod: Any) -> list[str | None]:
    told = [{e["name"]: e.get("value") for e in c["env"]} for c in pod["spec"]["containers"]]
    return [env.get(keys.ENV_SIDECAR_UID) for env in told]


@pytest.fixture
def reviewed(a_pod: Any, a_policy: Any, an_injection: Any, apply_patch: Any) -> Any:
    """A pod after its first review: of these contexts, under a policy with these wishes."""

    def review(shared: Any, own: Any, wishes: Any) -> Any:
        pod = a_pod(securityContext=shared)
        pod["spec"]["containers"][0]["securityContext"] = own
        injection = an_injection(pod, a_policy(sidecar=wishes))
        return apply_patch(pod, build_patch(pod, injection).operations)

    return review


@pytest.mark.parametrize(
    ("shared", "own", "wishes", "want"),
    [pytest.param(*row, id=name) for name, row in CASES.items()],
)
def test_trainer_is_told_the_user_of_its_sidecar(
    shared: Any, own: Any, wishes: Any, want: str, reviewed: Any
) -> None:
    pod = reviewed(shared, own, wishes)
    (sidecar,) = pod["spec"]["initContainers"]
    assert uids_of(pod) == [want] == [str(sidecar["securityContext"]["runAsUser"])]


def test_trainer_is_told_once_whatever_the_policy_says_later(
    reviewed: Any, a_policy: Any, an_injection: Any
) -> None:
    pod = reviewed({"runAsNonRoot": True}, {}, {})
    again = an_injection(pod, a_policy(sidecar={"runAsUser": 4711}))
    assert list(build_patch(pod, again).operations) == []


def test_trainer_keeps_what_it_was_told_by_its_user(
    a_pod: Any, an_injection: Any, apply_patch: Any
) -> None:
    before = a_pod()
    before["spec"]["containers"][0]["env"] = [{"name": keys.ENV_SIDECAR_UID, "value": "7"}]
    pod = apply_patch(before, build_patch(before, an_injection(before)).operations)
    assert uids_of(pod) == ["7"]


@pytest.mark.parametrize(
    ("context", "shared", "want"),
    [
        pytest.param({"runAsUser": 5}, {"runAsUser": 6}, "5", id="its-own"),
        pytest.param(None, {"runAsUser": 6}, "6", id="the-pods"),
        pytest.param({}, {}, None, id="its-image-knows"),
    ],
)
def test_trainer_beside_a_sidecar_that_is_there_is_told_that_ones_user(
    context: Any, shared: Any, want: str | None, a_pod: Any, an_injection: Any, apply_patch: Any
) -> None:
    sidecar = SIDECAR if context is None else SIDECAR | {"securityContext": context}
    before = a_pod(initContainers=[{"name": "first"}, sidecar], securityContext=shared)
    pod = apply_patch(before, build_patch(before, an_injection(before)).operations)
    assert uids_of(pod) == [want]


def test_every_trainer_is_told_the_one_user(
    a_pod: Any, an_injection: Any, apply_patch: Any
) -> None:
    before = a_pod()
    second = {"name": "second", "securityContext": {"runAsUser": 9}}
    before["spec"]["containers"].append(second)
    before["spec"]["containers"][0]["securityContext"] = {"runAsUser": 8}
    before["metadata"]["annotations"] = {keys.CONTAINERS_ANNOTATION: "trainer,second"}
    pod = apply_patch(before, build_patch(before, an_injection(before)).operations)
    assert uids_of(pod) == ["8", "8"]

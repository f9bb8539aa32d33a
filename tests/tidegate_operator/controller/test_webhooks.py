from typing import Any

import pytest

from tidegate_operator.controller.objects import Owner
from tidegate_operator.controller.webhooks import (
    build_namespace_selector,
    decide_owner_patch,
    decide_webhook_patch,
)
from tidegate_operator.kube.kinds import NAMESPACES

NAME = "kubernetes.io/metadata.name"
OWNER = Owner(kind=NAMESPACES, name="tidegate-system", uid="new")
REFERENCE = {"apiVersion": "v1", "kind": "Namespace", "name": "tidegate-system", "uid": "new"}
SELECTOR = build_namespace_selector(["team-a"])


def a_configuration(**hook: Any) -> dict[str, Any]:
    return {"metadata": {"name": "tidegate-evict"}, "webhooks": [{"name": "evict", **hook}]}


@pytest.mark.parametrize(
    ("namespaces", "want"),
    [
        ([], {"key": NAME, "operator": "DoesNotExist"}),
        (["b", "a", "b"], {"key": NAME, "operator": "In", "values": ["a", "b"]}),
    ],
    ids=["none selects nothing", "by name"],
)
def test_namespace_selector_lists_names(namespaces: list[str], want: dict[str, Any]) -> None:
    assert build_namespace_selector(namespaces) == {"matchExpressions": [want]}


@pytest.mark.parametrize(
    ("hook", "want"),
    [
        pytest.param(
            {"clientConfig": {"service": {}}},
            {
                "clientConfig": {"caBundle": "Q0E="},
                "namespaceSelector": {"matchLabels": None, **SELECTOR},
            },
            id="as installed",
        ),
        pytest.param(
            {"clientConfig": {"caBundle": "b2xk"}, "namespaceSelector": SELECTOR},
            {"clientConfig": {"caBundle": "Q0E="}},
            id="old bundle",
        ),
        pytest.param(
            {"clientConfig": {"caBundle": "Q0E="}, "namespaceSelector": {}},
            {"namespaceSelector": {"matchLabels": None, **SELECTOR}},
            id="other namespaces",
        ),
        pytest.param(
            {"clientConfig": {"caBundle": "Q0E="}, "namespaceSelector": SELECTOR}, None, id="right"
        ),
    ],
)
def test_webhook_patch_has_only_what_differs(hook: dict[str, Any], want: Any) -> None:
    got = decide_webhook_patch(a_configuration(**hook), "Q0E=", SELECTOR)
    assert got == (want and {"webhooks": [{"name": "evict", **want}]})


def test_webhook_patch_without_bundle_and_selector_changes_nothing() -> None:
    assert decide_webhook_patch(a_configuration(), "") is None


@pytest.mark.parametrize(
    ("owners", "want"),
    [
        ([], [REFERENCE]),
        ([REFERENCE], None),
        ([{**REFERENCE, "uid": "old"}], [{"$patch": "delete", "uid": "old"}, REFERENCE]),
        ([{"kind": "Application", "name": "x", "uid": "1"}], [REFERENCE]),
    ],
    ids=["none", "right", "of an earlier namespace", "beside another owner"],
)
def test_owner_patch_adds_the_owner_once(owners: Any, want: Any) -> None:
    got = decide_owner_patch({"metadata": {"ownerReferences": owners}}, OWNER)
    assert got == (want and {"metadata": {"ownerReferences": want}})

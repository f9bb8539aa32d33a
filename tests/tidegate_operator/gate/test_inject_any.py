"""Injection of generated pods: whatever a pod holds, it keeps, and a second review adds nothing."""

import copy
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate_contract import keys
from tidegate_operator.gate.inject import build_patch

NAMES = st.text("abc", min_size=1, max_size=3)
MOUNTS = st.lists(
    st.fixed_dictionaries({"name": NAMES, "mountPath": st.sampled_from(["/a", "/b/c", "/data/"])}),
    max_size=2,
)
VARIABLES = st.lists(
    st.fixed_dictionaries(
        {
            "name": st.sampled_from(["LANG", keys.ENV_RUN, keys.ENV_LOCAL]),
            "value": st.just("mine"),
        }
    ),
    max_size=2,
    unique_by=lambda one: one["name"],
)
CONTAINERS = st.lists(
    st.fixed_dictionaries(
        {"name": NAMES},
        optional={
            "env": VARIABLES,
            "volumeMounts": MOUNTS,
            "securityContext": st.sampled_from([{}, {"runAsUser": 5}, {"runAsNonRoot": True}]),
            "resources": st.sampled_from([{}, {"limits": {"nvidia.com/gpu": "1"}}]),
        },
    ),
    min_size=1,
    max_size=3,
    unique_by=lambda one: one["name"],
)
SPECS = st.fixed_dictionaries(
    {"containers": CONTAINERS},
    optional={
        "initContainers": st.lists(
            st.fixed_dictionaries({"name": NAMES.map("i-{}".format)}),
            max_size=2,
            unique_by=lambda one: one["name"],
        ),
        "volumes": st.lists(
            st.fixed_dictionaries({"name": NAMES}), max_size=2, unique_by=lambda one: one["name"]
        ),
        "hostNetwork": st.booleans(),
        "securityContext": st.sampled_from([{}, {"supplementalGroups": [64738]}, {"fsGroup": 3}]),
        "affinity": st.sampled_from([{}, {"podAffinity": {}}, {"nodeAffinity": {}}]),
        "terminationGracePeriodSeconds": st.integers(0, 3600),
        "someFieldOfALaterRelease": st.just({"kept": [1, None, "x"]}),
    },
)
METADATA = st.fixed_dictionaries(
    {
        "generateName": st.just("x-"),
        "labels": st.just({keys.JOB_NAME_LABEL: "train", keys.POLICY_LABEL: "default"}),
    },
    optional={
        "annotations": st.dictionaries(
            st.sampled_from(
                [
                    keys.SAFE_TO_EVICT_ANNOTATION,
                    keys.CONTAINERS_ANNOTATION,
                    keys.JOB_IGNORED_FAILURES_ANNOTATION,
                    "a~b/c",
                ]
            ),
            st.sampled_from(["a", "true", "b,c"]),
        )
    },
)


PODS = st.fixed_dictionaries({"metadata": METADATA, "spec": SPECS})


@settings(max_examples=150, deadline=None)
@given(pod=PODS, node=st.sampled_from(["", "node-1"]))
def test_injection_of_any_pod_only_adds_and_is_idempotent(
    pod: Any, node: str, an_injection: Any, apply_patch: Any, assert_only_adds: Any
) -> None:
    untouched = copy.deepcopy(pod)
    patch = build_patch(pod, an_injection(pod, preferred_node=node))
    assert pod == untouched
    json.dumps(patch.operations)
    after = apply_patch(pod, patch.operations)
    assert_only_adds(pod, after)
    added = [one["name"] for one in after["spec"]["initContainers"]]
    assert added.count(keys.SIDECAR_CONTAINER) == 1
    again = build_patch(after, an_injection(after, preferred_node="elsewhere"))
    assert list(again.operations) == []

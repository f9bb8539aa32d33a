from typing import Any

import pytest

from tidegate_contract import keys
from tidegate_contract.document import decode
from tidegate_contract.errors import Reject
from tidegate_contract.wire import Policy
from tidegate_operator.gate.inject import build_patch, build_refusal, build_response
from tidegate_operator.gate.injected import parse_injected

SHAPES = ["indexed-job", "statefulset", "bare"]


@pytest.fixture(scope="session")
def inject(an_injection: Any, apply_patch: Any) -> Any:
    """The pod after its injection; keywords change the facts."""

    def run(pod: Any, policy: Any = None, **changes: Any) -> Any:
        patch = build_patch(pod, an_injection(pod, policy, **changes))
        return apply_patch(pod, patch.operations)

    return run


def sidecar_of(pod: Any) -> Any:
    (found,) = [
        one for one in pod["spec"]["initContainers"] if one["name"] == keys.SIDECAR_CONTAINER
    ]
    return found


def env_of(container: Any) -> dict[str, Any]:
    names = [one["name"] for one in container["env"]]
    assert len(set(names)) == len(names)
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in container["env"]}


@pytest.mark.parametrize("shape", SHAPES)
def test_injection_of_a_pod_adds_all_of_its_parts(
    shape: str, a_pod: Any, inject: Any, assert_only_adds: Any
) -> None:
    before = a_pod(shape)
    pod = inject(before)
    assert_only_adds(before, pod)
    sidecar, (trainer,) = sidecar_of(pod), pod["spec"]["containers"]
    assert (sidecar["restartPolicy"], sidecar["args"]) == ("Always", ["flush"])
    mounts = [
        {(m["name"], m["mountPath"]) for m in one["volumeMounts"]} for one in (trainer, sidecar)
    ]
    shared = {("tidegate-local", "/tidegate/local"), ("tidegate-remote", "/tidegate/remote")}
    assert shared < mounts[0]
    assert mounts[1] == shared | {("tidegate-token", "/var/run/secrets/tidegate")}
    assert pod["spec"]["securityContext"]["supplementalGroups"] == [64738]
    assert pod["spec"]["terminationGracePeriodSeconds"] == 120
    assert pod["metadata"]["labels"][keys.HOLD_LABEL] == "true"


@pytest.mark.parametrize(
    ("shape", "run", "owner"),
    [
        ("indexed-job", "train", "0d5c2f0e-1111-4000-8000-000000000001"),
        ("statefulset", "sts-0", "sts-uid"),
        ("bare", "solo", None),
    ],
)
def test_injection_tells_both_containers_their_run(
    shape: str, run: str, owner: str | None, a_pod: Any, inject: Any
) -> None:
    pod = inject(a_pod(shape))
    shared = env_of(pod["spec"]["containers"][0])
    assert shared.pop(keys.ENV_SIDECAR_UID) == "0"
    del shared["LANG"]
    assert shared.items() <= env_of(sidecar_of(pod)).items()
    assert shared[keys.ENV_RUN] == f"team-a/{run}"
    assert shared[keys.ENV_LOCAL] == "/tidegate/local"
    assert shared[keys.ENV_REMOTE] == f"/tidegate/remote/team-a/{run}"
    assert shared.get(keys.ENV_RUN_DERIVED_OWNER) == owner
    assert shared[keys.ENV_NODE]["fieldRef"]["fieldPath"] == "spec.nodeName"
    assert decode(Policy, shared[keys.ENV_POLICY].encode(), "environment") == Policy()
    assert pod["metadata"]["labels"][keys.RUN_LABEL] == run
    (local,) = [v for v in pod["spec"]["volumes"] if v["name"] == "tidegate-local"]
    assert local["hostPath"] == {"path": f"/var/lib/tidegate/team-a/{run}", "type": "Directory"}


@pytest.mark.parametrize("shape", ["replicaset", "bare-generatename"])
def test_injection_of_a_pod_that_nothing_names_is_left_alone(
    shape: str, a_pod: Any, an_injection: Any
) -> None:
    with pytest.raises(Reject, match="set the label tidegate"):
        an_injection(a_pod(shape))


def test_gate_address_and_token_reach_the_sidecar_alone(a_pod: Any, inject: Any) -> None:
    pod = inject(a_pod())
    env = env_of(sidecar_of(pod))
    assert env[keys.ENV_GATE_URL] == "https://10.96.0.9:443"
    assert env[keys.ENV_GATE_CA] == "PEM"
    assert not [name for name in env_of(pod["spec"]["containers"][0]) if "_GATE_" in name]
    (token,) = [v for v in pod["spec"]["volumes"] if v["name"] == "tidegate-token"]
    source = token["projected"]["sources"][0]["serviceAccountToken"]
    assert source == {"audience": "tidegate", "expirationSeconds": 3600, "path": "token"}


@pytest.mark.parametrize(
    ("annotations", "containers", "want"),
    [
        pytest.param({}, [{"name": "a"}, {"name": "b"}], {"a"}, id="first"),
        pytest.param(
            {},
            [{"name": "a"}, {"name": "b", "resources": {"limits": {"nvidia.com/gpu": 8}}}],
            {"b"},
            id="extended-resource",
        ),
        pytest.param(
            {},
            [{"name": "a"}, {"name": "b", "resources": {"requests": {"hugepages-2Mi": "1Gi"}}}],
            {"a"},
            id="native-resource-is-none",
        ),
        pytest.param(
            {keys.DEFAULT_CONTAINER_ANNOTATION: "b"},
            [{"name": "a", "resources": {"limits": {"nvidia.com/gpu": 8}}}, {"name": "b"}],
            {"b"},
            id="kubectl-default",
        ),
        pytest.param(
            {keys.CONTAINERS_ANNOTATION: "a, c", keys.DEFAULT_CONTAINER_ANNOTATION: "b"},
            [{"name": "a"}, {"name": "b"}, {"name": "c"}],
            {"a", "c"},
            id="own-annotation",
        ),
    ],
)
def test_injection_chooses_the_containers_that_train(
    annotations: Any, containers: Any, want: set[str], a_pod: Any, inject: Any
) -> None:
    pod = a_pod(containers=containers)
    pod["metadata"]["annotations"] = annotations
    after = inject(pod)["spec"]["containers"]
    assert {one["name"] for one in after if "volumeMounts" in one} == want


def test_injection_annotation_that_names_nobody_warns_and_goes_on(
    a_pod: Any, an_injection: Any
) -> None:
    pod = a_pod()
    pod["metadata"]["annotations"] = {keys.CONTAINERS_ANNOTATION: "trainr"}
    patch = build_patch(pod, an_injection(pod))
    assert patch.operations
    assert (
        "tidegate.io/containers: no container is named 'trainr'; there is trainer"
        in (patch.warnings[0])
    )


@pytest.mark.parametrize(
    ("pod_context", "own_context", "want"),
    [
        pytest.param({}, {}, (0, None, False), id="unset-is-root"),
        pytest.param({"runAsUser": 1000}, {}, (1000, None, True), id="pod"),
        pytest.param(
            {"runAsUser": 1000, "runAsGroup": 1000},
            {"runAsUser": 2000},
            (2000, 1000, True),
            id="trainer-over-pod",
        ),
        pytest.param({"runAsNonRoot": True}, {}, (64738, None, True), id="root-forbidden"),
        pytest.param(
            {"runAsNonRoot": True}, {"runAsNonRoot": False}, (0, None, False), id="root-allowed"
        ),
    ],
)
def test_sidecar_runs_as_the_trainer_without_rights(
    pod_context: Any, own_context: Any, want: Any, a_pod: Any, inject: Any
) -> None:
    pod = a_pod(securityContext=pod_context)
    pod["spec"]["containers"][0]["securityContext"] = own_context
    context = sidecar_of(inject(pod))["securityContext"]
    assert (context["runAsUser"], context.get("runAsGroup"), context["runAsNonRoot"]) == want
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert context["readOnlyRootFilesystem"] is True
    assert context["allowPrivilegeEscalation"] is False


def test_sidecar_of_a_guaranteed_pod_keeps_it_guaranteed(a_pod: Any, inject: Any) -> None:
    pod = a_pod()
    pod["spec"]["containers"][0]["resources"] = {"limits": {"cpu": "8", "memory": "64Gi"}}
    want = {"cpu": "100m", "memory": "512Mi"}
    assert sidecar_of(inject(pod))["resources"] == {"requests": want, "limits": want}


def test_sidecar_of_a_burstable_pod_takes_the_installations(a_pod: Any, inject: Any) -> None:
    assert sidecar_of(inject(a_pod()))["resources"]["requests"]["memory"] == "128Mi"


def test_sidecar_takes_the_policys_wishes(a_pod: Any, a_policy: Any, inject: Any) -> None:
    wishes = {"runAsUser": 7, "metricsPort": 9000, "resources": {"requests": {"cpu": "2"}}}
    sidecar = sidecar_of(inject(a_pod(), a_policy(sidecar=wishes)))
    assert sidecar["securityContext"]["runAsUser"] == 7
    assert sidecar["ports"] == [{"name": "tidegate", "containerPort": 9000}]
    assert sidecar["resources"] == {"requests": {"cpu": "2"}}


def test_sidecar_on_the_host_network_opens_no_port(a_pod: Any, inject: Any) -> None:
    sidecar = sidecar_of(inject(a_pod(hostNetwork=True)))
    assert "ports" not in sidecar
    assert env_of(sidecar)[keys.ENV_METRICS_PORT] == "0"


def test_injection_with_emptydir_and_claim_needs_no_host_path(
    a_pod: Any, a_policy: Any, inject: Any
) -> None:
    policy = a_policy(
        local={"type": "EmptyDir", "emptyDir": {"sizeLimit": "1Gi"}},
        remote={"type": "Claim", "claimName": "pfs", "path": "a$(B)"},
    )
    pod = inject(a_pod(), policy)
    volumes = {one["name"]: one for one in pod["spec"]["volumes"]}
    assert volumes["tidegate-local"]["emptyDir"] == {"sizeLimit": "1073741824"}
    assert volumes["tidegate-remote"]["persistentVolumeClaim"] == {"claimName": "pfs"}
    assert "supplementalGroups" not in pod["spec"]["securityContext"]
    # the kubelet would expand $(B) otherwise
    assert env_of(sidecar_of(pod))[keys.ENV_REMOTE] == "/tidegate/remote/a$$(B)/team-a/train"


def test_injection_of_a_run_that_is_not_held_sets_no_mark(a_pod: Any, inject: Any) -> None:
    metadata = inject(a_pod(), is_held=False)["metadata"]
    assert keys.HOLD_LABEL not in metadata["labels"]
    assert not metadata["annotations"].keys() & {
        keys.SAFE_TO_EVICT_ANNOTATION,
        keys.DO_NOT_DISRUPT_ANNOTATION,
    }


def test_injection_notes_only_the_marks_it_set_itself(a_pod: Any, inject: Any) -> None:
    pod = a_pod()
    pod["metadata"]["annotations"] = {keys.SAFE_TO_EVICT_ANNOTATION: "true"}
    annotations = inject(pod)["metadata"]["annotations"]
    assert annotations[keys.SAFE_TO_EVICT_ANNOTATION] == "true"
    assert annotations[keys.DO_NOT_DISRUPT_ANNOTATION] == "true"
    note = parse_injected(annotations)
    assert note is not None
    assert note.marks == (keys.DO_NOT_DISRUPT_ANNOTATION,)
    assert (note.policy, note.generation, note.containers) == ("default", 3, ("trainer",))


def test_injection_lifts_the_jobs_growing_back_off(a_pod: Any, inject: Any) -> None:
    pod = a_pod()
    pod["metadata"]["annotations"][keys.JOB_IGNORED_FAILURES_ANNOTATION] = "3"
    assert keys.JOB_IGNORED_FAILURES_ANNOTATION not in inject(pod)["metadata"]["annotations"]


@pytest.mark.parametrize(
    ("before", "want"),
    [pytest.param(10, 120, id="raised"), pytest.param(600, 600, id="kept")],
)
def test_grace_period_is_raised_to_its_floor(
    before: int, want: int, a_pod: Any, inject: Any
) -> None:
    pod = inject(a_pod(terminationGracePeriodSeconds=before))
    assert pod["spec"]["terminationGracePeriodSeconds"] == want


def test_injection_prefers_the_node_that_has_the_copy(a_pod: Any, inject: Any) -> None:
    mine = {"weight": 1, "preference": {"matchExpressions": []}}
    node_affinity = {"preferredDuringSchedulingIgnoredDuringExecution": [mine]}
    pod = inject(a_pod(affinity={"nodeAffinity": node_affinity}), preferred_node="node-3")
    terms = pod["spec"]["affinity"]["nodeAffinity"][
        "preferredDuringSchedulingIgnoredDuringExecution"
    ]
    assert terms[0] == mine
    (field,) = terms[1]["preference"]["matchFields"]
    assert field == {"key": "metadata.name", "operator": "In", "values": ["node-3"]}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        pytest.param(
            {"volumes": [{"name": "tidegate-local", "emptyDir": {}}]},
            "spec.volumes: the name 'tidegate-local' is taken",
            id="volume-name",
        ),
        pytest.param(
            {"containers": [{"name": "tidegate-flush"}]},
            "spec.containers: the name 'tidegate-flush' is taken",
            id="container-name",
        ),
        pytest.param(
            {
                "containers": [
                    {"name": "t", "volumeMounts": [{"name": "x", "mountPath": "/tidegate/"}]}
                ]
            },
            "container 't' mounts 'x' at /tidegate",
            id="mount-above-ours",
        ),
        pytest.param({"os": {"name": "windows"}}, "for Windows nodes", id="windows"),
    ],
)
def test_injection_that_would_break_the_pod_is_refused(
    change: Any, sentence: str, a_pod: Any, an_injection: Any
) -> None:
    pod = a_pod(**change)
    with pytest.raises(Reject) as caught:
        build_patch(pod, an_injection(pod))
    assert sentence in str(caught.value)


def test_responses_are_reviews_that_the_api_server_takes(a_pod: Any, an_injection: Any) -> None:
    pod = a_pod()
    admitted = build_response("u1", build_patch(pod, an_injection(pod)))
    assert (admitted["apiVersion"], admitted["kind"]) == (
        "admission.k8s.io/v1",
        "AdmissionReview",
    )
    assert admitted["response"]["uid"] == "u1"
    assert admitted["response"]["patchType"] == "JSONPatch"
    refused = build_refusal("u2", "because")["response"]
    assert refused == {
        "uid": "u2",
        "allowed": False,
        "status": {"code": 409, "message": "because"},
    }

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tidegate_contract import keys
from tidegate_operator.settings import parse_settings

CHART = Path(__file__).parents[2] / "charts" / "tidegate"
TIERS: dict[str, Any] = {
    "local": [
        {"name": "nvme", "path": "/mnt/nvme", "gid": 2000000, "requireMountPoint": True},
        {"name": "scratch", "path": "/scratch"},
    ],
    "remote": [
        {"name": "pfs", "hostPath": "/mnt/pfs/tidegate"},
        {"name": "archive", "claimName": "archive"},
    ],
}


def container_of(workload: dict[str, Any]) -> Any:
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    return container


def without_crds(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [o for o in objects if o["kind"] != "CustomResourceDefinition"]


def test_chart_rendered_twice_gives_the_same_bytes(render: Any) -> None:
    first, second = render(tiers=TIERS), render(again=True, tiers=TIERS)
    assert first.text == second.text


def test_objects_have_names_of_their_own(defaults: Any) -> None:
    names = [
        (o["kind"], o["metadata"].get("namespace"), o["metadata"]["name"]) for o in defaults.objects
    ]
    assert len(names) == len(set(names))


def test_keys_in_the_chart_are_the_contracts(render: Any) -> None:
    known = {value for value in vars(keys).values() if isinstance(value, str)}
    text = yaml.safe_dump_all(without_crds(render(tiers=TIERS).objects))
    text += (CHART / "templates" / "NOTES.txt").read_text()
    text = re.sub(r"apiVersion: tidegate\.io/\w+", "", text)  # the policy that the notes propose
    used = set(re.findall(r"\btidegate\.io/[a-z0-9-]+|\bTIDEGATE_[A-Z_]+|/v1/[a-z]+", text))
    assert used - known == set()
    assert {keys.POLICY_LABEL, keys.HOLD_LABEL, keys.INJECT_PATH, keys.EVICT_PATH} <= used
    assert f"{keys.MANAGED_BY_LABEL}={keys.MANAGED_BY}" in text


def test_nothing_of_the_release_is_removed_by_the_break_glass_command(defaults: Any) -> None:
    for found in defaults.objects:
        labels = found["metadata"].get("labels", {})
        assert labels.get(keys.MANAGED_BY_LABEL) != keys.MANAGED_BY


def test_crds_are_printed_as_generated(render: Any) -> None:
    want = [(path).read_text() for path in sorted((CHART / "files" / "crds").glob("*.yaml"))]
    printed = render(crds={"keep": False}).text
    assert want
    assert all(text in printed for text in want)
    assert "resource-policy" not in printed


def test_crds_are_kept_by_default(defaults: Any) -> None:
    crds = defaults.of_kind("CustomResourceDefinition")
    assert len(crds) == 2
    for crd in crds.values():
        assert crd["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


def test_crds_disabled_prints_none(render: Any) -> None:
    assert not render(crds={"enabled": False}).of_kind("CustomResourceDefinition")


def test_config_of_the_defaults_is_the_programs(defaults: Any) -> None:
    want = {
        "namespace": "tidegate-system",
        "gate": {"service": "tidegate-gate", "secret": "tidegate-gate-tls", "port": 8443},
        "anchor": "tidegate-anchor",
        "webhooks": {"mutating": "tidegate-inject", "validating": "tidegate-evict"},
        "lease": "tidegate-controller",
        "tiers": {
            "local": [
                {
                    "name": "nvme",
                    "path": "/var/lib/tidegate",
                    "requireMountPoint": False,
                    "maxUsePercent": 80,
                    "gid": 64738,
                    "orphanTTL": "168h",
                }
            ],
            "remote": [],
        },
        "sidecar": {
            "image": "tidegate/sidecar:0.1.0",
            "pullPolicy": "IfNotPresent",
            "resources": {
                "requests": {"cpu": "100m", "memory": "128Mi"},
                "limits": {"memory": "512Mi"},
            },
        },
        "drain": {
            "enabled": True,
            "maxHoldLimit": "30m",
            "allowBlock": False,
            "releaseTTL": "3m",
            "contactTimeout": "60s",
        },
        "certs": {"mode": "operator", "caDuration": "87600h", "duration": "2160h"},
        "nodeAnnotations": {"enabled": True},
    }
    assert defaults.config == want


def test_config_is_what_the_operator_reads(render: Any) -> None:
    rendered = render(tiers=TIERS)
    settings = parse_settings(json.dumps(rendered.config), "config.json")
    assert [tier.gid for tier in settings.tiers.local] == [2000000, 64738]
    assert [tier.host_path for tier in settings.tiers.remote] == ["/mnt/pfs/tidegate", None]
    assert settings.model_dump(mode="json", by_alias=True, exclude_defaults=True).keys() == {
        "namespace",
        "sidecar",
        "tiers",
    }


def test_config_completes_local_tiers(render: Any) -> None:
    first, second = render(tiers=TIERS).config["tiers"]["local"]
    assert (first["gid"], first["requireMountPoint"], first["orphanTTL"]) == (2000000, True, "168h")
    assert (second["gid"], second["requireMountPoint"]) == (64738, False)
    assert render(tiers=TIERS).config["tiers"]["remote"] == TIERS["remote"]


def test_config_names_objects_that_are_there(defaults: Any) -> None:
    config = defaults.config
    assert config["gate"]["service"] in defaults.of_kind("Service")
    assert config["gate"]["secret"] in defaults.of_kind("Secret")
    assert config["anchor"] in defaults.of_kind("ClusterRole")
    assert config["webhooks"]["mutating"] in defaults.of_kind("MutatingWebhookConfiguration")
    assert config["webhooks"]["validating"] in defaults.of_kind("ValidatingWebhookConfiguration")
    (port,) = defaults.of_kind("Service")["tidegate-gate"]["spec"]["ports"]
    ports = container_of(defaults.of_kind("Deployment")["tidegate-gate"])["ports"]
    assert port == {"name": "https", "port": 443, "targetPort": "https"}
    assert {"name": "https", "containerPort": config["gate"]["port"]} in ports


def test_config_change_restarts_the_pods(render: Any, defaults: Any) -> None:
    def checksums(rendered: Any) -> dict[str, str]:
        workloads = rendered.of_kind("Deployment") | rendered.of_kind("DaemonSet")
        return {
            name: workload["spec"]["template"]["metadata"]["annotations"]["checksum/config"]
            for name, workload in workloads.items()
        }

    before, after = checksums(defaults), checksums(render(drain={"maxHoldLimit": "1h"}))
    assert set(before) == {"tidegate-controller", "tidegate-gate", "tidegate-agent"}
    assert all(before[name] != after[name] for name in before)


def test_fields_of_the_controller_are_not_in_the_manifests(defaults: Any) -> None:
    # an upgrade would reset them, or stop at a conflict of field managers
    assert "data" not in defaults.of_kind("Secret")["tidegate-gate-tls"]
    assert "stringData" not in defaults.of_kind("Secret")["tidegate-gate-tls"]
    manifests = yaml.safe_dump_all(without_crds(defaults.objects))
    assert not re.search(r"\b(caBundle|ownerReferences):", manifests)
    (webhook,) = defaults.of_kind("ValidatingWebhookConfiguration")["tidegate-evict"]["webhooks"]
    assert "namespaceSelector" not in webhook


IMAGES: dict[str, tuple[dict[str, str], str]] = {
    "the chart's version": ({}, "tidegate/operator:0.1.0"),
    "a tag": ({"tag": "edge"}, "tidegate/operator:edge"),
    "another registry": ({"repository": "r.example:5000/t/op"}, "r.example:5000/t/op:0.1.0"),
    "a digest": (
        {"tag": "edge", "digest": f"sha256:{'a' * 64}"},
        f"tidegate/operator@sha256:{'a' * 64}",
    ),
}


@pytest.mark.parametrize(("image", "want"), IMAGES.values(), ids=IMAGES.keys())
def test_image_of_the_operator_is_the_one_named(
    render: Any, image: dict[str, str], want: str
) -> None:
    workloads = render(image=image).of_kind("Deployment").values()
    assert {container_of(workload)["image"] for workload in workloads} == {want}


def test_agent_has_the_sidecars_image(render: Any) -> None:
    rendered = render(sidecar={"image": {"tag": "edge"}})
    agent = container_of(rendered.of_kind("DaemonSet")["tidegate-agent"])
    assert agent["image"] == rendered.config["sidecar"]["image"] == "tidegate/sidecar:edge"


def test_agent_mounts_each_tier(render: Any) -> None:
    pod = render(tiers=TIERS).of_kind("DaemonSet")["tidegate-agent"]["spec"]["template"]["spec"]
    mounts = {m["name"]: m for m in pod["containers"][0]["volumeMounts"]}
    found = {
        mounts[v["name"]]["mountPath"]: v.get("hostPath") or v.get("persistentVolumeClaim")
        for v in pod["volumes"]
        if v["name"].startswith(("local-", "remote-"))
    }
    assert found == {
        f"{keys.AGENT_LOCAL_TIERS}/nvme": {"path": "/mnt/nvme", "type": "DirectoryOrCreate"},
        f"{keys.AGENT_LOCAL_TIERS}/scratch": {"path": "/scratch", "type": "DirectoryOrCreate"},
        f"{keys.AGENT_REMOTE_TIERS}/pfs": {"path": "/mnt/pfs/tidegate", "type": "Directory"},
        f"{keys.AGENT_REMOTE_TIERS}/archive": {"claimName": "archive"},
    }
    propagations = {
        mount["mountPropagation"]
        for mount in mounts.values()
        if mount["mountPath"].startswith((keys.AGENT_LOCAL_TIERS, keys.AGENT_REMOTE_TIERS))
    }
    assert propagations == {"HostToContainer"}


def test_agent_is_root_with_few_capabilities(defaults: Any) -> None:
    agent = container_of(defaults.of_kind("DaemonSet")["tidegate-agent"])["securityContext"]
    assert agent["runAsUser"] == 0
    assert agent["capabilities"] == {
        "drop": ["ALL"],
        "add": ["CHOWN", "DAC_OVERRIDE", "FOWNER", "SETUID", "SETGID", "KILL"],
    }
    assert agent["readOnlyRootFilesystem"] and not agent["allowPrivilegeEscalation"]


@pytest.mark.parametrize("name", ["tidegate-controller", "tidegate-gate"])
def test_controller_and_gate_are_restricted(defaults: Any, name: str) -> None:
    workload = defaults.of_kind("Deployment")[name]
    pod, container = workload["spec"]["template"]["spec"], container_of(workload)
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not any("hostPath" in volume for volume in pod["volumes"])


BUDGETS = {"two gates": (2, 1, True), "one gate": (1, 1, False), "all needed": (3, 3, False)}


@pytest.mark.parametrize(("replicas", "needed", "want"), BUDGETS.values(), ids=BUDGETS.keys())
def test_budget_of_the_gate_never_traps_a_node(
    render: Any, replicas: int, needed: int, want: bool
) -> None:
    gate = {"replicas": replicas, "podDisruptionBudget": {"minAvailable": needed}}
    assert bool(render(gate=gate).of_kind("PodDisruptionBudget")) is want


def test_agent_disabled_leaves_nothing_of_it(render: Any) -> None:
    rendered = render(agent={"enabled": False})
    assert not [o for o in rendered.objects if o["metadata"]["name"] == "tidegate-agent"]

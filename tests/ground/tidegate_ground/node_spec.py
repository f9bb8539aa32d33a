"""What one node is, as its pid 1 reads it, and the settings written for its services. Pure.

A node's pid 1 is started again from the same specification after a power cut.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidegate_ground.components import kubeconfig_path
from tidegate_ground.images import Archive
from tidegate_ground.network import GATEWAY, POD_CIDR, node_address, pod_cidr
from tidegate_ground.options import Mount, mounts_from_json, mounts_to_json
from tidegate_ground.paths import GroundPaths


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """One node.

    Attributes:
        number: from 1 on.
        paths: the files of its ground.
        cni_folder: where the CNI plugins are.
        var_bytes: size of its /var.
        nvme_bytes: size of its /mnt/nvme.
        mounts: folders of the host that it has, read-only.
        archives: the images it has before its kubelet starts, the pause image first.
    """

    number: int
    paths: GroundPaths
    cni_folder: Path
    var_bytes: int
    nvme_bytes: int
    mounts: tuple[Mount, ...]
    archives: tuple[Archive, ...]

    @property
    def name(self) -> str:
        """The node's name in Kubernetes."""
        return f"node{self.number}"

    @property
    def address(self) -> str:
        """The node's address in the ground's network."""
        return node_address(self.number)

    @property
    def folder(self) -> Path:
        """The node's folder on the host."""
        return self.paths.node(self.name)

    @property
    def disks(self) -> dict[Path, int]:
        """The image files of /var and /mnt/nvme, and their sizes in bytes."""
        return {self.var_disk: self.var_bytes, self.nvme_disk: self.nvme_bytes}

    @property
    def var_disk(self) -> Path:
        """The image file of /var."""
        return self.folder / "var.img"

    @property
    def nvme_disk(self) -> Path:
        """The image file of /mnt/nvme."""
        return self.folder / "nvme.img"

    @property
    def boot_id(self) -> Path:
        """What the node has for /proc/sys/kernel/random/boot_id: another one at each start."""
        return self.folder / "boot_id"

    @property
    def machine_id(self) -> Path:
        """What the node has for /etc/machine-id."""
        return self.folder / "machine-id"

    @property
    def started(self) -> Path:
        """Appears when the node's services run and its images are loaded."""
        return self.folder / "started"

    @property
    def settings(self) -> Path:
        """The folder of the services' settings."""
        return self.folder / "settings"

    def log(self, service: str) -> Path:
        """Returns the log of a service, or of `init`."""
        return self.paths.logs / f"{self.name}.{service}.log"

    def to_json(self) -> dict[str, Any]:
        """Returns the specification as it is stored."""
        return {
            "number": self.number,
            "ground": self.paths.name,
            "root": str(self.paths.root),
            "cni_folder": str(self.cni_folder),
            "var_bytes": self.var_bytes,
            "nvme_bytes": self.nvme_bytes,
            "mounts": mounts_to_json(self.mounts),
            "archives": [archive.to_json() for archive in self.archives],
        }


def spec_path(paths: GroundPaths, node: str) -> Path:
    """Returns the file of a node's specification."""
    return paths.node(node) / "spec.json"


def node_spec_from_json(stored: Mapping[str, Any]) -> NodeSpec:
    """Reads what `NodeSpec.to_json` returned."""
    return NodeSpec(
        number=stored["number"],
        paths=GroundPaths(name=stored["ground"], root=Path(stored["root"])),
        cni_folder=Path(stored["cni_folder"]),
        var_bytes=stored["var_bytes"],
        nvme_bytes=stored["nvme_bytes"],
        mounts=mounts_from_json(stored["mounts"]),
        archives=tuple(Archive.from_json(archive) for archive in stored["archives"]),
    )


def build_settings(spec: NodeSpec) -> dict[str, str]:
    """Returns the settings files of a node's services, by their path below `spec.settings`."""
    return {
        "containerd.toml": _containerd(spec),
        "kubelet.json": json.dumps(_kubelet(spec), indent=1),
        "resolv.conf": f"nameserver {GATEWAY}\n",
        "cni/10-ground.conflist": json.dumps(_cni(spec), indent=1),
    }


def build_services(spec: NodeSpec) -> dict[str, list[str]]:
    """Returns the command lines of containerd, kube-proxy and kubelet, in the order of starting."""
    settings, name = spec.settings, spec.name
    return {
        "containerd": ["containerd", "--config", f"{settings}/containerd.toml"],
        "kube-proxy": [
            "kube-proxy",
            f"--kubeconfig={kubeconfig_path(spec.paths, 'kube-proxy')}",
            f"--hostname-override={name}",
            f"--cluster-cidr={POD_CIDR}",
            # These knobs cannot be written outside of the machine's first network namespace.
            "--conntrack-max-per-core=0",
            "--conntrack-tcp-timeout-established=0s",
            "--conntrack-tcp-timeout-close-wait=0s",
        ],
        "kubelet": [
            "kubelet",
            f"--config={settings}/kubelet.json",
            f"--kubeconfig={kubeconfig_path(spec.paths, name)}",
            f"--hostname-override={name}",
            f"--node-ip={spec.address}",
        ],
    }


def _kubelet(spec: NodeSpec) -> dict[str, Any]:
    pki = spec.paths.pki
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(pki / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(pki / f"{spec.name}.crt"),
        "tlsPrivateKeyFile": str(pki / f"{spec.name}.key"),
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "cgroupDriver": "cgroupfs",
        "failCgroupV1": False,
        "failSwapOn": False,
        "clusterDNS": [GATEWAY],
        "clusterDomain": "cluster.local",
        "resolvConf": str(spec.settings / "resolv.conf"),
        # The lease is renewed each quarter of its duration, well within the grace period that
        # the controller-manager gives a silent node.
        "nodeStatusUpdateFrequency": "4s",
        "nodeLeaseDurationSeconds": 8,
        "evictionHard": {
            "nodefs.available": "2%",
            "imagefs.available": "2%",
            "memory.available": "100Mi",
        },
        "imageGCHighThresholdPercent": 100,
        "shutdownGracePeriod": "0s",
    }


def _containerd(spec: NodeSpec) -> str:
    return f"""version = 3
root = "/var/lib/containerd"
state = "/run/containerd"
[grpc]
  address = "/run/containerd/containerd.sock"
[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = "localhost/pause:1"
[plugins."io.containerd.cri.v1.runtime"]
  restrict_oom_score_adj = true
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = ["{spec.cni_folder}"]
    conf_dir = "{spec.settings}/cni"
"""


def _cni(spec: NodeSpec) -> dict[str, Any]:
    addresses = {
        "type": "host-local",
        "ranges": [[{"subnet": pod_cidr(spec.number)}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "hairpinMode": True,
        "ipam": addresses,
    }
    return {"cniVersion": "1.0.0", "name": "ground", "plugins": [bridge]}

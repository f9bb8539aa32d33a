"""The control plane's components: what each is started with, and in which order. Pure."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from tidegate_ground.network import API_PORT, GATEWAY, KUBERNETES_SERVICE, SERVICE_CIDR
from tidegate_ground.paths import GroundPaths

ETCD_URL = "http://127.0.0.1:2379"
API_SERVER_URL = f"https://{GATEWAY}:{API_PORT}"
API_SERVER_NAMES = (
    "DNS:localhost,DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc,"
    f"IP:127.0.0.1,IP:{GATEWAY},IP:{KUBERNETES_SERVICE}"
)
# A node is NotReady this long after its kubelet's last sign; a real cluster waits 50 s.
NODE_GRACE_SECONDS = 12


class Component(StrEnum):
    """The processes of the control plane, in the order they are started."""

    ETCD = "etcd"
    API_SERVER = "kube-apiserver"
    CONTROLLER_MANAGER = "kube-controller-manager"
    SCHEDULER = "kube-scheduler"
    DNS = "coredns"


# Whose certificate has which subject; Kubernetes' own RBAC rules know these names.
SUBJECTS = {
    "admin": "/O=system:masters/CN=admin",
    "apiserver-kubelet": "/O=system:masters/CN=apiserver-kubelet",
    "coredns": "/O=system:masters/CN=coredns",
    "kube-controller-manager": "/CN=system:kube-controller-manager",
    "kube-proxy": "/CN=system:kube-proxy",
    "kube-scheduler": "/CN=system:kube-scheduler",
}


def kubeconfig_path(paths: GroundPaths, user: str) -> Path:
    """Returns the kubeconfig of a component or a node."""
    return paths.pki / f"{user}.kubeconfig"


def corefile_path(paths: GroundPaths) -> Path:
    """Returns CoreDNS's settings."""
    return paths.state / "Corefile"


def build_arguments(component: Component, paths: GroundPaths) -> list[str]:
    """Returns the command line of a component, without the program."""
    match component:
        case Component.ETCD:
            return _etcd(paths)
        case Component.API_SERVER:
            return _api_server(paths)
        case Component.CONTROLLER_MANAGER:
            return _controller_manager(paths)
        case Component.SCHEDULER:
            kubeconfig = kubeconfig_path(paths, "kube-scheduler")
            return [f"--kubeconfig={kubeconfig}", "--leader-elect=false"]
        case Component.DNS:
            return ["-conf", str(corefile_path(paths))]


def _etcd(paths: GroundPaths) -> list[str]:
    return [
        f"--data-dir={paths.state}/etcd",
        "--unsafe-no-fsync",  # its data need not outlive this machine's own power
        f"--listen-client-urls={ETCD_URL}",
        f"--advertise-client-urls={ETCD_URL}",
        "--listen-peer-urls=http://127.0.0.1:2380",
    ]


def _api_server(paths: GroundPaths) -> list[str]:
    pki = paths.pki
    return [
        f"--etcd-servers={ETCD_URL}",
        f"--bind-address={GATEWAY}",
        f"--advertise-address={GATEWAY}",
        f"--secure-port={API_PORT}",
        f"--cert-dir={paths.state}",
        f"--tls-cert-file={pki}/apiserver.crt",
        f"--tls-private-key-file={pki}/apiserver.key",
        f"--client-ca-file={pki}/ca.crt",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={pki}/sa.pub",
        f"--service-account-signing-key-file={pki}/sa.key",
        f"--service-cluster-ip-range={SERVICE_CIDR}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged=true",
        f"--kubelet-client-certificate={pki}/apiserver-kubelet.crt",
        f"--kubelet-client-key={pki}/apiserver-kubelet.key",
        f"--kubelet-certificate-authority={pki}/ca.crt",
        # Node names do not resolve here.
        "--kubelet-preferred-address-types=InternalIP",
        # Webhook Services are called at the pod's own address: the name speaks of aggregation
        # alone, but the resolver is shared, and there is no kube-proxy beside the API server.
        "--enable-aggregator-routing=true",
    ]


def _controller_manager(paths: GroundPaths) -> list[str]:
    pki = paths.pki
    return [
        f"--kubeconfig={kubeconfig_path(paths, 'kube-controller-manager')}",
        "--use-service-account-credentials",
        "--leader-elect=false",  # no wait for an old lease after a restart
        f"--service-account-private-key-file={pki}/sa.key",
        f"--root-ca-file={pki}/ca.crt",
        "--allocate-node-cidrs=false",
        f"--cluster-signing-cert-file={pki}/ca.crt",
        f"--cluster-signing-key-file={pki}/ca.key",
        "--node-monitor-period=1s",
        f"--node-monitor-grace-period={NODE_GRACE_SECONDS}s",
    ]


def build_corefile(paths: GroundPaths) -> str:
    """Returns CoreDNS's settings.

    Names are never cached, so a replaced pod's name is right at once. Foreign names get NXDOMAIN
    from a block of their own: in one block `template` would answer before `kubernetes`, and
    without any the answer would be REFUSED, which glibc reports as a temporary failure.
    """
    return f"""cluster.local:53 in-addr.arpa:53 {{
    bind {GATEWAY}
    errors
    kubernetes cluster.local in-addr.arpa {{
        kubeconfig {kubeconfig_path(paths, "coredns")}
        pods insecure
        ttl 0
    }}
}}
.:53 {{
    bind {GATEWAY}
    template ANY ANY {{
        rcode NXDOMAIN
    }}
}}
"""

"""Where the API server is and who we are there: KUBECONFIG, else the pod's service account.

In a pod only files are read; a kubeconfig is loaded by the `kubernetes` package, so every kind of
user it knows (exec plugins, OIDC) works. Called once per process, by `kube.client`.
"""

import os
import ssl
from dataclasses import dataclass
from pathlib import Path

from tidegate_contract.errors import Reject

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """One API server and one identity.

    Attributes:
        server: URL without a trailing slash.
        tls: None for plain HTTP.
        token: bearer token; empty when certificates or a token file say who we are.
        token_file: read again as it changes; kubelet rotates it.
        server_name: checked against the certificate in place of the URL's host; may be empty.
        proxy: URL of an HTTP proxy; empty for none.
    """

    server: str
    tls: ssl.SSLContext | None = None
    token: str = ""
    token_file: Path | None = None
    server_name: str = ""
    proxy: str = ""


async def load_access() -> Access:
    """Finds the API server.

    Raises:
        Reject: KUBECONFIG cannot be used, or is unset outside a pod.
    """
    if os.environ.get("KUBECONFIG"):
        return await _from_kubeconfig(os.environ["KUBECONFIG"])
    return _from_service_account(os.environ.get("KUBERNETES_SERVICE_HOST", ""), _ACCOUNT)


def _from_service_account(host: str, account: Path) -> Access:
    token_file, authority = account / "token", account / "ca.crt"
    if not host or not token_file.is_file():
        raise Reject(
            "no API server: set KUBECONFIG to a kubeconfig file, or run in a pod with a mounted "
            "service account token"
        )
    port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    bracketed = f"[{host}]" if ":" in host else host
    return Access(
        server=f"https://{bracketed}:{port}",
        tls=ssl.create_default_context(cafile=str(authority)),
        token_file=token_file,
    )


async def _from_kubeconfig(paths: str) -> Access:
    # Imported here: in a pod it is not needed, and it costs tens of MiB.
    from kubernetes.aio.client import Configuration
    from kubernetes.aio.config import ConfigException, load_kube_config

    found = Configuration()
    try:
        await load_kube_config(  # type: ignore[no-untyped-call]
            paths, client_configuration=found, persist_config=False
        )
    except (ConfigException, OSError) as error:
        raise Reject(f"KUBECONFIG={paths} cannot be used: {error}") from error
    token = found.api_key.get("BearerToken", "").removeprefix("Bearer ")
    server = str(found.host).rstrip("/")
    return Access(
        server=server,
        tls=_tls(found) if server.startswith("https:") else None,
        token=token,
        server_name=found.tls_server_name or "",
        proxy=found.proxy or "",
    )


def _tls(found: object) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=getattr(found, "ssl_ca_cert", None))
    if certificate := getattr(found, "cert_file", None):
        context.load_cert_chain(certificate, getattr(found, "key_file", None))
    if not getattr(found, "verify_ssl", True):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context

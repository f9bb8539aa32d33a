"""The ground's certificate authority, its certificates and kubeconfigs.

P-256 keys, because RSA keys cost seconds. Every extension is written out, so the host's
openssl.cnf has no say and strict verifiers (Python 3.13) are content.
"""

from __future__ import annotations

import base64
import json
import uuid
from dataclasses import dataclass
from pathlib import Path

from tidegate_ground import commands

DAYS = 365
KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
AUTHORITY_EXTENSIONS = (
    "basicConstraints=critical,CA:TRUE",
    "keyUsage=critical,keyCertSign,cRLSign",
    "subjectKeyIdentifier=hash",
)
CERTIFICATE_EXTENSIONS = (
    "basicConstraints=critical,CA:FALSE",
    "keyUsage=critical,digitalSignature",
    "extendedKeyUsage=serverAuth,clientAuth",
    "subjectKeyIdentifier=hash",
    "authorityKeyIdentifier=keyid",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Authority:
    """The certificate authority of one ground.

    Attributes:
        folder: where all its files are; `NAME.crt` and `NAME.key` belong together.
    """

    folder: Path

    @property
    def certificate(self) -> Path:
        """The authority's own certificate."""
        return self.folder / "ca.crt"

    def found(self) -> None:
        """Makes the authority and the key pair that signs service account tokens."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._request("ca", "/CN=ground", AUTHORITY_EXTENSIONS)
        key, public = self.folder / "sa.key", self.folder / "sa.pub"
        curve = ("-name", "prime256v1")
        commands.run("openssl", "ecparam", *curve, "-genkey", "-noout", "-out", key)
        commands.run("openssl", "ec", "-in", key, "-pubout", "-out", public)

    def issue(self, name: str, subject: str, alternative_names: str = "") -> None:
        """Makes `NAME.crt` and `NAME.key`, good for servers and clients.

        Args:
            name: the files' name.
            subject: `/O=group/CN=user`, as Kubernetes reads it.
            alternative_names: `DNS:…,IP:…` of a server.
        """
        extensions: tuple[str, ...] = CERTIFICATE_EXTENSIONS
        if alternative_names:
            extensions = (*extensions, f"subjectAltName={alternative_names}")
        serial = str(uuid.uuid4().int >> 1)
        signer = ("-CA", self.certificate, "-CAkey", self.folder / "ca.key", "-set_serial", serial)
        self._request(name, subject, extensions, *signer)

    def _request(
        self, name: str, subject: str, extensions: tuple[str, ...], *signer: str | Path
    ) -> None:
        settings = self.folder / f"{name}.cnf"
        lines = ("[req]", "distinguished_name=name", "x509_extensions=extensions", "[name]")
        settings.write_text("\n".join((*lines, "[extensions]", *extensions, "")))
        out = ("-keyout", self.folder / f"{name}.key", "-out", self.folder / f"{name}.crt")
        about = ("-subj", subject, "-days", DAYS, "-config", settings)
        commands.run("openssl", "req", "-x509", *KEY, *about, *signer, *out)
        settings.unlink()

    def write_kubeconfig(self, file: Path, name: str, server: str) -> None:
        """Writes a kubeconfig that holds the certificate `name` itself, not its path."""
        user = {
            "client-certificate-data": self._encoded(f"{name}.crt"),
            "client-key-data": self._encoded(f"{name}.key"),
        }
        cluster = {"server": server, "certificate-authority-data": self._encoded("ca.crt")}
        kubeconfig = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "ground",
            "clusters": [{"name": "ground", "cluster": cluster}],
            "users": [{"name": name, "user": user}],
            "contexts": [{"name": "ground", "context": {"cluster": "ground", "user": name}}],
        }
        file.touch(mode=0o600)
        file.write_text(json.dumps(kubeconfig, indent=1))

    def _encoded(self, file: str) -> str:
        return base64.b64encode((self.folder / file).read_bytes()).decode()

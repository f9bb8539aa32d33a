"""Any cluster that a kubeconfig reaches, whoever made it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from tidegate_ground import commands, sets
from tidegate_ground.errors import GroundError
from tidegate_ground.sets import Toolbox

CLIENT_SETS = ("kubernetes", "helm")


def find_client(name: str, programs: Toolbox) -> Path:
    """Returns kubectl or helm: the ground's own, else what PATH has.

    Raises:
        GroundError: there is neither.
    """
    for folder in programs.folders:
        if (folder / name).exists():
            return folder / name
    found = shutil.which(name)
    if found is None:
        raise GroundError(
            f"There is no {name}: install it, or build it with `python -m tidegate_ground prepare`."
        )
    return Path(found)


class Cluster:
    """A cluster, through its kubeconfig.

    Attributes:
        kubeconfig: its file; good for every Kubernetes client on this host.
    """

    def __init__(
        self, kubeconfig: Path, programs: Toolbox | None = None, cache: Path | None = None
    ) -> None:
        """Names a cluster; contacts nothing.

        Args:
            kubeconfig: its file.
            programs: where kubectl and helm are looked for first; None: among the built sets.
            cache: where the two keep their files; None: where they do by themselves.
        """
        self.kubeconfig = kubeconfig
        self._clients = sets.toolbox(CLIENT_SETS) if programs is None else programs
        self._client_environment = {"KUBECONFIG": str(kubeconfig)}
        if cache is not None:
            self._client_environment["KUBECACHEDIR"] = str(cache / "kubectl")
            for part in ("CACHE", "CONFIG", "DATA"):
                self._client_environment[f"HELM_{part}_HOME"] = str(cache / "helm" / part.lower())

    def kubectl(
        self,
        *args: str | Path,
        input: str | None = None,  # noqa: A002  the name that subprocess.run gives it
        check: bool = True,
    ) -> CompletedProcess[str]:
        """Runs kubectl against the cluster and returns what it wrote.

        Args:
            args: its arguments.
            input: its standard input, for `-f -`.
            check: whether a non-zero exit code is an error.

        Raises:
            CommandFailed: `check` is set and the exit code is not zero.
        """
        return self._client("kubectl", args, input, check)

    def helm(
        self,
        *args: str | Path,
        input: str | None = None,  # noqa: A002  the name that subprocess.run gives it
        check: bool = True,
    ) -> CompletedProcess[str]:
        """Runs helm against the cluster; as `kubectl`."""
        return self._client("helm", args, input, check)

    def get(self, *args: str) -> Any:
        """Returns what `kubectl get ARGS -o json` prints, as Python values.

        Raises:
            CommandFailed: there is no such object, or the API server did not answer.
        """
        return json.loads(self.kubectl("get", *args, "-o", "json").stdout)

    def _client(
        self, name: str, args: tuple[str | Path, ...], stdin: str | None, check: bool
    ) -> CompletedProcess[str]:
        program = find_client(name, self._clients)
        environment = self._client_environment
        return commands.run(program, *args, stdin=stdin, check=check, env=environment)

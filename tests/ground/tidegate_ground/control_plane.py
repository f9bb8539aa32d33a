"""The control plane of a ground: its processes in a network namespace of their own."""

from __future__ import annotations

import json
import os
import ssl
import sys
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from typing import Any

from tidegate_ground import cgroups, components, network, processes
from tidegate_ground.components import API_SERVER_URL, Component
from tidegate_ground.errors import GroundError
from tidegate_ground.paths import GroundPaths
from tidegate_ground.pki import Authority
from tidegate_ground.processes import PidRecord
from tidegate_ground.sets import Toolbox
from tidegate_ground.waiting import wait_until

FORWARD = "forward"
LEASE_HOLDERS = (Component.CONTROLLER_MANAGER, Component.SCHEDULER)
READY_SECONDS = 90
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def python_environment(programs: Toolbox) -> dict[str, str]:
    """Returns the whole environment of the ground's own processes.

    Nothing of the caller's is in it: proxy settings, for one, would reach the API server.
    """
    return {
        "PATH": f"{programs.search_path}:{SYSTEM_PATH}",
        "HOME": os.environ.get("HOME", "/root"),
        "PYTHONPATH": str(Path(__file__).resolve().parent.parent),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
    }


class ControlPlane:
    """etcd, API server, controller-manager, scheduler and DNS of one ground."""

    def __init__(self, paths: GroundPaths, programs: Toolbox) -> None:
        """Names the control plane of a ground; starts nothing."""
        self._paths = paths
        self._programs = programs
        self._authority = Authority(folder=paths.pki)

    @property
    def network(self) -> PidRecord:
        """The process that keeps the control plane's network namespace.

        Raises:
            GroundError: there is none, so the ground is not up.
        """
        record = processes.load(self._record(FORWARD))
        if record is None or not processes.is_alive(record):
            raise GroundError(f"The ground {self._paths.name} is not up.")
        return record

    def start(self) -> None:
        """Starts every component that is not running and waits until the API server is ready.

        When the API server was away, controller-manager and scheduler are started anew, as those
        of a real cluster are when they lose their leader lease: with the view they had before it
        went away they would take the nodes for lost, for half a minute.

        Raises:
            DeadlineExceeded: it did not become ready; its log is in the ground's `logs` folder.
        """
        if not self.is_running(Component.API_SERVER):
            self.stop(*LEASE_HOLDERS)
        for component in (Component.ETCD, Component.API_SERVER):
            self._start(component)
        wait_until("the API server's /readyz", self.is_ready, READY_SECONDS)
        for component in (Component.CONTROLLER_MANAGER, Component.SCHEDULER, Component.DNS):
            self._start(component)

    def stop(self, *names: str) -> None:
        """Ends components with SIGKILL, as their crash would.

        Args:
            names: which (`"kube-apiserver"`); none means all of them but etcd.

        Raises:
            ValueError: a name that no component has.
        """
        chosen = [Component(name) for name in names] or [c for c in Component if c != "etcd"]
        for component in chosen:
            record = processes.load(self._record(component))
            if record:
                processes.end(record)

    def is_running(self, name: str) -> bool:
        """Says whether the process of a component is there."""
        record = processes.load(self._record(name))
        return record is not None and processes.is_alive(record)

    def is_ready(self) -> bool:
        """Says whether the API server says that it is ready."""
        return self.read("/readyz") == b"ok"

    def read(self, path: str) -> bytes | None:
        """Returns what the API server answers to a GET, None when it answers nothing or an error.

        For waiting: it starts no program and takes no longer than 5 s.
        """
        url = f"https://127.0.0.1:{self._paths.port.read_text()}{path}"
        try:
            with urllib.request.urlopen(url, timeout=5, context=self._tls()) as answer:
                body: bytes = answer.read()
                return body
        except (OSError, HTTPException):
            return None

    def read_json(self, path: str) -> Any:
        """Returns the document at a path of the API server, None as `read` does."""
        body = self.read(path)
        return None if body is None else json.loads(body)

    def prepare(self) -> None:
        """Makes what the components need: certificates, settings, the network namespace."""
        paths = self._paths
        self._authority.found()
        with ThreadPoolExecutor() as pool:
            done = [pool.submit(self._admit, user) for user in components.SUBJECTS]
            server = ("apiserver", "/CN=kube-apiserver", components.API_SERVER_NAMES)
            done.append(pool.submit(self._authority.issue, *server))
        for result in done:
            result.result()
        components.corefile_path(paths).write_text(components.build_corefile(paths))
        forward: list[str | Path] = [sys.executable, "-m", "tidegate_ground.forward", paths.port]
        record = self._spawn(FORWARD, forward)
        wait_until("the port to the API server", paths.port.exists, 20)
        network.set_up_control(record)
        server_url = f"https://127.0.0.1:{paths.port.read_text()}"
        self._authority.write_kubeconfig(paths.kubeconfig, "admin", server_url)

    def admit_node(self, node: str, address: str) -> None:
        """Issues a node's certificate, for both its kubelet's sides, and its kubeconfig."""
        names = f"DNS:{node},IP:{address}"
        self._authority.issue(node, f"/O=system:nodes/CN=system:node:{node}", names)
        kubeconfig = components.kubeconfig_path(self._paths, node)
        self._authority.write_kubeconfig(kubeconfig, node, API_SERVER_URL)

    def _admit(self, user: str) -> None:
        self._authority.issue(user, components.SUBJECTS[user])
        kubeconfig = components.kubeconfig_path(self._paths, user)
        self._authority.write_kubeconfig(kubeconfig, user, API_SERVER_URL)

    def _start(self, component: Component) -> None:
        if self.is_running(component):
            return
        arguments = components.build_arguments(component, self._paths)
        enter = network.enter_network(self.network)
        program = str(self._programs.program(component))
        self._spawn(component, [*enter, program, *arguments])

    def _spawn(self, label: str, argv: Sequence[str | Path]) -> PidRecord:
        group = f"{self._paths.cgroup}/control"
        cgroups.make(group)
        record = processes.spawn(
            argv,
            log=self._paths.logs / f"{label}.log",
            groups=cgroups.join_files(group),
            env=python_environment(self._programs),
        )
        processes.save(record, self._record(label))
        return record

    def _record(self, label: str) -> Path:
        return self._paths.processes / f"{label}.json"

    def _tls(self) -> ssl.SSLContext:
        pki = self._paths.pki
        context = ssl.create_default_context(cafile=str(self._authority.certificate))
        context.load_cert_chain(pki / "admin.crt", pki / "admin.key")
        return context

"""Tidegate installed on the session's ground by its chart."""

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tidegate_demo import stage
from tidegate_demo.stage import JobPlan
from tidegate_demo.walk import Walk
from tidegate_ground import artifacts
from tidegate_ground.ground import Ground


@pytest.fixture(scope="session")
def pfs(ground: Ground) -> Path:
    """The host's path of the remote tier's root."""
    return stage.make_pfs_folder(ground)


@pytest.fixture(scope="session")
def installed(ground: Ground, pfs: Path) -> Ground:
    """The ground with the chart installed and ready."""
    stage.install_chart(ground)
    return ground


@pytest.fixture(scope="module")
def new_walk(
    request: pytest.FixtureRequest, installed: Ground
) -> Iterator[Callable[[JobPlan], Walk]]:
    """Makes a namespace of its own for each walk; logs and objects are kept when a test failed."""
    made: list[Walk] = []

    def build(plan: JobPlan) -> Walk:
        namespace = f"walk-{uuid.uuid4().hex[:8]}"
        installed.kubectl("create", "namespace", namespace)
        made.append(Walk(ground=installed, namespace=namespace, plan=plan))
        return made[-1]

    before = request.session.testsfailed
    yield build
    namespaces = [walk.namespace for walk in made]
    if request.session.testsfailed > before:
        folder = artifacts.artifact_folder(request.config.rootpath, request.node.nodeid)
        artifacts.collect(installed, [*namespaces, artifacts.SYSTEM_NAMESPACE], folder)
    for namespace in namespaces:
        # A Job whose namespace goes first keeps its pods: it waits for replacements it cannot make.
        installed.kubectl("delete", "jobs", "--all", "-n", namespace, "--wait=false", check=False)
        now = ("--grace-period=1", "--wait=false")
        installed.kubectl("delete", "pods", "--all", "-n", namespace, *now, check=False)
        installed.kubectl("delete", "namespace", namespace, "--wait=false", check=False)

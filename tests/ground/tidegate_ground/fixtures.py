"""What tests ask for: a cluster, a ground whose nodes they may hurt, a namespace of their own.

A pytest plugin, registered by tests/conftest.py. Tests that use it are marked `ground`.
"""

from __future__ import annotations

import logging
import os
import re
import uuid
from collections.abc import Generator, Iterator

import pytest

from tidegate_ground import artifacts, choose, paths, processes, sets
from tidegate_ground.choose import GivenCluster, OwnGround, RunningGround
from tidegate_ground.cluster import Cluster
from tidegate_ground.ground import Ground
from tidegate_ground.options import GroundOptions
from tidegate_ground.waiting import wait_until

LOG = logging.getLogger(__name__)
REPORTS = pytest.StashKey[list[pytest.TestReport]]()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keeps each phase's report with the test, so that `namespace` knows whether it failed."""
    report = yield
    item.stash.setdefault(REPORTS, []).append(report)
    return report


@pytest.fixture(scope="session")
def ground_options() -> GroundOptions:
    """What the tests' own ground is to be; a conftest.py may give another one.

    The default: three nodes with the base image, a Debian with Python.
    """
    return GroundOptions(images=(sets.image_archive("base"),))


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """The cluster of this session: one given by hand, a ground that is up, or a ground of its own.

    `choose` says which. A ground of its own is taken down at the end; should this process be
    killed, the next ground that comes up removes it.
    """
    match choose.decide_cluster(os.environ, paths.grounds_root()):
        case GivenCluster(kubeconfig=kubeconfig):
            yield Cluster(kubeconfig)
        case RunningGround(name=name):
            yield Ground.open(name)
        case OwnGround():
            me = processes.require(os.getpid())
            options: GroundOptions = request.getfixturevalue("ground_options")
            ground = Ground.up(f"test-{me.pid}", options, owner=me, report=LOG.info)
            yield ground
            ground.down()


@pytest.fixture(scope="session")
def ground(cluster: Cluster) -> Ground:
    """The session's ground, for tests that stop its nodes or its control plane.

    A test leaves it as it found it: every node Ready, every component running. With a cluster
    given by hand such tests are skipped.
    """
    if not isinstance(cluster, Ground):
        pytest.skip(
            f"needs the built ground, to stop its nodes; the cluster of {cluster.kubeconfig} was "
            f"given by hand"
        )
    return cluster


@pytest.fixture
def namespace(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[str]:
    """A namespace of the test's own; its deletion is not waited for.

    When the test fails, `.artifacts/TEST/` gets logs, events and objects of the namespace and of
    the system's.
    """
    words = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower()).strip("-")
    name = f"{words[:40].rstrip('-')}-{uuid.uuid4().hex[:8]}"
    cluster.kubectl("create", "namespace", name)
    # A pod that is made before this account is refused.
    account = ("get", "serviceaccount", "default", "--namespace", name)
    wait_until(f"the service account of {name}", lambda: cluster.kubectl(*account).stdout, 30)
    yield name
    if any(report.failed for report in request.node.stash.get(REPORTS, [])):
        folder = artifacts.artifact_folder(request.config.rootpath, request.node.nodeid)
        system = cluster.kubectl("get", "namespace", artifacts.SYSTEM_NAMESPACE, check=False)
        also = [artifacts.SYSTEM_NAMESPACE] if system.returncode == 0 else []
        artifacts.collect(cluster, [name, *also], folder)
    cluster.kubectl("delete", "namespace", name, "--wait=false", check=False)

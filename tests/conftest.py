"""What all tests share: the ground's fixtures, and the long counts that run on demand only."""

import json
import os
import platform
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tidegate_demo import stage
from tidegate_ground.options import GroundOptions

# Registered here because pytest takes plugins from the topmost conftest.py only: the fixtures
# `cluster`, `ground` and `namespace` of tests that need a Kubernetes cluster.
pytest_plugins = ["tidegate_ground.fixtures"]

# No test asserts a time: a busy machine is no failure.
settings.register_profile("tidegate", deadline=None)
settings.load_profile("tidegate")

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves tests marked `soak` out unless they were asked for."""
    if "soak" in config.option.markexpr:
        return
    soaks = [item for item in items if item.get_closest_marker("soak")]
    if soaks:
        config.hook.pytest_deselected(items=soaks)
        items[:] = [item for item in items if item not in soaks]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints what tests counted, also where workers hide their output."""
    passed = terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
    counts = [
        f"{report.nodeid.rpartition('/')[2]}: {value}"
        for report in passed
        for name, value in report.user_properties
        if name == "counts"
    ]
    if counts:
        terminalreporter.section("counts")
        for line in sorted(counts):
            terminalreporter.write_line(line)


@pytest.fixture
def write_result(request: pytest.FixtureRequest) -> Callable[[dict[str, Any]], None]:
    """Writes what a soak counted, with date and machine, to be committed."""

    def write(counts: dict[str, Any]) -> None:
        now = datetime.now(UTC)
        machine = {
            "cores": os.cpu_count(),
            "kernel": platform.release(),
            "python": platform.python_version(),
            "load": round(os.getloadavg()[0], 1),
        }
        name = request.node.name.removeprefix("test_").replace("_", "-")
        RESULTS.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"at": now.isoformat(timespec="seconds"), **counts, "machine": machine})
        (RESULTS / f"{now:%Y-%m-%d}-{name}.json").write_text(text + "\n")

    return write


@pytest.fixture(scope="session")
def ground_options() -> GroundOptions:
    """The tests' own ground has Tidegate's images, torch and these sources."""
    return stage.ground_options()

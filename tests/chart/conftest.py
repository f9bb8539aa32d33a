"""Rendering the chart by the helm that the ground has built, or the one on PATH."""

import json
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tidegate_ground import sets
from tidegate_ground.cluster import find_client
from tidegate_ground.errors import GroundError

CHART = Path(__file__).parents[2] / "charts" / "tidegate"
NAMESPACE = "tidegate-system"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """What `helm template` wrote, or why it refused."""

    text: str
    error: str

    @property
    def objects(self) -> list[dict[str, Any]]:
        assert not self.error, self.error
        return [found for found in yaml.load_all(self.text, Loader=LOADER) if found]

    def of_kind(self, kind: str) -> dict[str, dict[str, Any]]:
        return {o["metadata"]["name"]: o for o in self.objects if o["kind"] == kind}

    @property
    def config(self) -> dict[str, Any]:
        parsed = json.loads(self.of_kind("ConfigMap")["tidegate-config"]["data"]["config.json"])
        assert isinstance(parsed, dict)
        return parsed


Render = Callable[..., Rendered]


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Rendered]:
    """Calls helm; a command and its input are run once a session unless `again`."""
    try:
        program = find_client("helm", sets.toolbox(("helm",)))
    except GroundError as error:
        pytest.skip(str(error))
    home = tmp_path_factory.mktemp("helm")
    env = {f"HELM_{kind}_HOME": str(home / kind.lower()) for kind in ("CACHE", "CONFIG", "DATA")}
    seen: dict[tuple[str, ...], Rendered] = {}

    def call(*arguments: str, values: Mapping[str, Any], again: bool = False) -> Rendered:
        key = (*arguments, json.dumps(values))
        if again or key not in seen:
            done = subprocess.run(
                [program, *arguments, "--values", "-"],
                input=json.dumps(values),
                capture_output=True,
                text=True,
                check=False,
                env=env,
            )
            error = (done.stderr or done.stdout or "refused") if done.returncode else ""
            seen[key] = Rendered(text=done.stdout, error=error)
        return seen[key]

    return call


@pytest.fixture(scope="session")
def render(helm: Callable[..., Rendered]) -> Render:
    """Renders the chart with values laid over the defaults."""

    def call(again: bool = False, namespace: str = NAMESPACE, **values: Any) -> Rendered:
        command = ("template", "tidegate", str(CHART), "--namespace", namespace)
        return helm(*command, values=values, again=again)

    return call


@pytest.fixture(scope="session")
def defaults(render: Render) -> Rendered:
    """The chart as it is installed by one line."""
    return render()


@pytest.fixture(scope="session")
def lint(helm: Callable[..., Rendered]) -> Rendered:
    """What `helm lint` says about the chart."""
    return helm("lint", "--strict", str(CHART), values={})

"""Which cluster the tests use: one given by hand, a ground that is up, or one of their own. Pure.

In this order: TIDEGATE_KUBECONFIG; TIDEGATE_GROUND, the name of a ground that is up; KUBECONFIG;
else a ground of their own. A kubeconfig that belongs to a ground means that ground, with its nodes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tidegate_ground.errors import GroundError

KUBECONFIG_VARIABLE = "TIDEGATE_KUBECONFIG"
GROUND_VARIABLE = "TIDEGATE_GROUND"


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenCluster:
    """A cluster given by hand: used as it is.

    Attributes:
        kubeconfig: its file.
        variable: the environment variable that named it.
    """

    kubeconfig: Path
    variable: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningGround:
    """A ground that is up, and stays up.

    Attributes:
        name: its name.
    """

    name: str


@dataclass(frozen=True, slots=True)
class OwnGround:
    """A ground of one's own, to be brought up and taken down."""


Choice = GivenCluster | RunningGround | OwnGround


def decide_cluster(environment: Mapping[str, str], grounds_root: Path) -> Choice:
    """Returns which cluster to use.

    Raises:
        GroundError: TIDEGATE_KUBECONFIG names no file, or KUBECONFIG several.
    """
    if named := environment.get(KUBECONFIG_VARIABLE):
        if not Path(named).is_file():
            raise GroundError(f"{KUBECONFIG_VARIABLE} names {named}, which is not a file.")
        return _given(Path(named), KUBECONFIG_VARIABLE, grounds_root)
    if name := environment.get(GROUND_VARIABLE):
        return RunningGround(name=name)
    files = [Path(f) for f in environment.get("KUBECONFIG", "").split(os.pathsep) if f]
    if len(files) > 1:
        raise GroundError(
            f"KUBECONFIG names {len(files)} files; name the one to use in {KUBECONFIG_VARIABLE}."
        )
    if files and files[0].is_file():
        return _given(files[0], "KUBECONFIG", grounds_root)
    return OwnGround()


def _given(kubeconfig: Path, variable: str, grounds_root: Path) -> Choice:
    absolute = kubeconfig.absolute()
    if absolute.parent.parent == grounds_root:
        return RunningGround(name=absolute.parent.name)
    return GivenCluster(kubeconfig=absolute, variable=variable)

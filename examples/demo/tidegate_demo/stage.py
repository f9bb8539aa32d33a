"""Sets the scene: what the ground needs, the chart's installation, the training job's manifests."""

import os
import subprocess
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tidegate_contract import keys
from tidegate_ground import sets
from tidegate_ground.cluster import CLIENT_SETS, Cluster, find_client
from tidegate_ground.errors import GroundError
from tidegate_ground.ground import Ground
from tidegate_ground.options import GroundOptions, Mount

ROOT = Path(__file__).resolve().parents[3]
IMAGES = ROOT / "build" / "images"
SYSTEM = "tidegate-system"
TIER_GID = 64738
LOCAL_PATH = "/mnt/nvme/tidegate"
REMOTE_PATH = "/mnt/pfs/tidegate"
TORCH_MOUNT = "/mnt/torch"
SOURCE_MOUNT = "/mnt/tidegate"
VALUES: dict[str, Any] = {
    "tiers": {
        "local": [{"name": "nvme", "path": LOCAL_PATH}],
        "remote": [{"name": "pfs", "hostPath": REMOTE_PATH}],
    },
}


def ground_options() -> GroundOptions:
    """A ground with Tidegate's images, and this environment's torch and sources at /mnt.

    Raises:
        GroundError: the images are not built.
    """
    images = tuple(IMAGES / f"{name}.tar" for name in ("operator", "sidecar"))
    if not all(image.exists() for image in images):
        raise GroundError(f"There are no images in {IMAGES}; `make images` builds them.")
    site = Path(sysconfig.get_paths()["purelib"])
    return GroundOptions(
        images=(sets.image_archive("base"), *images),
        mounts=(
            Mount(source=site, target=TORCH_MOUNT),
            Mount(source=ROOT, target=SOURCE_MOUNT),
        ),
    )


def make_pfs_folder(ground: Ground) -> Path:
    """The admin's share of the PFS: owned by root, writable by the tier's group."""
    folder = ground.pfs / Path(REMOTE_PATH).name
    folder.mkdir(exist_ok=True)
    os.chown(folder, 0, TIER_GID)
    folder.chmod(0o2770)
    return folder


def install_chart(cluster: Cluster, values: dict[str, Any] | None = None) -> None:
    """Installs or upgrades the chart and waits until it is ready.

    Raises:
        CommandFailed: helm says why.
    """
    cluster.helm(
        "upgrade",
        "--install",
        "tidegate",
        ROOT / "charts" / "tidegate",
        "--namespace",
        SYSTEM,
        "--create-namespace",
        "--wait",
        "--timeout",
        "120s",
        "--values",
        "-",
        input=yaml.safe_dump(VALUES | (values or {})),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """How the byte language model is run.

    Attributes:
        name: of Job, Service and run.
        steps: optimizer steps.
        is_saved: False trains without Tidegate, for comparison.
    """

    name: str = "bytelm"
    steps: int = 600
    is_saved: bool = True


def build_job(plan: JobPlan) -> str:
    """The manifests of `examples/bytelm/job.yaml`, with torch and sources from the node's /mnt."""
    text = (ROOT / "examples" / "bytelm" / "job.yaml").read_text().replace("bytelm", plan.name)
    service, job = yaml.safe_load_all(text)
    template = job["spec"]["template"]
    if not plan.is_saved:
        del template["metadata"]["labels"][keys.POLICY_LABEL]
    pod = template["spec"]
    trainer = pod["containers"][0]
    trainer["image"] = "localhost/base:1"
    trainer["imagePullPolicy"] = "Never"
    saving = "--save" if plan.is_saved else "--no-save"
    script = f"{SOURCE_MOUNT}/examples/bytelm/train.py"
    trainer["command"] = ["python3", "-u", script, "--steps", str(plan.steps), saving]
    sources = [TORCH_MOUNT, *(f"{SOURCE_MOUNT}/{part}" for part in ("contract", "trainer"))]
    trainer["env"] += [
        {"name": "PYTHONPATH", "value": ":".join(sources)},
        {"name": "PYTHONDONTWRITEBYTECODE", "value": "1"},
    ]
    mounts = {"torch": TORCH_MOUNT, "source": SOURCE_MOUNT}
    trainer["volumeMounts"] = [
        {"name": name, "mountPath": path, "readOnly": True} for name, path in mounts.items()
    ]
    pod["volumes"] = [
        {"name": name, "hostPath": {"path": path, "type": "Directory"}}
        for name, path in mounts.items()
    ]
    return yaml.safe_dump_all([service, job])


def policy_manifest(changes: dict[str, Any] | None = None) -> str:
    """`examples/bytelm/policy.yaml`, with parts of its spec replaced."""
    policy = yaml.safe_load((ROOT / "examples" / "bytelm" / "policy.yaml").read_text())
    policy["spec"] |= changes or {}
    return yaml.safe_dump(policy)


def start_job(
    cluster: Cluster, namespace: str, plan: JobPlan, policy: dict[str, Any] | None = None
) -> None:
    """Applies the policy (for a saved job) and the job in a namespace."""
    if plan.is_saved:
        cluster.kubectl("apply", "-n", namespace, "-f", "-", input=policy_manifest(policy))
    cluster.kubectl("apply", "-n", namespace, "-f", "-", input=build_job(plan))


@contextmanager
def draining(
    cluster: Cluster, node: str, log: Path, timeout_seconds: int
) -> Iterator[subprocess.Popen[bytes]]:
    """Drains a node in the background as an administrator does; ended with the body at the latest.

    Args:
        cluster: where.
        node: its name.
        log: gets what kubectl prints.
        timeout_seconds: kubectl gives up after it.
    """
    kubectl = find_client("kubectl", sets.toolbox(CLIENT_SETS))
    words = ("drain", node, "--ignore-daemonsets", "--delete-emptydir-data")
    where = ("--kubeconfig", str(cluster.kubeconfig), f"--timeout={timeout_seconds}s")
    command = [str(kubectl), *words, *where]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()

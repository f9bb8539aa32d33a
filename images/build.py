"""Builds the images of operator and sidecar as docker-archives; the program behind `make images`.

It calls whichever of docker, podman and buildah answers. An image is built again only when
something that goes into it changed: a key over all of it lies beside the archive.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tidegate_contract import __version__

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ("operator", "sidecar")
BUILDERS = ("docker", "podman", "buildah")
# What the host trusts, the installer inside a build must trust too where the package index is
# behind a private authority. It is mounted for the build alone, so nothing of it stays.
TRUST_STORE = Path("/etc/ssl/certs/ca-certificates.crt")


class BuildError(Exception):
    """The images cannot be built; the text says what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The image the others stand on.

    Attributes:
        reference: its name, in a registry or in the builder's own store.
        identity: what changes when its content does: the digest of an archive's configuration, or
            the reference itself, which is exact only when it names a digest.
        archive: the docker-archive to load it from; None leaves it to the builder to find it.
    """

    reference: str
    identity: str
    archive: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One image to be had.

    Attributes:
        name: `operator` or `sidecar`.
        tag: the image's tag.
        base: what it stands on.
        archive: where the docker-archive goes.
    """

    name: str
    tag: str
    base: Base
    archive: Path

    @property
    def reference(self) -> str:
        """The full name, as a kubelet completes the one in the chart."""
        return f"docker.io/tidegate/{self.name}:{self.tag}"

    @property
    def dockerfile(self) -> Path:
        """The image's Dockerfile."""
        return ROOT / self.name / "Dockerfile"

    @property
    def record(self) -> Path:
        """The file beside the archive that says what it was built from."""
        return self.archive.with_suffix(".json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """What is known of a finished archive.

    Attributes:
        key: the key of everything that went into it.
        size_bytes: all layers, unpacked from any compression.
        own_bytes: the layers above the base's.
    """

    key: str
    size_bytes: int
    own_bytes: int


def observe_base(given: str | None, dockerfile: Path) -> Base:
    """Returns the base that was asked for, else the default of the Dockerfile.

    Raises:
        BuildError: there is none, or the archive is not readable.
    """
    if given and given.endswith(".tar"):
        path = Path(given).resolve()
        manifest, config = read_archive(path)
        tags = manifest["RepoTags"] or []
        if not tags:
            raise BuildError(f"--base: {path} holds an image without a name; save it with one.")
        return Base(reference=tags[0], identity=hashlib.sha256(config).hexdigest(), archive=path)
    default = re.search(r"^ARG BASE=(\S+)", dockerfile.read_text(), re.MULTILINE)
    reference = given or (default[1] if default else None)
    if reference is None:
        raise BuildError(f"{dockerfile} has no default for ARG BASE; give --base IMAGE.")
    return Base(reference=reference, identity=reference)


def read_archive(path: Path) -> tuple[dict[str, Any], bytes]:
    """Returns the manifest's entry and the configuration of a docker-archive of one image.

    Raises:
        BuildError: it is none.
    """
    try:
        with tarfile.open(path) as tar:
            (manifest,) = json.loads(_member(tar, "manifest.json"))
            return manifest, _member(tar, manifest["Config"])
    except (OSError, tarfile.TarError, KeyError, ValueError) as error:
        raise BuildError(f"{path} is not a docker-archive of one image: {error}.") from error


def _member(tar: tarfile.TarFile, name: str) -> bytes:
    file = tar.extractfile(name)
    if file is None:
        raise KeyError(name)
    with file:
        return file.read()


def observe_key(recipe: Recipe) -> str:
    """Returns the digest of all that goes into an image, this program included."""
    folders = [ROOT / "contract" / "tidegate_contract", ROOT / recipe.name]
    files = [Path(__file__), ROOT / ".dockerignore", ROOT / "requirements" / f"{recipe.name}.txt"]
    for folder in folders:
        files += [f for f in folder.rglob("*") if f.is_file() and "__pycache__" not in f.parts]
    digest = hashlib.sha256(f"{recipe.reference} {recipe.base.identity}".encode())
    for file in sorted(files):
        content = file.read_bytes()
        digest.update(f"\0{file.relative_to(ROOT)}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def observe_built(recipe: Recipe) -> Built | None:
    """Returns the record of the archive, None when there is none or it cannot be read."""
    try:
        return Built(**json.loads(recipe.record.read_text())) if recipe.archive.exists() else None
    except (OSError, ValueError, TypeError):
        return None


def find_builder() -> str:
    """Returns the first builder that answers.

    Raises:
        BuildError: none does.
    """
    reasons = []
    for builder in BUILDERS:
        if shutil.which(builder) is None:
            reasons.append(f"{builder} is not installed")
        elif subprocess.run([builder, "info"], capture_output=True, check=False).returncode:
            reasons.append(f"{builder} does not answer")
        else:
            return builder
    raise BuildError(
        f"No image builder: {', '.join(reasons)}; start Docker, or install podman or buildah."
    )


def build_commands(builder: str, recipe: Recipe, target: Path) -> list[list[str]]:
    """Returns the commands that make an image and write it to `target`, in their order."""
    base, load, build = recipe.base, [], [builder, "build", "--quiet"]
    if base.archive:
        load = {
            "docker": ["docker", "load", "--quiet", "--input", str(base.archive)],
            "podman": ["podman", "load", "--quiet", "--input", str(base.archive)],
            "buildah": ["buildah", "pull", "--quiet", f"docker-archive:{base.archive}"],
        }[builder]
    if builder != "docker":
        build += ["--layers", "--pull=never" if base.archive else "--pull=missing"]
        if TRUST_STORE.exists():
            build += ["--volume", f"{TRUST_STORE}:{TRUST_STORE}:ro"]
    build += ["--build-arg", f"BASE={base.reference}", "--tag", recipe.reference]
    build += ["--file", str(recipe.dockerfile), str(ROOT)]
    name = recipe.reference
    save = {
        "docker": ["docker", "save", "--output", str(target), name],
        "podman": ["podman", "save", "--quiet", "--format=docker-archive", "-o", str(target), name],
        "buildah": ["buildah", "push", "--quiet", name, f"docker-archive:{target}:{name}"],
    }[builder]
    return [command for command in (load, build, save) if command]


def apply_command(command: Sequence[str]) -> str:
    """Runs a builder and returns its standard output.

    Raises:
        BuildError: it failed; the text holds the end of what it wrote.
    """
    # Without it buildah wants a runtime and namespaces that a container may not have.
    environment = {**os.environ, "BUILDAH_ISOLATION": "chroot", "DOCKER_BUILDKIT": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        end = "\n".join((done.stdout + done.stderr).strip().splitlines()[-20:])
        raise BuildError(f"`{' '.join(command)}` ended with {done.returncode}:\n{end}")
    return done.stdout


def observe_base_layers(builder: str, base: Base) -> int:
    """Returns how many layers the base has in the builder's store."""
    if builder == "buildah":
        described = apply_command([builder, "inspect", "--type", "image", base.reference])
        return len(json.loads(described)["OCIv1"]["rootfs"]["diff_ids"])
    described = apply_command([builder, "image", "inspect", base.reference])
    return len(json.loads(described)[0]["RootFS"]["Layers"])


def apply_build(builder: str, recipe: Recipe, key: str) -> Built:
    """Builds one image; its archive appears whole or not at all.

    Raises:
        BuildError: a builder failed.
    """
    partial = recipe.archive.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    for command in build_commands(builder, recipe, partial):
        apply_command(command)
    manifest, _ = read_archive(partial)
    with tarfile.open(partial) as tar:
        sizes = [tar.getmember(layer).size for layer in manifest["Layers"]]
    own_bytes = sum(sizes[observe_base_layers(builder, recipe.base) :])
    built = Built(key=key, size_bytes=sum(sizes), own_bytes=own_bytes)
    # The old record goes first: it must not vouch for the new archive.
    recipe.record.unlink(missing_ok=True)
    partial.replace(recipe.archive)
    recipe.record.write_text(json.dumps(asdict(built)))
    return built


def ensure_image(recipe: Recipe) -> str:
    """Builds an image if what goes into it changed and returns a line for people.

    Raises:
        BuildError: it is needed and cannot be built.
    """
    started = time.monotonic()
    key, built = observe_key(recipe), observe_built(recipe)
    if built and built.key == key:
        outcome = "unchanged"
    else:
        built = apply_build(find_builder(), recipe, key)
        outcome = f"built in {time.monotonic() - started:.1f} s"
    sizes = f"{built.size_bytes / 1e6:.0f} MB, {built.own_bytes / 1e6:.0f} MB above the base"
    return f"{recipe.reference}: {outcome}, {sizes}, {recipe.archive}"


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the command line's values; what is wrong ends the program with a sentence."""
    parser = argparse.ArgumentParser(description="Build Tidegate's images as docker-archives.")
    parser.add_argument("images", nargs="*", metavar="IMAGE", help="operator, sidecar (both)")
    parser.add_argument("--base", help="base image, or a docker-archive of one (*.tar)")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "images", help="folder")
    parser.add_argument("--tag", default=__version__, help="the images' tag (%(default)s)")
    values = parser.parse_args(arguments)
    unknown = sorted(set(values.images) - set(IMAGES))
    if unknown:
        parser.error(f"no image is called {unknown[0]}; there are {' and '.join(IMAGES)}")
    return values


def main(arguments: Sequence[str]) -> int:
    """Builds what was asked for and returns the exit code."""
    values = parse_arguments(arguments)
    values.out.mkdir(parents=True, exist_ok=True)
    try:
        for name in values.images or IMAGES:
            base = observe_base(values.base, ROOT / name / "Dockerfile")
            archive = values.out.resolve() / f"{name}.tar"
            recipe = Recipe(name=name, tag=values.tag, base=base, archive=archive)
            sys.stdout.write(f"{ensure_image(recipe)}\n")
            sys.stdout.flush()
    except BuildError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

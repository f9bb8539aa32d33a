"""What the ground is built from: the sets, their keys, and where the built ones lie.

A set is a folder below `tests/ground/sets`. Its key is the digest of its files and of the recipe
here, so a changed go.mod is another build and an unchanged one is never built again. Each set of
Go programs is a module of its own, because the versions they depend on do not agree.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path

from tidegate_ground import paths
from tidegate_ground.errors import GroundError
from tidegate_ground.options import GIB

SETS_FOLDER = Path(__file__).resolve().parent.parent / "sets"
DEBIAN_SUITE = "bookworm"


@dataclass(frozen=True, slots=True, kw_only=True)
class GoSet:
    """Programs of one Go module, built from the `tool` lines of its go.mod.

    Attributes:
        name: the folder's name.
        module: the module whose version the set has.
        stamps: variables the linker sets, with {version}, {bare}, {major} and {minor} filled in;
            without them the programs report no version.
        renames: built name to the name the program is known by.
        first_build: how long the first build takes on two cores, in words.
        build_bytes: room for the result and for Go's caches.
    """

    name: str
    module: str
    first_build: str
    build_bytes: int
    stamps: tuple[str, ...] = ()
    renames: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSet:
    """One image, built from the Containerfile in its folder.

    Attributes:
        name: the folder's name.
        image: the image's name in the nodes.
        first_build: how long the build takes on two cores, in words.
        build_bytes: room for the result and for what it is made of.
    """

    name: str
    image: str
    first_build: str
    build_bytes: int


KUBERNETES_STAMP = "k8s.io/component-base/version"
GO_SETS = (
    GoSet(
        name="containerd",
        module="github.com/containerd/containerd/v2",
        first_build="1 min",
        build_bytes=1 * GIB,
        stamps=("github.com/containerd/containerd/v2/version.Version={bare}",),
    ),
    GoSet(
        name="etcd",
        module="go.etcd.io/etcd/server/v3",
        first_build="20 s",
        build_bytes=GIB // 2,
        renames={"server": "etcd"},
    ),
    GoSet(
        name="coredns",
        module="github.com/coredns/coredns",
        first_build="2 min",
        build_bytes=2 * GIB,
    ),
    GoSet(
        name="kubernetes",
        module="k8s.io/kubernetes",
        first_build="5 min",
        build_bytes=4 * GIB,
        stamps=(
            f"{KUBERNETES_STAMP}.gitVersion={{version}}",
            f"{KUBERNETES_STAMP}.gitMajor={{major}}",
            f"{KUBERNETES_STAMP}.gitMinor={{minor}}",
        ),
    ),
    GoSet(name="helm", module="helm.sh/helm/v4", first_build="3 min", build_bytes=GIB),
)
IMAGE_SETS = (
    ImageSet(name="pause", image="localhost/pause:1", first_build="5 s", build_bytes=GIB // 16),
    ImageSet(name="base", image="localhost/base:1", first_build="1 min", build_bytes=GIB),
)
AnySet = GoSet | ImageSet
SETS: tuple[AnySet, ...] = (*GO_SETS, *IMAGE_SETS)


def parse_version(go_mod: str, module: str) -> str:
    """Returns the version, with its `v`, that a go.mod requires of a module.

    Raises:
        GroundError: the module is not required there.
    """
    found = re.search(rf"^\s*(?:require\s+)?{re.escape(module)}\s+(v\S+)", go_mod, re.MULTILINE)
    if not found:
        raise GroundError(f"go.mod does not require {module}; add a line with its version.")
    return found[1]


def build_linker_flags(go_set: GoSet, version: str) -> str:
    """Returns the value of `go build -ldflags`."""
    bare = version.removeprefix("v")
    major, minor, *_ = bare.split(".")
    values = {"version": version, "bare": bare, "major": major, "minor": minor}
    return " ".join(["-s", "-w", *[f"-X {stamp.format(**values)}" for stamp in go_set.stamps]])


def build_key(recipe: str, files: dict[str, bytes]) -> str:
    """Returns the key of a set: it changes with any file's name or content and the recipe."""
    digest = hashlib.sha256(recipe.encode())
    for name in sorted(files):
        digest.update(f"\0{name}\0{len(files[name])}\0".encode() + files[name])
    return digest.hexdigest()[:16]


def source_folder(any_set: AnySet) -> Path:
    """Returns the folder of the set's own files."""
    return SETS_FOLDER / any_set.name


def built_folder(any_set: AnySet) -> Path:
    """Returns where the built set lies, or will lie: the folder exists only when it is whole."""
    source = source_folder(any_set)
    files = {f.name: f.read_bytes() for f in source.iterdir() if f.is_file()}
    key = build_key(f"{any_set!r} {DEBIAN_SUITE}", files)
    return paths.builds_root() / f"{any_set.name}-{key}"


def missing_sets() -> list[AnySet]:
    """Returns the sets that are not built yet, in the order of building."""
    return [any_set for any_set in SETS if not built_folder(any_set).exists()]


def archive_path(built: Path, image_set: ImageSet) -> Path:
    """Returns the docker-archive in a built folder of an image set."""
    return built / "images" / f"{image_set.name}.tar"


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolbox:
    """The built programs, as folders to be searched in order.

    Attributes:
        folders: absolute paths of the `bin` folders.
    """

    folders: tuple[Path, ...]

    def program(self, name: str) -> Path:
        """Returns the absolute path of a built program.

        Raises:
            GroundError: it was not built.
        """
        for folder in self.folders:
            if (folder / name).exists():
                return folder / name
        raise GroundError(f"The ground has no program {name}.")

    @property
    def search_path(self) -> str:
        """The folders as the head of a PATH."""
        return ":".join(map(str, self.folders))


def require_built() -> None:
    """Raises a GroundError that names what is not built, if anything is not."""
    missing = [any_set.name for any_set in missing_sets()]
    if missing:
        raise GroundError(
            f"Not built yet: {', '.join(missing)}; run `python -m tidegate_ground prepare`."
        )


def toolbox(names: tuple[str, ...] | None = None) -> Toolbox:
    """Returns the programs of the named sets; None: of all."""
    chosen = [go_set for go_set in GO_SETS if names is None or go_set.name in names]
    return Toolbox(folders=tuple(built_folder(go_set) / "bin" for go_set in chosen))


def image_archive(name: str) -> Path:
    """Returns the docker-archive of the image set `pause` or `base`."""
    (image_set,) = [candidate for candidate in IMAGE_SETS if candidate.name == name]
    return archive_path(built_folder(image_set), image_set)

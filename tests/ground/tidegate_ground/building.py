"""Builds the sets, each once, with a lock against a second builder.

A set is built beside its final place and renamed there when it is whole, so a build that was
interrupted leaves nothing that looks like one that was not.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from tidegate_ground import commands, locks, paths, requirements, sets
from tidegate_ground.sets import AnySet, GoSet, ImageSet

Step = Callable[[str], AbstractContextManager[None]]
Report = Callable[[str], None]
GO_ENVIRONMENT = {"CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly", "GOWORK": "off"}
BUILDAH_ENVIRONMENT = {"BUILDAH_ISOLATION": "chroot"}


def build_missing(step: Step, report: Report) -> list[Path]:
    """Builds what is not built yet and returns the new folders.

    Waits when another process builds into the same cache.

    Args:
        step: opens the display of one piece of work; gets its description.
        report: gets a sentence when another builder is waited for.

    Raises:
        CommandFailed: a build failed; what was finished before it stays.
    """
    root = paths.builds_root()
    root.mkdir(parents=True, exist_ok=True)
    waiting = "Another process builds into the same cache; waiting for it."
    with locks.locked(root, lambda: report(waiting)):
        return [_build(any_set, step) for any_set in sets.missing_sets()]


def _build(any_set: AnySet, step: Step) -> Path:
    final = sets.built_folder(any_set)
    partial = final.with_name(f".partial-{any_set.name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    with step(f"{any_set.name} (about {any_set.first_build} the first time)"):
        if isinstance(any_set, GoSet):
            _build_programs(any_set, partial)
        else:
            _build_image(any_set, partial)
    partial.rename(final)
    return final


def _build_programs(go_set: GoSet, partial: Path) -> None:
    source = sets.source_folder(go_set)
    version = sets.parse_version((source / "go.mod").read_text(), go_set.module)
    flags = sets.build_linker_flags(go_set, version)
    bin_folder = partial / "bin"
    bin_folder.mkdir()
    _go_build(source, "-ldflags", flags, "-o", f"{bin_folder}/", "tool")
    for built_name, name in go_set.renames.items():
        (bin_folder / built_name).rename(bin_folder / name)


def _go_build(source: Path, *arguments: str) -> None:
    # The version control stamp would make a build depend on the repository around it.
    options = ["-trimpath", "-buildvcs=false"]
    commands.run(
        requirements.find_go(), "build", *options, *arguments, cwd=source, env=GO_ENVIRONMENT
    )


def _build_image(image_set: ImageSet, partial: Path) -> None:
    source = sets.source_folder(image_set)
    context = partial / "context"
    context.mkdir()
    if image_set.name == "pause":
        _go_build(source, "-ldflags", "-s -w", "-o", str(context / "pause"), ".")
    else:
        packages = ",".join((source / "packages").read_text().split())
        options = ["--quiet", "--variant=minbase", f"--dpkgopt={source / 'dpkg.cfg'}"]
        install = ("mmdebstrap", *options, f"--include={packages}", sets.DEBIAN_SUITE)
        commands.run(*install, context / "root.tar")
    archive = sets.archive_path(partial, image_set)
    archive.parent.mkdir()
    containerfile, image = source / "Containerfile", image_set.image
    options = ["--quiet", "--pull-never", "--tag", image, "--file", str(containerfile)]
    commands.run("buildah", "build", *options, context, env=BUILDAH_ENVIRONMENT)
    target = f"docker-archive:{archive}:{image}"
    commands.run("buildah", "push", "--quiet", image, target, env=BUILDAH_ENVIRONMENT)
    shutil.rmtree(context)

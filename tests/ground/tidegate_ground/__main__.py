"""The command line: `python -m tidegate_ground COMMAND`."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from tidegate_ground import (
    building,
    network,
    paths,
    processes,
    progress,
    record,
    requirements,
    sets,
)
from tidegate_ground.choose import GROUND_VARIABLE
from tidegate_ground.errors import GroundError
from tidegate_ground.ground import Ground, take_down
from tidegate_ground.options import GIB, GroundOptions, parse_mount


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the whole command line."""
    parser = argparse.ArgumentParser(prog="python -m tidegate_ground", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    prepare = commands.add_parser("prepare", help="install and build what the ground needs")
    prepare.add_argument("--yes", action="store_true", help="do not ask before installing")
    _add_up(commands.add_parser("up", help="bring the ground up, or load images into it"))
    commands.add_parser("down", help="take the ground down; nothing of it is left")
    commands.add_parser("status", help="what is running")
    commands.add_parser("env", help='print what a shell needs: eval "$(… env)"')
    load = commands.add_parser("load", help="load images into all nodes")
    load.add_argument("archive", nargs="+", type=Path, help="a docker-archive")
    run = commands.add_parser("exec", help="run a command in a node or beside the API server")
    run.add_argument("--node", help="the node; without it: the control plane's network")
    run.add_argument("argv", nargs="+", metavar="-- COMMAND")
    kill = commands.add_parser("kill", help="end everything in a node at once")
    kill.add_argument("node")
    kill.add_argument("--power", action="store_true", help="and lose what was not fsynced")
    start = commands.add_parser("start", help="start a node that is not running")
    start.add_argument("node")
    start.add_argument("--empty-disks", action="store_true", help="as a replaced machine")
    for command in commands.choices.values():
        default = os.environ.get(GROUND_VARIABLE, "main")
        command.add_argument("--name", default=default, help="the ground's name")
    return parser


def _add_up(up: argparse.ArgumentParser) -> None:
    up.add_argument("--nodes", type=int, default=3)
    up.add_argument("--nvme-gib", type=float, default=4, help="size of each node's /mnt/nvme")
    up.add_argument("--var-gib", type=float, default=20, help="size of each node's /var")
    up.add_argument("--image", type=Path, action="append", default=[], help="a docker-archive")
    up.add_argument("--mount", action="append", default=[], metavar="HOST_FOLDER:NODE_FOLDER")
    up.add_argument("--owner", type=int, metavar="PID", help="remove it when this process ended")


def prepare(arguments: argparse.Namespace) -> None:
    """Installs missing packages, after asking a person, and builds the missing sets."""
    requirements.require_root()
    packages = requirements.missing_packages(requirements.has_program)
    if packages:
        install(packages, assume_yes=arguments.yes)
    missing = sets.missing_sets()
    if not missing:
        progress.say("Everything the ground needs is built.")
        return
    requirements.find_go()
    root = paths.builds_root()
    needed = requirements.decide_needed_bytes([any_set.build_bytes for any_set in missing])
    requirements.require_disk(needed, requirements.free_bytes(root), root)
    building.build_missing(progress.step, progress.say)


def install(packages: Sequence[str], *, assume_yes: bool) -> None:
    """Installs packages; asks first where a person sits at a terminal.

    Raises:
        GroundError: the person said no, or they could not be installed.
    """
    names = " ".join(packages)
    progress.say(f"The ground needs Debian packages that are not installed: {names}")
    asks = sys.stdin.isatty() and not os.environ.get("CI") and not assume_yes
    if asks and input("Install them now? [y/N] ").strip().lower() not in ("y", "yes"):
        raise GroundError(f"Not installed; the ground needs them: {names}.")
    requirements.install_packages(packages)


def up(arguments: argparse.Namespace) -> None:
    """Brings the ground up; one that is up already gets the images that are new."""
    options = GroundOptions(
        nodes=arguments.nodes,
        nvme_bytes=int(arguments.nvme_gib * GIB),
        var_bytes=int(arguments.var_gib * GIB),
        mounts=tuple(parse_mount(text) for text in arguments.mount),
        images=tuple(arguments.image) or (sets.image_archive("base"),),
    )
    found = record.load(paths.ground_paths(arguments.name))
    boot_id = record.observe_boot_id()
    if found and not record.decide_abandoned(found, boot_id, processes.is_alive):
        load_into_running(Ground.open(arguments.name), options)
        return
    owner = processes.require(arguments.owner) if arguments.owner else None
    ground = Ground.up(arguments.name, options, owner=owner, report=progress.say)
    progress.say(f"The ground {ground.name} is up; its kubeconfig is {ground.kubeconfig}")


def load_into_running(ground: Ground, options: GroundOptions) -> None:
    """Gives a ground that is up the images that are new to it.

    Raises:
        GroundError: it lacks a folder that was asked for; that needs another ground.
    """
    lacking = [mount.target for mount in options.mounts if mount not in ground.options.mounts]
    if lacking:
        raise GroundError(
            f"The ground {ground.name} is up without {', '.join(lacking)}; folders are mounted "
            f"only when it comes up: take it down first."
        )
    loaded = ground.load(options.images)
    progress.say(f"The ground {ground.name} is up already; loaded: {loaded or 'nothing new'}")


def show_status(arguments: argparse.Namespace) -> None:
    """Prints one line per component and node."""
    ground = Ground.open(arguments.name)
    for component, is_running in ground.observe_components().items():
        sys.stdout.write(f"{component:24} {'running' if is_running else 'stopped'}\n")
    for node, status in ground.observe_nodes().items():
        ready = ", Ready" if status.is_ready else ", not Ready"
        sys.stdout.write(f"{node:24} {'running' + ready if status.is_running else 'stopped'}\n")


def show_environment(arguments: argparse.Namespace) -> None:
    """Prints the line that makes a shell use the ground."""
    ground = Ground.open(arguments.name)
    clients = sets.toolbox(("kubernetes", "helm")).search_path
    kubeconfig, path = shlex.quote(str(ground.kubeconfig)), shlex.quote(clients)
    sys.stdout.write(f"export KUBECONFIG={kubeconfig} PATH={path}:$PATH\n")


def load(arguments: argparse.Namespace) -> None:
    """Loads images."""
    loaded = Ground.open(arguments.name).load(arguments.archive)
    progress.say(f"Loaded: {', '.join(loaded) or 'nothing, all nodes have them already'}")


def execute(arguments: argparse.Namespace) -> None:
    """Becomes a command inside the ground."""
    ground = Ground.open(arguments.name)
    if arguments.node:
        head = ground.node(arguments.node).enter()
    else:
        head = network.enter_network(ground.control_plane.network)
    os.execvp(head[0], [*head, *arguments.argv])


def kill(arguments: argparse.Namespace) -> None:
    """Ends a node."""
    node = Ground.open(arguments.name).node(arguments.node)
    if arguments.power:
        node.power_cut()
    else:
        node.kill()


def start(arguments: argparse.Namespace) -> None:
    """Starts a node."""
    node = Ground.open(arguments.name).node(arguments.node)
    node.start(keep_disk=not arguments.empty_disks)


def down(arguments: argparse.Namespace) -> None:
    """Takes the ground down."""
    take_down(paths.ground_paths(arguments.name))


COMMANDS = {
    "prepare": prepare,
    "up": up,
    "down": down,
    "status": show_status,
    "env": show_environment,
    "load": load,
    "exec": execute,
    "kill": kill,
    "start": start,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 1, and a sentence, when it could not."""
    arguments = build_parser().parse_args(argv)
    try:
        COMMANDS[arguments.command](arguments)
    except GroundError as error:
        progress.say(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

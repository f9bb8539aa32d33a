"""Runs the main job from first save to resumed training and prints the timeline."""

import argparse
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from tidegate_demo import losses, stage
from tidegate_demo.observe import Snapshot, observe_job, read_lines
from tidegate_demo.stage import JobPlan
from tidegate_demo.timeline import Event, find_events
from tidegate_ground.errors import GroundError
from tidegate_ground.ground import Ground
from tidegate_ground.waiting import wait_until

DEMO_LABEL = "tidegate-demo=true"
GROUND = "main"
PLAN = JobPlan(steps=600)
REFERENCE = JobPlan(name="reference", steps=PLAN.steps, is_saved=False)
LOAD_WITH_STOCK_TORCH = """
import sys
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
dcp_to_torch_save(sys.argv[1], sys.argv[2])
import torch
state = torch.load(sys.argv[2], weights_only=False)
assert not [name for name in sys.modules if name.startswith("tidegate")]
print(len(state["model"]), "tensors of the model, step", state["sched"]["last_epoch"])
"""


class Demo:
    """The demo's moving parts: the job that is watched and the lines that are printed."""

    def __init__(self, ground: Ground, console: Console, progress: Progress) -> None:
        """Makes a namespace: a Job that is made anew is another owner of the run's name."""
        self.ground = ground
        self.namespace = f"demo-{datetime.now(UTC):%H%M%S}"
        ground.kubectl("delete", "namespace", "-l", DEMO_LABEL, "--timeout=120s")
        ground.kubectl("create", "namespace", self.namespace)
        ground.kubectl("label", "namespace", self.namespace, DEMO_LABEL)
        self.console = console
        self.progress = progress
        self.seen = Snapshot()
        self.events: list[Event] = []

    def say(self, what: str, text: str) -> None:
        """Adds a line of our own to the timeline."""
        self._print(Event(at=datetime.now(UTC), what=what, text=text))

    def look(self) -> Snapshot:
        """Observes the job and prints what changed."""
        now = datetime.now(UTC)
        found = observe_job(self.ground, self.namespace, PLAN.name)
        for event in find_events(self.seen, found, now):
            self._print(event)
        self.seen = found
        return found

    def wait(self, what: str, holds: Callable[[Snapshot], bool], seconds: float) -> Snapshot:
        """Looks until a condition holds; the progress bar shows the newest step meanwhile."""
        task = self.progress.add_task(what, total=PLAN.steps)
        try:
            wait_until(what, lambda: self._probe(task, holds), seconds, every_seconds=0.5)
        finally:
            self.progress.remove_task(task)
        return self.seen

    def _probe(self, task: TaskID, holds: Callable[[Snapshot], bool]) -> bool:
        found = self.look()
        step = found.run.get("progress", {}).get("step", 0)
        self.progress.update(task, completed=step)
        if found.is_failed:
            raise GroundError(
                f"The Job {PLAN.name} failed; see `kubectl logs -n {self.namespace}`."
            )
        return holds(found)

    def _print(self, event: Event) -> None:
        self.events.append(event)
        self.console.print(f"  {event.at:%H:%M:%S.%f}"[:-3] + f"  {event.what:<12} {event.text}")


def open_ground(console: Console) -> Ground:
    """The ground `main`, brought up if it is not; it stays for a look around."""
    try:
        ground = Ground.open(GROUND)
        ground.load(stage.ground_options().images)
    except GroundError:
        report = lambda sentence: console.print(f"  {sentence}")  # noqa: E731
        ground = Ground.up(GROUND, stage.ground_options(), report=report)
    return ground


def drain(demo: Demo, node: str) -> None:
    """Drains a node as an administrator does, and shows what kubectl prints meanwhile."""
    demo.say("drain", f"kubectl drain {node} --ignore-daemonsets --delete-emptydir-data")
    log = Path(stage.ROOT / "build" / "demo-drain.log")
    log.parent.mkdir(exist_ok=True)
    with stage.draining(demo.ground, node, log, timeout_seconds=300) as process:
        demo.wait(f"{node} is drained", lambda _: process.poll() is not None, 330)
    for line in log.read_text().splitlines():
        demo.console.print(f"      [dim]{line}[/dim]", highlight=False)
    if process.returncode:
        raise GroundError(f"The drain of {node} ended with status {process.returncode}.")
    demo.say("drained", node)


def train_and_drain(demo: Demo) -> None:
    """The job from its start to its end, with the drain of rank 1's node in the middle."""
    ground = demo.ground
    stage.start_job(ground, demo.namespace, PLAN)
    demo.wait("first durable save", lambda now: bool(now.run.get("lastDurable")), 180)
    node = next(pod.node for pod in demo.seen.pods if pod.rank == 1)
    try:
        drain(demo, node)
        resumed = demo.seen.run.get("lastDurable", {}).get("step", 0)
        ahead = lambda now: now.run.get("progress", {}).get("step", 0) > resumed  # noqa: E731
        demo.wait("training resumed", ahead, 120)
    finally:
        ground.kubectl("uncordon", node)
    demo.wait("training finished", lambda now: now.is_complete, 400)
    demo.say("finished", f"{PLAN.steps} steps")


def print_timeline(demo: Demo) -> None:
    """The events around the drain, in the order of their times."""
    events = sorted(demo.events, key=lambda event: event.at)
    asked = next(event.at for event in events if event.what == "drain")
    resumed = next((event.at for event in events if event.what == "resumed"), events[-1].at)
    table = Table(
        "SECONDS", "WHAT", "", title="The drain, in order", box=None, title_justify="left"
    )
    for event in events:
        seconds = (event.at - asked).total_seconds()
        if -30 < seconds and event.at <= resumed:
            table.add_row(f"{seconds:+.1f}", event.what, event.text)
    demo.console.print()
    demo.console.print(table)


def compare_with_reference(demo: Demo) -> None:
    """Trains the same without Tidegate and without a drain, and compares every loss."""
    ground = demo.ground
    resumed = [
        line for pod in demo.seen.pods for line in read_lines(ground, demo.namespace, pod.name)
    ]
    stage.start_job(ground, demo.namespace, REFERENCE)

    def complete() -> bool:
        return observe_job(ground, demo.namespace, REFERENCE.name).is_complete

    with demo.console.status("the same training without Tidegate and without a drain"):
        wait_until("the reference run finished", complete, 400, every_seconds=1)
    pods = observe_job(ground, demo.namespace, REFERENCE.name).pods
    want = losses.losses_by_step(
        line for pod in pods for line in read_lines(ground, demo.namespace, pod.name)
    )
    got = losses.losses_by_step(resumed)
    different = losses.find_difference(got, want)
    if different:
        raise GroundError(f"The resumed run is not bit-equal: {different}.")
    first = min(step for _, step in got)
    demo.say("bit-equal", f"losses of steps {first}-{PLAN.steps}, both ranks, uninterrupted run")


def show_copy(demo: Demo, folder: Path) -> None:
    """Loads the newest copy with stock PyTorch and says where everything lies."""
    durable = demo.seen.run["lastDurable"]
    copy = folder / durable["path"]
    target = stage.ROOT / "build" / "demo-model.pt"
    loaded = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOAD_WITH_STOCK_TORCH, str(copy), str(target)],
        check=True,
        capture_output=True,
        text=True,
    )
    demo.say("loaded", f"by stock PyTorch: {loaded.stdout.strip()}")
    kubectl = demo.ground.kubectl("get", "cpol,crun", "-n", demo.namespace).stdout
    demo.console.print(f"\n{kubectl}")
    demo.console.print(f"The PFS copy of step {durable['step']} lies in\n  {copy}\nLook at it:")
    demo.console.print(f"  .venv/bin/tidegate ls {copy.parent}")
    demo.console.print(f"  .venv/bin/tidegate verify {copy.parent}")
    demo.console.print("  eval $(.venv/bin/python -m tidegate_ground env); kubectl get crun -A")
    demo.console.print("The ground stays up for that; `make ground-down` removes it with all data.")


def main() -> int:
    """Exit status 0 when every step of the main job did what it should."""
    parser = argparse.ArgumentParser(prog="tidegate_demo", description=__doc__)
    parser.add_argument("--only-ground", action="store_true", help="bring the ground up and stop")
    only_ground = parser.parse_args().only_ground
    console = Console(highlight=False, soft_wrap=True)
    columns = (TextColumn("  {task.description}"), BarColumn(), TimeElapsedColumn())
    try:
        ground = open_ground(console)
        folder = stage.make_pfs_folder(ground)
        if only_ground:
            return 0
        stage.install_chart(ground)
        with Progress(*columns, console=console, transient=True) as progress:
            demo = Demo(ground, console, progress)
            train_and_drain(demo)
            compare_with_reference(demo)
            print_timeline(demo)
            show_copy(demo, folder)
    except (GroundError, AssertionError) as error:
        console.print(f"The demo stopped: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

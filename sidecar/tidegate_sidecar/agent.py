"""The role `agent`: one per node. Makes runs' folders, judges tiers, adopts leftovers. I/O."""

import logging
import threading
import time
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath

from tidegate_contract.errors import Corrupt, Reject
from tidegate_contract.folder import Folder
from tidegate_contract.wire import Target
from tidegate_sidecar.adopt import Adoptions, Leftover, observe_leftovers
from tidegate_sidecar.agent_settings import AgentSettings, LocalTier
from tidegate_sidecar.flush import Ending
from tidegate_sidecar.folders import (
    RunFolder,
    ensure_root_id,
    ensure_run_folder,
    write_target,
    write_tier_state,
)
from tidegate_sidecar.health import Health, serve
from tidegate_sidecar.mounts import TierReason, judge_tier, parse_mountinfo
from tidegate_sidecar.pods import Pod, PodWatch

logger = logging.getLogger(__name__)

_BEAT_SECONDS = 1.0
_TIER_SECONDS = 15.0
_FOLDER_SECONDS = 30.0
_ADOPT_SECONDS = 5.0
_MOUNTINFO = Path("/proc/self/mountinfo")


def run_agent(settings: AgentSettings, ending: Ending) -> int:
    """Serves a node until told to end.

    Returns:
        The exit status, 0.
    """
    health = Health()
    server = serve(health, settings.metrics_port)
    wake = threading.Event()
    watch = PodWatch(settings.api, settings.node, wake.set)
    watch.start()
    agent = Agent(settings)
    try:
        while not ending.is_due:
            agent.beat(watch.pods(), time.monotonic())
            health.beat(phase="Serving", tiers=agent.tiers, adopting=sorted(agent.adopting))
            wake.wait(_BEAT_SECONDS)
            wake.clear()
    finally:
        watch.close()
        agent.close()
        if server is not None:
            server.shutdown()
            server.server_close()
    return 0


class Agent:
    """What one agent knows of its node; one thread."""

    def __init__(self, settings: AgentSettings) -> None:
        """Does nothing yet."""
        self._settings = settings
        self._root_ids: dict[str, str] = {}
        self._adoptions = Adoptions(settings.remote)
        self._judged_at = float("-inf")
        self._adopted_at = float("-inf")
        self._made: dict[str, float] = {}
        self._told: dict[str, str] = {}
        self._told_of_pods: dict[str, str] = {}
        self._told_of_leftovers: dict[str, str] = {}

    @property
    def tiers(self) -> dict[str, str]:
        """Tier → what was last said of it."""
        return dict(self._told)

    @property
    def adopting(self) -> frozenset[str]:
        """Runs whose leftovers are being copied."""
        return self._adoptions.running

    def close(self) -> None:
        """Ends the copies that were started."""
        self._adoptions.close()

    def beat(self, pods: tuple[Pod, ...] | None, now: float) -> None:
        """One pass.

        Args:
            pods: of runs on this node; None until they are known.
            now: on the steady clock.
        """
        if now - self._judged_at >= _TIER_SECONDS or len(self._root_ids) < len(
            self._settings.local
        ):
            self._judged_at = now
            for tier in self._settings.local:
                self._judge(tier)
        if pods is None:
            return
        for pod in pods:
            if pod.is_live and now - self._made.get(pod.uid, float("-inf")) >= _FOLDER_SECONDS:
                self._make_folder(pod, now)
        here = {pod.uid for pod in pods}
        self._made = {uid: at for uid, at in self._made.items() if uid in here}
        self._told_of_pods = {uid: w for uid, w in self._told_of_pods.items() if uid in here}
        self._adoptions.collect(now)
        if now - self._adopted_at >= _ADOPT_SECONDS:
            self._adopted_at = now
            live = frozenset(pod.run for pod in pods if pod.is_live)
            self._adoptions.start(self._leftovers(), live, now)

    def _judge(self, tier: LocalTier) -> None:
        try:
            reason = judge_tier(
                parse_mountinfo(_MOUNTINFO.read_text()),
                str(tier.root),
                requires_mount_point=tier.require_mount_point,
            )
            with Folder.open(tier.root) as root:
                root_id = ensure_root_id(root)
                write_tier_state(root, root_id, reason, datetime.now(UTC))
        except (OSError, Corrupt) as error:
            self._root_ids.pop(tier.name, None)
            self._say(tier, str(error))
            return
        if reason is TierReason.OK:
            self._root_ids[tier.name] = root_id
        else:
            self._root_ids.pop(tier.name, None)
        self._say(tier, reason)

    def _say(self, tier: LocalTier, word: str) -> None:
        if self._told.get(tier.name) != word:
            self._told[tier.name] = word
            logger.info("a local tier was judged", extra={"tier": tier.name, "reason": word})

    def _say_of_pod(self, pod: Pod, message: str, word: str) -> None:
        if self._told_of_pods.get(pod.uid) != word:
            self._told_of_pods[pod.uid] = word
            logger.info(message, extra={"run": pod.run, "reason": word})

    def _make_folder(self, pod: Pod, now: float) -> None:
        tier = find_tier(self._settings.local, pod)
        if tier is None or tier.name not in self._root_ids:
            word = self._told.get(tier.name, "") if tier else f"{pod.local_path}: on no local tier"
            self._say_of_pod(pod, "a run's folder cannot be made", word)
            return
        try:
            with Folder.open(tier.root) as root:
                target = self._target(pod)
                if target is not None:
                    write_target(root, pod.run, target)
                wanted = RunFolder(run=pod.run, uid=pod.user, gid=tier.gid)
                ensure_run_folder(root, wanted, self._root_ids[tier.name])
        except (OSError, Corrupt, Reject) as error:
            self._say_of_pod(pod, "a run's folder cannot be made", str(error))
            return
        self._say_of_pod(pod, "a run's folder is there", tier.name)
        self._made[pod.uid] = now

    def _target(self, pod: Pod) -> Target | None:
        """Where the agent itself can copy to; claims of the tenant it does not see."""
        tier = next(
            (
                tier
                for tier in self._settings.remote
                if tier.host_path is not None and tier.host_path == pod.remote_host_path
            ),
            None,
        )
        if tier is None:
            return None
        return Target(
            tier=tier.name,
            path=pod.remote_path,
            uid=pod.user,
            gid=pod.group,
            policy=pod.policy,
        )

    def _leftovers(self) -> list[Leftover]:
        found: list[Leftover] = []
        told = self._told_of_leftovers
        self._told_of_leftovers = {}

        def tell(what: str, word: str) -> None:
            self._told_of_leftovers[what] = word
            if told.get(what) != word:
                logger.error("leftovers cannot be read", extra={"run": what, "error": word})

        for tier in self._settings.local:
            if tier.name not in self._root_ids:
                continue
            try:
                found += observe_leftovers(tier, tell)
            except OSError as error:
                self._say(tier, str(error))
        return found


def find_tier(tiers: tuple[LocalTier, ...], pod: Pod) -> LocalTier | None:
    """The tier on which the pod's folder is exactly that of its run; pure."""
    path = PurePosixPath(pod.local_path)
    return next((tier for tier in tiers if path == PurePosixPath(tier.host_path, pod.run)), None)

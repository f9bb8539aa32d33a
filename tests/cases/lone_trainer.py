"""The trainer of a run of one rank, without any process group."""

import warnings
from pathlib import Path
from typing import Any

from tidegate.observe import note_trained_behind
from tidegate.planner import NodePlanner
from tidegate.restore import Outcome, Restore
from tidegate.settings import Arguments, Options, resolve_settings
from tidegate.site import open_site
from tidegate.staging import Slot
from tidegate.state import TrainingState
from tidegate.writer import Desk, Ticket, write_attempt
from tidegate_contract.layout import Attempt, step_folder
from tidegate_contract.seal import SaveReason
from tidegate_contract.wire import Policy
from tidegate_sidecar.flush import Pass, flush_once
from tidegate_sidecar.settings import Settings
from tidegate_sidecar.tasks import Places


class LoneRank:
    """The ranks of a run of one process."""

    rank = 0
    world_size = 1

    def attempt(self, action: Any) -> list[Any]:
        return [action()]

    def gather(self, value: Any) -> list[Any]:
        return [value]


class LoneTrainer:
    """The trainer's own save and restore; what differs with more ranks is not in it."""

    def __init__(
        self,
        local: Path,
        remote: Path | None,
        *,
        name: str = "team/lm",
        environment: dict[str, str] | None = None,
        **policy: Any,
    ) -> None:
        options = Options(policy=Policy(**policy), keeps_rng=False)
        arguments = Arguments(run=name, local=local, remote=remote)
        settings = resolve_settings(arguments, options, environment or {})
        ranks: Any = LoneRank()
        self.ranks = ranks
        self.site = open_site(settings, ranks)

    @property
    def run_id(self) -> str:
        return self.site.identity.run_id

    @property
    def local(self) -> Path:
        return Path(self.site.local)

    @property
    def remote(self) -> Path:
        assert self.site.settings.remote is not None
        return self.site.settings.remote.path

    def save(self, state: dict[str, Any], attempt: Attempt, lineage: int = 1) -> Path:
        """Snapshots, writes and seals; gives the step's folder."""
        taken = self._state(state)
        desk = Desk(
            run_folder=self.site.local,
            run_id=self.run_id,
            rank=0,
            topology=self.site.topology,
            part_of=taken.part_of,
        )
        reason = SaveReason.CADENCE
        ticket = Ticket(attempt=attempt, tokens=attempt.step, lineage=lineage, reason=reason)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            entries = Slot().copy(taken.capture())
            write_attempt(desk, ticket, entries, NodePlanner(self.site.topology), None)
        return self.local / step_folder(attempt)

    def restore(self, state: dict[str, Any]) -> Outcome:
        """Restores, and trains one step."""
        outcome = Restore(self.site, self.ranks, self._state(state)).run()
        telling = note_trained_behind(self.site, outcome.claim, is_remote=outcome.is_remote_claim)
        assert telling is not None
        telling.join()
        return outcome

    def flush(self) -> Pass:
        settings = Settings(local=self.local, remote_root=self.remote, remote=".", policy=Policy())
        return flush_once(settings)

    def places(self) -> Places:
        local, remote = str(self.local), str(self.remote)
        return Places(local=local, remote_root=remote, remote=".", identity=self.site.identity)

    def _state(self, state: dict[str, Any]) -> TrainingState:
        return TrainingState(state, None, rank=0, keeps_rng=False, on_world_change=None)

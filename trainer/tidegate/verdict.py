"""How one rank fared with a candidate: its word to the others, and damaged files set aside. I/O.

What follows from all ranks' verdicts together `restore` decides; it alone calls this.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from tidegate.site import Site, open_place
from tidegate.trust import StrangersFile
from tidegate_contract.errors import Corrupt, DamagedFile
from tidegate_contract.folder import Folder, open_step
from tidegate_contract.layout import Attempt
from tidegate_contract.publish import set_aside
from tidegate_contract.restore_point import Candidate, Source
from tidegate_contract.seal import FileEntry

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How one rank fared.

    Attributes:
        sentence: of the failure; empty for success.
        is_damage: a file is not what its seal says; that tells nothing of its other copies.
        is_away: that file was set aside, or looks whole again, so another look may help.
        is_doubted: a file's owner is one of the site's doubted users.
    """

    sentence: str = ""
    is_damage: bool = False
    is_away: bool = False
    is_doubted: bool = False


class Judge:
    """Judges the tries of one restore on one rank; main thread."""

    def __init__(self, site: Site) -> None:
        """Has seen nothing yet."""
        self._site = site
        self._looked_whole: set[tuple[Attempt, str]] = set()

    def judge(self, candidate: Candidate, action: Callable[[], object]) -> Verdict:
        """Runs this rank's part of a try; never raises, as the other ranks wait for the verdict."""
        try:
            action()
        except DamagedFile as error:
            is_away = self._set_aside(candidate, error.entry)
            return Verdict(sentence=str(error), is_damage=True, is_away=is_away)
        except StrangersFile as error:
            is_doubted = error.owner in self._site.doubted_uids
            return Verdict(sentence=str(error), is_doubted=is_doubted)
        except Exception as error:  # noqa: BLE001  # the other ranks wait for this rank's vote
            return Verdict(sentence=f"{type(error).__name__}: {error}")
        return Verdict()

    def _set_aside(self, candidate: Candidate, entry: FileEntry) -> bool:
        """Sets a damaged file aside; two ranks may meet the same one, the first moves it.

        One that looks whole now was copied again meanwhile, or was read badly: that is worth one
        more look, not a second one.
        """
        source, path = candidate.sources[self._site.rank], candidate.folders[self._site.rank]
        try:
            with open_source(self._site, source) as run, open_step(run, path) as step:
                is_moved = set_aside(run, step, candidate.attempt, entry)
                if is_moved or step.size(entry.name) is None:
                    return True
        except FileNotFoundError:
            return True
        except (OSError, Corrupt) as error:
            _LOG.warning(
                "damaged file was not set aside", extra={"file": entry.name, "error": str(error)}
            )
            return False
        is_first = (candidate.attempt, entry.name) not in self._looked_whole
        self._looked_whole.add((candidate.attempt, entry.name))
        return is_first


def open_source(site: Site, source: Source) -> Folder:
    """The run's folder on the tier that a candidate names."""
    place = site.settings.local if source is Source.LOCAL else site.settings.remote
    assert place is not None, "a candidate names only tiers that there are"
    return open_place(place)

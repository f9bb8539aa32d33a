"""Which attempt a person means by a step. Pure. Called by `pin`, `unpin` and `rm`."""

from collections.abc import Iterable

from tidegate_cli.look import RunView
from tidegate_contract.errors import Reject
from tidegate_contract.layout import Attempt, parse_step_folder, step_folder


def choose_attempt(word: str, known: Iterable[Attempt], lack: str) -> Attempt:
    """The one attempt of `known` that the word names.

    Args:
        word: a step's number, or the name of an attempt's folder.
        known: what may be named.
        lack: ends the sentence where none is.

    Raises:
        Reject: none or several are named, or the word is neither; the sentence lists them.
    """
    named = parse_step_folder(word)
    if named is None and not (word.isascii() and word.isdecimal()):
        raise Reject(f"{word!r}: allowed is a step's number, or the name of its folder")
    found = sorted({a for a in known if a == named or (named is None and a.step == int(word))})
    if not found:
        raise Reject(f"step {word} {lack}")
    if len(found) > 1:
        names = ", ".join(step_folder(attempt) for attempt in found)
        raise Reject(f"step {word} has {len(found)} attempts, name one of them: {names}")
    return found[0]


def find_commits(view: RunView) -> set[Attempt]:
    """Attempts with a commit that holds, `.trash` included."""
    return {record.attempt for record in view.records if record.committed}


def explain_lack(view: RunView, word: str) -> str:
    """How a sentence ends on a step that has no commit here."""
    named = parse_step_folder(word)
    records = [
        record
        for record in view.records
        if record.attempt == named or str(record.attempt.step) == word.lstrip("0")
    ]
    problems = [problem for record in records for problem in record.problems]
    if problems:
        return f"is not durable: {problems[0]}"
    if records:
        return f"is not durable in {view.path}: it has no COMMIT there"
    return f"is not in {view.path}"

"""Which attempt a person means by a step. Pure. Called by `pin`, `unpin` and `rm`."""

from collections.abc import Iterable

import typer

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
        Reject: none or several are named; the sentence lists them.
        typer.BadParameter: the word is neither.
    """
    named = parse_step_folder(word)
    if named is None and not (word.isascii() and word.isdecimal()):
        raise typer.BadParameter(f"{word!r}: allowed is a step's number, or the name of its folder")
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
    steps = ", ".join(str(step) for step in sorted({a.step for a in find_commits(view)}))
    end = f"durable are {steps}" if steps else "nothing is durable there"
    if records:
        return f"is not durable in {view.path}: it has no COMMIT there; {end}"
    return f"is not durable: it is not in {view.path}; {end}"

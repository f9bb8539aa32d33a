"""State out, control in, and the answers between."""

import time
from datetime import UTC, datetime

import pytest

from tidegate.answers import Answers
from tidegate.report import ControlReader, Reporter
from tidegate_contract.document import decode
from tidegate_contract.folder import Folder
from tidegate_contract.layout import Attempt
from tidegate_contract.publish import write_document
from tidegate_contract.wire import (
    AnswerResult,
    Control,
    Phase,
    SaveAnswer,
    StepNote,
    TrainerState,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)
ATTEMPT = Attempt(step=5, nonce="00000000000000aa")


def a_state() -> TrainerState:
    note = StepNote(step=0, tokens=0, at=NOW)
    facts = {"run_id": "r", "rank": 0, "world_size": 1, "pod_uid": "", "written_at": NOW}
    return TrainerState(phase=Phase.STARTING, progress=note, **facts)


@pytest.fixture
def reporter(tmp_path):
    return Reporter(str(tmp_path), a_state())


def read_state(tmp_path) -> TrainerState | None:
    path = tmp_path / "state-0.json"
    return decode(TrainerState, path.read_bytes(), "state") if path.exists() else None


def test_reporter_writes_changes_soon_and_the_last_state_at_its_end(reporter, tmp_path):
    reporter.start()
    until = time.monotonic() + 5
    while read_state(tmp_path) is None and time.monotonic() < until:
        pass
    assert read_state(tmp_path).written_at > NOW
    reporter.update(phase=Phase.FINISHED)
    reporter.stop()
    assert read_state(tmp_path).phase is Phase.FINISHED


def test_reporter_survives_a_folder_that_is_gone(tmp_path, caplog):
    reporter = Reporter(str(tmp_path / "gone"), a_state())
    reporter.start()
    reporter.stop()
    assert "state is not written" in caplog.text


def test_control_is_read_when_it_changes_and_kept_when_it_is_damaged(tmp_path, caplog):
    reader = ControlReader(str(tmp_path))
    assert reader.read() == Control()
    with Folder.open(tmp_path) as folder:
        write_document(folder, "control.json", Control(is_backlogged=True))
    assert reader.read().is_backlogged
    (tmp_path / "control.json").write_text("{")
    assert reader.read().is_backlogged
    assert "control document was not read" in caplog.text
    reader.close()


def answer(result: AnswerResult, failures: int = 0) -> SaveAnswer:
    return SaveAnswer(request_id=9, result=result, attempt=ATTEMPT, failures=failures)


def test_request_that_is_saved_is_answered_twice_and_obeyed_once(reporter):
    answers = Answers(reporter)
    answers.hear(9)
    assert answers.acknowledge(ATTEMPT) == 9
    assert reporter.state.answer == answer(AnswerResult.ACKNOWLEDGED)
    answers.settle(9, ATTEMPT, is_sealed=True)
    assert reporter.state.answer == answer(AnswerResult.SEALED)
    answers.hear(9)
    assert answers.open_request == 0
    assert answers.acknowledge(ATTEMPT) == 0


def test_request_whose_save_fails_is_tried_twice(reporter):
    answers = Answers(reporter)
    for failures in (1, 2):
        answers.hear(9)
        assert answers.acknowledge(ATTEMPT) == 9
        answers.settle(9, ATTEMPT, is_sealed=False)
        assert reporter.state.answer == answer(AnswerResult.FAILED, failures)
    assert answers.taken == 9, "left as it is"


def test_request_with_everything_saved_is_answered_so(reporter):
    answers = Answers(reporter)
    answers.tell_nothing_new(ATTEMPT)
    assert reporter.state.answer is None
    answers.hear(9)
    answers.tell_nothing_new(ATTEMPT)
    assert reporter.state.answer == answer(AnswerResult.NOTHING_NEW)

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from tidegate_contract.keys import DrainState
from tidegate_contract.layout import Attempt
from tidegate_contract.wire import (
    AnswerResult,
    Backlog,
    DurableNote,
    Phase,
    Report,
    RestoreNote,
    SaveAnswer,
    SaveFigures,
    StepNote,
    TrainerState,
)
from tidegate_operator.api_run_status import RunStatus
from tidegate_operator.gate.asks import request_id
from tidegate_operator.gate.facts import Drain
from tidegate_operator.gate.records import build_drains
from tidegate_operator.gate.report_status import (
    FIELDS,
    build_report_status,
    format_backlog,
    is_write_due,
)

NOW = datetime(2026, 11, 29, 12, 0, 0, 123456, tzinfo=UTC)
AT = "2026-11-29T12:00:00.123456Z"
ATTEMPT = Attempt(step=120, nonce="00000000000000aa")
DURABLE = DurableNote(
    step=120,
    tokens=999,
    attempt=ATTEMPT,
    committed_at=NOW - timedelta(seconds=5),
    path="team-a/llama/step-x",
    size_bytes=1 << 30,
    manifest_sha256="ab" * 32,
)
STATE = TrainerState(
    run_id="6f2f4a63-5f3c-4b3e-9d28-0a4a6e8a8f11",
    rank=0,
    world_size=2,
    pod_uid="u0",
    phase=Phase.TRAINING,
    progress=StepNote(step=130, tokens=1100, at=NOW),
    sealed=StepNote(step=120, tokens=999, at=NOW, attempt=ATTEMPT),
    restore=RestoreNote(reason="newest durable", lineage=1, seconds=3.4, tier="Local", at=NOW),
    saves=SaveFigures(total=7, failed=1),
    written_at=NOW,
)
LATER = StepNote(step=131, tokens=1200, at=NOW)
REPORT = Report(
    namespace="team-a",
    run="llama",
    pod="p0",
    pod_uid="u0",
    run_id=STATE.run_id,
    state=STATE,
    durable=DURABLE,
    backlog=Backlog(steps=1, size_bytes=41 << 30, oldest_at=NOW),
)


def build(report: Report = REPORT, before: Any = None, value: str = "") -> dict[str, Any]:
    status = RunStatus.model_validate(before or {})
    return build_report_status(report, status, value, NOW)


def test_report_becomes_the_managers_whole_set_of_fields() -> None:
    status = build(value="now")
    assert tuple(status) == FIELDS
    assert status["progress"] == {
        "step": 130,
        "tokens": 1100,
        "time": "2026-11-29T12:00:00.123456Z",
    }
    assert status["lastDurable"] == {
        "step": 120,
        "tokens": 999,
        "time": "2026-11-29T11:59:55.123456Z",
        "attempt": "00000000000000aa",
        "observedTime": AT,
        "path": "team-a/llama/step-x",
        "sizeBytes": 1 << 30,
        "digest": "ab" * 32,
    }
    assert status["backlog"]["size"] == "41Gi"
    assert status["saves"] == {"total": 7, "failed": 1}
    assert status["lastRestore"]["seconds"] == 3


def test_report_without_news_keeps_what_was_known() -> None:
    before = build(value="now")
    empty = replace(REPORT, state=None, durable=None, backlog=Backlog())
    after = build(empty, before, "now")
    for name in set(FIELDS) - {"backlog", "lastReportTime"}:
        assert after[name] == before[name], name


@pytest.mark.parametrize(
    ("committed", "before", "want"),
    [
        pytest.param(-5, None, -5, id="as-committed"),
        pytest.param(60, None, 0, id="never-in-the-future"),
        pytest.param(-5, -2, -2, id="never-back"),
        pytest.param(-5, 30, 30, id="never-back-though-the-clock-was-wrong"),
    ],
)
def test_durable_time_is_clamped(committed: int, before: int | None, want: int) -> None:
    note = replace(DURABLE, committed_at=NOW + timedelta(seconds=committed))
    known = {"step": 1, "attempt": "b" * 16}
    if before is not None:
        known["time"] = (NOW + timedelta(seconds=before)).isoformat()
    status = build(replace(REPORT, durable=note), {"lastDurable": known} if before else None)
    found = datetime.fromisoformat(status["lastDurable"]["time"])
    assert found == NOW + timedelta(seconds=want)


def test_durable_seen_again_is_unchanged() -> None:
    before = build()
    later = build_report_status(
        REPORT, RunStatus.model_validate(before), "", NOW + timedelta(minutes=1)
    )
    assert later["lastDurable"] == before["lastDurable"]


def test_durable_of_a_rollback_may_have_a_lower_step() -> None:
    note = replace(DURABLE, step=50, attempt=Attempt(step=50, nonce="c" * 16))
    status = build(replace(REPORT, durable=note), build())
    assert status["lastDurable"]["step"] == 50


def answered(result: str, value: str = "now", failures: int = 0) -> Report:
    answer = SaveAnswer(
        request_id=request_id("team-a/llama", value),
        result=AnswerResult(result),
        attempt=ATTEMPT,
        failures=failures,
    )
    return replace(REPORT, state=replace(STATE, answer=answer), durable=None)


@pytest.mark.parametrize(
    ("report", "before", "want"),
    [
        pytest.param(REPORT, None, {"value": "now", "result": "Requested"}, id="asked"),
        pytest.param(
            answered("Acknowledged"),
            None,
            {"value": "now", "step": 120, "result": "Saving"},
            id="ack",
        ),
        pytest.param(
            answered("Failed", failures=1),
            None,
            {"value": "now", "step": 120, "result": "Saving"},
            id="failed-once",
        ),
        pytest.param(
            answered("Failed", failures=2),
            None,
            {"value": "now", "step": 120, "result": "Failed"},
            id="failed",
        ),
        pytest.param(
            answered("Sealed"), None, {"value": "now", "step": 120, "result": "Sealed"}, id="sealed"
        ),
        pytest.param(
            REPORT,
            {"value": "now", "step": 120, "result": "Sealed"},
            {"value": "now", "step": 120, "result": "Durable"},
            id="durable",
        ),
        pytest.param(
            answered("Sealed", value="old"),
            {"value": "old", "step": 1, "result": "Durable"},
            {"value": "now", "result": "Requested"},
            id="new-value",
        ),
    ],
)
def test_save_request_is_answered_in_status(report: Report, before: Any, want: Any) -> None:
    assert build(report, {"saveRequest": before} if before else None, "now")["saveRequest"] == want


@pytest.mark.parametrize(
    ("change", "age", "want"),
    [
        pytest.param({}, 5, False, id="nothing-new"),
        pytest.param({"state": replace(STATE, progress=LATER)}, 5, False, id="progress"),
        pytest.param({"backlog": Backlog()}, 5, False, id="backlog"),
        pytest.param({}, 30, True, id="heartbeat"),
        pytest.param({"durable": replace(DURABLE, step=121)}, 5, True, id="durable"),
        pytest.param({"state": replace(STATE, sealed=None)}, 5, False, id="sealed-not-told"),
        pytest.param({"run_id": "another"}, 5, True, id="run-id"),
    ],
)
def test_write_is_due_when_something_that_matters_changed(
    change: Any, age: float, want: bool
) -> None:
    observed = build()
    wanted = build(replace(REPORT, **change), observed)
    assert is_write_due(observed, wanted, NOW - timedelta(seconds=age), NOW) is want


def test_write_is_due_for_the_first_report_of_a_replica() -> None:
    assert is_write_due(build(), build(), None, NOW)


@pytest.mark.parametrize(
    ("size", "want"),
    [(0, "0"), (1023, "1023"), (1536, "1.5Ki"), (41 << 30, "41Gi"), (10239 << 20, "10Gi")],
)
def test_backlog_is_rounded_for_people(size: int, want: str) -> None:
    assert format_backlog(size) == want


def schema_of_status() -> Any:
    text = (Path(__file__).parents[3] / "crds" / "checkpointruns.yaml").read_text()
    (version,) = yaml.safe_load(text)["spec"]["versions"]
    return version["schema"]["openAPIV3Schema"]["properties"]["status"]


def assert_declared(value: Any, schema: Any, path: str = "status") -> None:
    if isinstance(value, dict):
        for name, part in value.items():
            assert name in schema["properties"], f"{path}.{name}"
            assert_declared(part, schema["properties"][name], f"{path}.{name}")
    elif isinstance(value, list):
        for part in value:
            assert_declared(part, schema["items"], path)


def test_every_field_the_gate_writes_is_in_the_served_schema() -> None:
    drain = Drain(
        node="a",
        node_uid="u",
        state=DrainState.RELEASED,
        reason="Durable",
        requested_by="admin",
        requested_at=NOW,
        deadline=NOW,
        released_at=NOW,
        message="m",
    )
    assert_declared(build(value="now") | {"drains": build_drains([drain])}, schema_of_status())

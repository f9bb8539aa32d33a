from typing import Any

import pytest

from tidegate_contract import keys
from tidegate_contract.errors import Reject
from tidegate_operator.gate.runname import RunName, parse_run_name

JOB = {keys.JOB_NAME_LABEL: "train", keys.JOB_UID_LABEL: "job-uid"}
JOBSET = {keys.JOBSET_NAME_LABEL: "set", keys.JOBSET_UID_LABEL: "set-uid"}
OWNER = [{"kind": "Job", "uid": "other"}, {"kind": "Job", "uid": "owner-uid", "controller": True}]


def name_of(metadata: dict[str, Any]) -> tuple[str, str | None]:
    run = parse_run_name({"metadata": metadata}, "ns")
    assert run.namespace == "ns"
    return run.name, run.owner_uid


@pytest.mark.parametrize(
    ("metadata", "want"),
    [
        pytest.param(
            {"labels": {keys.RUN_LABEL: "mine"} | JOB}, ("mine", None), id="label-binds-nobody"
        ),
        pytest.param({"labels": JOBSET | JOB}, ("set", "set-uid"), id="jobset-over-job"),
        pytest.param(
            {"labels": {keys.JOBSET_NAME_LABEL: "set"} | JOB, "ownerReferences": OWNER},
            ("set", None),
            id="jobset-without-uid-is-not-bound-to-one-of-its-jobs",
        ),
        pytest.param({"labels": JOB}, ("train", "job-uid"), id="job"),
        pytest.param(
            {"labels": {keys.JOB_NAME_LABEL: "train"}, "ownerReferences": OWNER},
            ("train", "owner-uid"),
            id="job-by-owner-reference",
        ),
        pytest.param(
            {"name": "sts-0", "generateName": "sts-", "ownerReferences": OWNER},
            ("sts-0", "owner-uid"),
            id="pod-of-a-controller",
        ),
        pytest.param({"name": "solo"}, ("solo", None), id="bare-pod"),
    ],
)
def test_run_name_comes_from_the_first_that_names_it(metadata: Any, want: Any) -> None:
    assert name_of(metadata) == want


@pytest.mark.parametrize(
    ("metadata", "sentence"),
    [
        pytest.param({"generateName": "x-"}, "set the label tidegate.io/run", id="generate-name"),
        pytest.param({}, "set the label tidegate.io/run", id="nothing"),
        pytest.param(
            {"labels": {keys.RUN_LABEL: "Big"}}, "label tidegate.io/run: run name", id="upper-case"
        ),
        pytest.param({"name": "a.b"}, "pod name: run name 'ns/a.b'", id="dots"),
        pytest.param({"labels": {keys.JOB_NAME_LABEL: "x" * 64}}, "at most 63", id="too-long"),
    ],
)
def test_run_name_that_cannot_be_is_refused_with_its_source(metadata: Any, sentence: str) -> None:
    with pytest.raises(Reject) as caught:
        name_of(metadata)
    assert sentence in str(caught.value)


def test_run_name_reads_like_a_folder() -> None:
    assert str(RunName(namespace="team-a", name="llama")) == "team-a/llama"

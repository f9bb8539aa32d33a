"""Environment before arguments."""

from pathlib import Path

import pytest

from tidegate.settings import Arguments, Options, Place, resolve_settings
from tidegate_contract import keys
from tidegate_contract.cadence import Cadence, CadenceKind
from tidegate_contract.document import encode
from tidegate_contract.errors import Reject
from tidegate_contract.wire import Policy

STEPS = Cadence(by=CadenceKind.STEPS, steps=5)
GIVEN = Arguments(run="lm", local=Path("/nvme"), remote=Path("/pfs"), cadence=STEPS)
INJECTED = {
    keys.ENV_RUN: "team/llm",
    keys.ENV_LOCAL: "/tidegate/local",
    keys.ENV_REMOTE: "/tidegate/remote/gold/team/llm",
    keys.ENV_POLICY: encode(Policy(cadence=Cadence(tokens=7))).decode(),
    keys.ENV_POD_UID: "u1",
    keys.ENV_RUN_DERIVED_OWNER: "o1",
}


def test_settings_outside_a_cluster_come_from_the_arguments():
    found = resolve_settings(GIVEN, Options(), {})
    assert found.run == "default/lm"
    assert found.local == Place(root=Path("/nvme"), parts=("default", "lm"))
    assert found.remote == Place(root=Path("/pfs"), parts=("default", "lm"))
    assert found.policy == Policy(cadence=STEPS)
    assert (found.has_sidecar, found.overruled, found.owner_uid) == (False, (), None)


def test_settings_in_an_injected_pod_come_from_the_environment():
    found = resolve_settings(GIVEN, Options(), INJECTED)
    assert (found.run, found.owner_uid, found.pod_uid) == ("team/llm", "o1", "u1")
    assert found.local == Place(root=Path("/tidegate/local"))
    assert found.remote == Place(root=Path("/tidegate/remote"), parts=("gold", "team", "llm"))
    assert found.policy.cadence.tokens == 7
    assert found.has_sidecar
    assert found.overruled == ("run", "local", "remote", "cadence")


def test_number_as_cadence_means_tokens():
    found = resolve_settings(Arguments(run="a/b", local=Path("/n"), cadence=42), Options(), {})
    assert found.policy.cadence == Cadence(tokens=42)


def test_remote_argument_is_left_out_where_only_the_local_tier_is_injected():
    found = resolve_settings(GIVEN, Options(), {keys.ENV_LOCAL: "/tidegate/local"})
    assert found.remote is None


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (Arguments(local=Path("/n")), "run is not named"),
        (Arguments(run="lm"), "local is not named"),
        (Arguments(run="Team/LM", local=Path("/n")), "NAMESPACE/NAME"),
        (Arguments(run="../x", local=Path("/n")), "NAMESPACE/NAME"),
        (Arguments(run="lm", local=Path("/n"), cadence="50M"), "number of tokens"),
    ],
    ids=["no run", "no local", "capitals", "parent folder", "cadence in words"],
)
def test_settings_that_cannot_work_are_refused_by_name(arguments, word):
    with pytest.raises(Reject, match=word):
        resolve_settings(arguments, Options(), {})


def test_options_without_slots_are_refused():
    with pytest.raises(Reject, match=r"options\.slots"):
        Options(slots=0)


@pytest.mark.parametrize("given", [("1000",), (-1,), (True,), "1000", (1.5,)], ids=repr)
def test_trusted_users_that_are_no_numbers_are_refused(given):
    with pytest.raises(Reject, match=r"options\.trusted_uids holds .* numeric user ids"):
        Options(trusted_uids=given)


def test_trusted_users_may_be_any_collection_of_numbers():
    assert Options(trusted_uids={1000, 0}).trusted_uids == {1000, 0}

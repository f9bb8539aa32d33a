from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_contract import layout
from tidegate_contract.errors import Reject
from tidegate_contract.layout import Attempt
from tidegate_contract.wire import Policy, Target


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**64 - 1))
def test_step_folder_parses_back(step: int, nonce: int) -> None:
    attempt = Attempt(step=step, nonce=f"{nonce:016x}")
    assert layout.parse_step_folder(layout.step_folder(attempt)) == attempt


@given(st.lists(st.integers(0, 2**63 - 1), min_size=2))
def test_step_folders_sort_as_text_like_their_steps(steps: list[int]) -> None:
    attempts = [Attempt(step=step, nonce="0" * 16) for step in steps]
    names = sorted(layout.step_folder(attempt) for attempt in attempts)
    assert names == [layout.step_folder(attempt) for attempt in sorted(attempts)]


@pytest.mark.parametrize(
    ("build", "parse"),
    [
        (layout.seal_file, layout.parse_seal_file),
        (layout.announced_file, layout.parse_announced_file),
        (layout.state_file, layout.parse_state_file),
        (lambda rank: layout.lineage_file(rank + 1), layout.parse_lineage_file),
    ],
    ids=["seal", "announced", "state", "lineage"],
)
def test_rank_file_parses_back(
    build: Callable[[int], str], parse: Callable[[str], int | None]
) -> None:
    assert [parse(build(rank)) for rank in (0, 1, 9999)] in ([0, 1, 9999], [1, 2, 10000])


@pytest.mark.parametrize(
    "name",
    [
        "step-1.00",
        "step-00000000000000001200",
        "step-00000000000000001200.00000000000000AA",
        "step-99999999999999999999.00000000000000aa",
        "step-00000000000000001200.00000000000000aa.tmp",
        "seal-01.json",
        "seal--1.json",
        "seal-1.json\n",
    ],
)
def test_parsers_of_foreign_names_give_none(name: str) -> None:
    assert layout.parse_step_folder(name) is None
    assert layout.parse_seal_file(name) is None


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc/passwd", "a\0b", "ä", "x" * 201])
def test_file_name_that_could_leave_the_folder_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="not allowed"):
        layout.check_file_name(name)


def test_temp_file_is_never_a_final_name() -> None:
    name = layout.temp_file("COMMIT", "00" * 8)
    assert layout.is_temp_file(name)
    with pytest.raises(ValueError, match="not allowed"):
        layout.check_file_name(name)


@pytest.mark.parametrize("name", ["run", "a/b/c", "A/b", "a/-b", "a/" + "b" * 64, "../x", "a/.."])
def test_run_name_that_is_no_pair_of_labels_is_refused(name: str) -> None:
    with pytest.raises(Reject, match="NAMESPACE/NAME"):
        layout.check_run_name(name)


@pytest.mark.parametrize("part", list(layout.Part))
def test_data_file_parses_back(part: layout.Part) -> None:
    assert layout.parse_data_file(layout.data_file(part, 12)) == (part, 12)


@pytest.mark.parametrize("name", ["weights.distcp", "weights-01.distcp", "other-1.distcp", "x"])
def test_foreign_name_is_no_data_file(name: str) -> None:
    assert layout.parse_data_file(name) is None


def test_unfinished_and_target_names_parse_back() -> None:
    unfinished = layout.temp_file("weights-0.distcp", "0123456789abcdef")
    assert layout.parse_temp_file(unfinished) == "weights-0.distcp"
    assert layout.parse_temp_file("weights-0.distcp") is None
    assert layout.parse_target_file(layout.target_file("bytelm")) == "bytelm"
    assert layout.parse_target_file("bytelm") is None
    assert layout.parse_target_file("a.b.target.json") is None


@pytest.mark.parametrize(
    "path", ["", "/", "/etc", "..", "../x", "a/../b", "a//b", "a/", ".", "a\0"]
)
def test_tier_path_that_could_leave_the_tier_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="below the tier's root"):
        layout.check_tier_path(path)
    with pytest.raises(ValueError, match="below the tier's root"):
        Target(tier="pfs", path=path, uid=0, gid=0, policy=Policy())


def test_tier_path_below_the_root_is_taken() -> None:
    assert layout.check_tier_path("prefix/team/run") == "prefix/team/run"

"""The page `docs/cases.md` and the tests say the same."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "cases.md"
NAMED = re.compile(r"`(test_[^`]+)`")
FOLDERS = ("cases", "crash", "tidegate", "tidegate_contract", "tidegate_sidecar", "tidegate_cli")


def rows() -> dict[str, list[str]]:
    """Row → cells, in the order of the page; a row named twice has the cells of both."""
    found: dict[str, list[str]] = {}
    for line in PAGE.read_text().splitlines():
        match = re.fullmatch(r"\| (C\d{3}) \| (.+?) \|( .*)? ?\|", line)
        if match:
            found.setdefault(match[1], []).extend([match[2], match[3] or ""])
    return found


def listed() -> list[str]:
    """The rows of the three areas, as the page lists them before its tables."""
    text = PAGE.read_text().split("\n## ")[0]
    return re.findall(r"\bC\d{3}\b", text)


def missing(names: set[str], ids: frozenset[str]) -> set[str]:
    """Names that no test's id begins with; a name without bracket is a whole function's."""
    tests = {one.split("::", 1)[1] for one in ids}
    functions = {one.split("[")[0] for one in tests}
    return {
        name
        for name in names
        if name not in functions
        and not ("[" in name and any(one.startswith(name) for one in tests))
    }


def test_table_has_each_row_once_in_order() -> None:
    want = listed()
    assert len(want) == len(set(want)) == 62
    assert list(rows()) == want
    assert all(len(cells) == 2 for cells in rows().values())


def test_table_says_of_each_row_which_test_it_has_or_why_later() -> None:
    wrong = [row for row, (what, test) in rows().items() if not NAMED.search(test + what)]
    assert all("Later: " in rows()[row][0] for row in wrong)
    odd = [row for row, (_, test) in rows().items() if NAMED.sub("", test).strip()]
    assert not odd


def test_table_names_tests_that_exist_and_all_that_bear_a_rows_number(
    collected: frozenset[str],
) -> None:
    found = {one.split("/")[1] for one in collected if one.startswith("tests/")}
    if not found.issuperset(FOLDERS):
        pytest.skip("only a session over all of tests/ knows all tests")
    table = {row: set(NAMED.findall(cells[1])) for row, cells in rows().items()}
    assert not missing(set().union(*table.values()), collected)
    functions = {one.split("::", 1)[1].split("[")[0] for one in collected}
    numbered = {name for name in functions if re.match(r"test_c\d{3}_", name)}
    assert len(numbered) > 40
    assert not {n for n in numbered if n not in table.get(f"C{n[6:9]}", set())}

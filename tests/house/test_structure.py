"""The habits that a formatter cannot hold: sizes, forbidden files, one owner per name."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 40
FORBIDDEN_WORDS = re.compile(
    r"(?i)^(utils?|misc|common|helpers?|managers?)$|(Manager|Helper|Handler)$"
)


def sources() -> list[Path]:
    """Python files that git knows or would add."""
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    return [ROOT / name for name in names if (ROOT / name).exists()]


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_module_of_the_tree_stays_small(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= MAX_MODULE_LINES, f"{path}: split it"
    tree = ast.parse(text)
    too_long = [
        f"{node.name} has {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno >= MAX_FUNCTION_LINES
    ]
    assert not too_long
    named = [n.name for n in ast.walk(tree) if isinstance(n, ast.ClassDef)] + [path.stem]
    assert not [name for name in named if FORBIDDEN_WORDS.search(name)]


def test_packages_of_operator_and_tests_shadow_nothing() -> None:
    # operator/__init__.py would hide the standard library's operator module
    allowed = {"tidegate_operator", "tidegate_ground", "tidegate_crash"}
    found = [
        path.relative_to(ROOT)
        for path in sources()
        if path.name == "__init__.py"
        and path.relative_to(ROOT).parts[0] in ("operator", "tests")
        and allowed.isdisjoint(path.parts)
    ]
    assert not found


def test_readme_commands_are_targets() -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.M))
    used = set(re.findall(r"\bmake ([a-z][a-z-]*)", (ROOT / "README.md").read_text()))
    assert {"demo", "test"} <= used
    assert used <= targets


def test_requirements_hold_hashes_and_no_addresses() -> None:
    for path in (ROOT / "requirements").glob("*.txt"):
        text = path.read_text()
        assert "--hash=sha256:" in text
        assert not re.search(r"(?i)https?://|--(extra-)?index-url|--find-links", text), path


def test_texts_name_no_machine_path() -> None:
    names = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    wrong = [
        name
        for name in names
        if name != "tests/house/test_structure.py"
        and (ROOT / name).is_file()
        and re.search(r"/work/|/root/", (ROOT / name).read_text(errors="ignore"))
    ]
    assert not wrong

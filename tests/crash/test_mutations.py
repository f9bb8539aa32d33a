"""A bug that is planted in production breaks an invariant in some scenario."""

import pytest

from tidegate_crash.explore import explore
from tidegate_crash.mutations import MUTATIONS, Mutation
from tidegate_crash.scenarios import scenarios

SCENARIOS = {scenario.name: scenario for scenario in scenarios()}
pytestmark = pytest.mark.long


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_planted_bug_is_caught(mutation: Mutation) -> None:
    with mutation.plant():
        counts = explore(SCENARIOS[mutation.scenario], depth=mutation.depth)
    assert counts.violations
    assert any(f"I{number} " in counts.violations[0] for number in range(1, 7))


@pytest.mark.parametrize(
    "name", sorted({mutation.scenario for mutation in MUTATIONS if mutation.depth == 0})
)
def test_scenario_without_a_bug_shows_nothing(name: str) -> None:
    counts = explore(SCENARIOS[name], depth=0)
    assert counts.violations == []

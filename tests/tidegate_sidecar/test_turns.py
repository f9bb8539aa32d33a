import pytest

from tidegate_sidecar.turns import PATIENCE_SECONDS, may_copy


@pytest.mark.parametrize(
    ("mine", "announced", "received", "window", "waited", "want"),
    [
        ({0, 1}, {0, 1, 2, 3}, set(), 1, 0.0, True),
        ({2, 3}, {0, 1, 2, 3}, set(), 1, 0.0, False),
        ({2, 3}, {0, 1, 2, 3}, {0}, 1, 0.0, False),
        ({2, 3}, {0, 1, 2, 3}, {0, 1}, 1, 0.0, True),
        ({4, 5}, {0, 1, 2, 3, 4, 5}, {0, 1}, 1, 0.0, False),
        ({4, 5}, {0, 1, 2, 3, 4, 5}, {0, 1}, 2, 0.0, True),
        ({2, 3}, {2, 3}, set(), 1, 0.0, True),
        ({2, 3}, {0, 1, 2, 3}, set(), 1, PATIENCE_SECONDS, True),
        ({40}, set(range(41)), set(), 0, 0.0, False),
        ({5}, set(range(41)), set(), 0, 0.0, True),
    ],
    ids=[
        "first node",
        "second waits",
        "second waits for the whole first",
        "first is done",
        "third waits for the second",
        "window of two",
        "a silent node is not waited for",
        "a stuck node is waited for so long",
        "automatic window is full",
        "automatic window has room",
    ],
)
def test_turn(
    mine: set[int],
    announced: set[int],
    received: set[int],
    window: int,
    waited: float,
    want: bool,
) -> None:
    got = may_copy(mine, announced, received, nodes_at_once=window, waited_seconds=waited)
    assert got is want

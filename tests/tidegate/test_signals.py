import subprocess
import sys

import pytest

PROGRAM = """
import atexit, os
atexit.register(os.abort)  # stands for native libraries that abort while they are torn down
import tidegate.signals as signals
atexit.register(print, "the program's own exit function")
try:
    signals.leave()
finally:
    print("the program's own finally")
    {after}
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("after", "want"),
    [
        pytest.param("pass", 143, id="leaves with 143 although the teardown aborts"),
        pytest.param("1 / 0", -6, id="a failure of the program is not covered up"),
    ],
)
def test_leave_gives_the_exit_status(after: str, want: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(after=after)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == want
    assert done.stdout.splitlines()[0] == "the program's own finally"
    assert "the program's own exit function" in done.stdout

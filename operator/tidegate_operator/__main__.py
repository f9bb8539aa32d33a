"""Starts one of the operator's two roles: `controller` or `gate`."""

import argparse
import logging
import sys

from tidegate_contract.errors import TidegateError
from tidegate_operator.logs import configure_logging
from tidegate_operator.settings import Settings, load_settings

logger = logging.getLogger("tidegate_operator")


def main(arguments: list[str] | None = None) -> int:
    """Runs a role until a signal; gives the process's exit status."""
    parser = argparse.ArgumentParser(prog="tidegate_operator", description=__doc__)
    parser.add_argument("role", choices=("controller", "gate"))
    role = parser.parse_args(arguments).role
    configure_logging()
    try:
        _run(role, load_settings())
    except TidegateError as error:
        logger.error("stopped", extra={"role": role, "error": str(error)})
        return 1
    return 0


def _run(role: str, settings: Settings) -> None:
    # Each role imports its own: the gate works without the framework, and neither needs the other.
    if role == "controller":
        from tidegate_operator.controller import run

        run.main(settings)
    else:
        from tidegate_operator.gate import server

        server.main(settings)


if __name__ == "__main__":
    sys.exit(main())

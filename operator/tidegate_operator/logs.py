"""One line of JSON per log record, on standard error: a constant message and its fields."""

import json
import logging
import os
import sys
from datetime import UTC, datetime

ENV_LEVEL = "TIDEGATE_LOG_LEVEL"

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """Formats a record with all fields of its `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line of JSON."""
        moment = datetime.fromtimestamp(record.created, UTC)
        fields = {
            "time": moment.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        extra = {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if record.exc_info:
            extra["exception"] = self.formatException(record.exc_info)
        return json.dumps({**extra, **fields}, default=str)


def configure_logging() -> None:
    """Sends every logger of the process to standard error; TIDEGATE_LOG_LEVEL sets the level."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    level = os.environ.get(ENV_LEVEL, "info").upper()
    known = level in logging.getLevelNamesMapping()
    logging.basicConfig(level=level if known else "INFO", handlers=[handler], force=True)
    # The framework tells of every event and credential at this level.
    logging.getLogger("kopf").setLevel(logging.WARNING)

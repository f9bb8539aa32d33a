"""Times as the API server writes them. Pure."""

from datetime import UTC, datetime


def format_time(moment: datetime) -> str:
    """RFC 3339 in UTC, whole seconds, as `metav1.Time` is stored."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def format_micro_time(moment: datetime) -> str:
    """RFC 3339 in UTC with microseconds, as `metav1.MicroTime` is stored."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def parse_time(text: object) -> datetime | None:
    """The moment of a time as the API server writes it; None for anything else."""
    if not isinstance(text, str):
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment if moment.tzinfo else None

"""Log records as lines of JSON."""

import logging
from datetime import UTC, datetime

import msgspec

# What a record may carry beside its message; see `Gate`.
FIELDS = ("request_id", "method", "path", "status", "seconds")


class JsonFormatter(logging.Formatter):
    """One JSON object per record: time, level, logger, message, and of requests their id and outcome."""

    def format(self, record: logging.LogRecord) -> str:
        body: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        body |= {name: getattr(record, name) for name in FIELDS if hasattr(record, name)}
        if record.exc_info:
            body["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(_sendable(body)).decode()


def _sendable(body: dict[str, object]) -> dict[str, object]:
    """Return the values with text that has a UTF-8 form."""
    return {
        name: value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value
        for name, value in body.items()
    }


def log_as_json() -> None:
    """Have the program's log written as JSON, wherever it goes."""
    for handler in logging.getLogger("specdec").handlers:
        handler.setFormatter(JsonFormatter())

"""Answers of a run on disk, each written as it ends, with the settings that they were made with."""

import errno
import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError


class AnswerRow(BaseModel):
    """One line of the journal: an answer, or why a conversation ends without one.

    Attributes:
        conversation: number of the conversation's entry in the sources, from 0.
        turn: number of the answer in the conversation, from 0.
        text: the answer, or its beginning where there is a problem.
        problem: why there is none, or no more of it, in a few words. Only a reader who keeps cut answers takes the
            text beside it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    conversation: int
    turn: int
    text: str | None = None
    problem: str | None = None


class AnswerJournal:
    """A file of JSON lines: the settings, then one row per answer.

    A row is one write and carries its own number, so that a killed process leaves whole rows, perhaps with a part of
    one behind them, which is cut off; so is what a full disk took of a row. Only one process at a time can have the
    journal open.

    Attributes:
        rows: the rows so far, in the order in which they were written.

    Args:
        settings: what determines the answers.

    Raises:
        ValueError: the journal is of other settings, which are named, or is damaged, or another process writes it.
    """

    def __init__(self, file: Path, settings: Mapping[str, Any]) -> None:
        self.file = file
        self._lines = file.open("ab+", buffering=0)
        try:
            fcntl.flock(self._lines, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"{file}: another process writes it; wait for its end, or give another --out") from None
        self._lines.seek(0)
        content = self._lines.read()
        whole = content[: content.rfind(b"\n") + 1]
        os.truncate(file, len(whole))
        first, *others = whole.splitlines() or [b""]
        try:
            self.rows = [AnswerRow.model_validate_json(line) for line in others]
            kept = json.loads(first)["settings"] if first else None
        except (ValueError, LookupError, TypeError, ValidationError):
            raise ValueError(f"{file}: not the journal of a run; remove it, or give another --out") from None
        if kept is None:
            self._write(json.dumps({"settings": dict(settings)}))
        else:
            compare_settings(self.file, kept, json.loads(json.dumps(dict(settings))))

    def add(self, row: AnswerRow) -> None:
        """Write a row.

        Raises:
            OSError: it cannot be written, for example because the disk is full; the rows so far are left.
        """
        self._write(row.model_dump_json(exclude_none=True))
        self.rows.append(row)

    def close(self) -> None:
        self._lines.close()

    def _write(self, line: str) -> None:
        row = line.encode() + b"\n"
        end = self._lines.seek(0, os.SEEK_END)
        try:
            # A disk that gets full takes a part of a row without an error.
            if self._lines.write(row) == len(row):
                return
            self._lines.truncate(end)
            reason = os.strerror(errno.ENOSPC)
        except OSError as error:
            reason = str(error.strerror)
        raise OSError(f"{self.file}: cannot be written: {reason}; make room, and the same command goes on")


def compare_settings(journal: Path, kept: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuse to go on with a journal of other settings.

    Args:
        kept: the journal's settings; none if it has no first line yet.
        wanted: those of this run, or some of them.

    Raises:
        ValueError: names the first that differs, with both values.
    """
    for name in wanted if kept else ():
        if kept.get(name) != wanted[name]:
            made = f"made with {name} {kept.get(name)}, not {wanted[name]}"
            raise ValueError(f"{journal}: {made}; give its settings, or another --out")

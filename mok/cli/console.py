"""What the commands print: lines, tables, a progress bar on a terminal, and one JSON document last."""
from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from rich.console import Console as RichConsole
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table


class CommandFailed(Exception):
    """A command that could not do its work, through no fault of its input; the message is one line."""


class PeerFailed(CommandFailed):
    """One rank's failure that it puts down to another rank."""


class Outcome(NamedTuple):
    """How a command ended: exit status, the line for stderr or "", and whether another rank is to blame."""

    status: int
    line: str = ""
    peer_failed: bool = False


class _Console(RichConsole):
    def on_broken_pipe(self) -> None:
        """Rich itself would exit without a word."""
        raise BrokenPipeError


def leave_standard_output() -> None:
    """Its reader has gone: what is still to be printed, buffers flushed at exit included, goes nowhere."""
    with contextlib.suppress(OSError, ValueError):               # a stand-in without a file has nothing to redirect
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Bar:
    """A progress bar that is open: `advance` moves it and changes the text behind it; without a terminal both do nothing."""

    def __init__(self, progress: Progress | None, task: Any) -> None:
        self._progress, self._task = progress, task

    def advance(self, count: int = 1, text: str = "") -> None:
        if self._progress is not None:
            self._progress.update(self._task, advance=count, text=text)


class Output:
    """Standard output of one command. With as_json the last line is the document given to `finish`; without, `finish` prints nothing."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.terminal = sys.stdout.isatty()
        self._console = _Console(highlight=False, soft_wrap=True) if self.terminal else _Console(highlight=False, soft_wrap=True, width=160)

    def line(self, text: str = "") -> None:
        """Print one line (or several) as it stands."""
        self._console.print(escape(text))

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], bad: Sequence[bool] = ()) -> None:
        """A table; rows whose `bad` is true are red."""
        table = Table(title=title, title_justify="left")
        for column in columns:
            table.add_column(column)
        for i, row in enumerate(rows):
            table.add_row(*map(escape, row), style="red" if i < len(bad) and bad[i] else None)
        self._console.print(table, soft_wrap=False)

    @contextmanager
    def bar(self, description: str, total: int | None, start: int = 0) -> Iterator[Bar]:
        """A progress bar from `start` to `total` (None: of unknown length) while the block runs, on a terminal only; lines appear above it."""
        if not self.terminal:
            yield Bar(None, None)
            return
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[text]}"))
        with Progress(*columns, console=self._console, transient=True) as progress:
            yield Bar(progress, progress.add_task(description, total=total, completed=start, text=""))

    def finish(self, document: dict[str, Any]) -> None:
        """Print the command's result as one line of JSON, if that was asked for."""
        if self.as_json:
            sys.stdout.flush()
            print(json.dumps(document), flush=True)

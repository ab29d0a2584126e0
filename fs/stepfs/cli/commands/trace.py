"""`stepfs trace`: what a mount does in the next seconds, beside the profiler's trace of the trainer."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from stepfs._internal import interruption
from stepfs._internal.declared_option import Opt
from stepfs.cli.failure import say
from stepfs.cli.options import not_empty

if TYPE_CHECKING:
    from stepfs._internal.tracing import Recording
    from stepfs.errors import StepfsError

_PAUSE_S = 1.0


def trace(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A mount.")],
    *,
    out: Annotated[str, Opt("--out", "File of the trace; compressed if it ends in .gz.", "FILE", parse=not_empty)],
    seconds: Annotated[
        float, Opt("--seconds", "How long; Ctrl-C ends it earlier.", "SECONDS", least=0.1, most=3600)
    ] = 30.0,
    merge: Annotated[
        str | None,
        Opt("--merge", "Put the events into a copy of this trace of torch.profiler, read at the end.", "FILE"),
    ] = None,
) -> None:
    """Trace the reads, waits, fetches, priming, evictions and looks of a mount.

    The file has Chrome's trace events on the clock of torch.profiler: open it in Perfetto (ui.perfetto.dev), beside or
    merged with the profiler's. At most 64 MB of events: the oldest go, and the file says so.
    """
    from stepfs._internal import tracing
    from stepfs._internal.control_files import read_config

    place = Path(out)
    tracing.check_out(place)
    profile = None if merge is None else Path(merge)
    if profile is not None and profile.exists():  # else the profiler writes it later
        tracing.read_profile(profile)
    read_config(directory)  # a mount that answers
    recorder = _Recorder(directory, tracing.Recording())
    interruption.listen()
    try:
        ended = recorder.run(seconds)
    except KeyboardInterrupt:
        ended = "interrupted"
        recorder.look()
    recording = recorder.recording
    tracing.finish(place, recording, profile)
    lost = f", {recording.lost} lost" if recording.lost else ""
    typer.echo(
        f"{place}: {recording.count} events{lost}" + (f" ({ended})" if recorder.trouble is None and ended else "")
    )
    if recorder.trouble is not None:
        say(f"{ended}; the trace has what there was before")
        raise typer.Exit(recorder.trouble.exit_code)


class _Recorder:
    """Asks a mount for its events, again and again."""

    def __init__(self, directory: Path, recording: Recording) -> None:
        self.recording, self.trouble = recording, cast("StepfsError | None", None)
        self._directory = directory
        self._serving: int | None = None

    def run(self, seconds: float) -> str:
        """Returns why it ended early; "" if it did not."""
        until = time.monotonic() + seconds
        while self.look():
            left_s = until - time.monotonic()
            if left_s <= 0:
                return ""
            time.sleep(min(_PAUSE_S, left_s))
        return f"the daemon does not answer any more: {self.trouble}"

    def look(self) -> bool:
        """Take what is new. False once the mount does not answer; at the first look its error is raised."""
        from stepfs._internal import tracing
        from stepfs._internal.control_files import read_control_file
        from stepfs.errors import AbsentError, RefusedError, StepfsError, command
        from stepfs.mount.launch import explained

        directory, before = self._directory, self._serving
        try:
            pid, events = tracing.parse(read_control_file(directory, "trace"))
        except StepfsError as error:
            if before is None and isinstance(error, AbsentError):
                again = command("stepfs", "mount", "LAKE", directory, "--replace")
                raise RefusedError(f"{directory} is served by a version that cannot be traced: `{again}`") from None
            self.trouble = explained(directory, error)
            if before is None:
                raise self.trouble from error
            return False
        name = f"stepfs: {directory}, pid {pid}"
        if before is None:
            self.recording.skip(pid, name, events)
        else:
            self.recording.add(pid, name, events)
        if before not in {None, pid}:
            self.recording.note(pid, "another daemon serves", before=before)
            say(f"pid {pid} serves in place of {before}, whose last events may be missing")
        self._serving = pid
        return True

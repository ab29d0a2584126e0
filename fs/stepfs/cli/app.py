"""The table of `stepfs` commands: a command is one module of `commands`, with a function of its name, and one line below.

Only the command that was asked for is imported, and it imports the library inside its functions: `stepfs --help` and
shell completion load neither boto3 nor pyfuse3 nor trio, and `stepfs ls` does not pay for `stepfs fork`. The help is plain
text instead of typer's boxes: it works in a pipe, and rich loads only when a command draws.
"""

from typing import Final

from stepfs.cli.program import lazy_group, new_program

SUMMARIES: Final = {
    "init": "Create a lake.",
    "mount": "Mount a lake on a directory.",
    "unmount": "Unmount, and wait until nothing is left.",
    "ls": "List the steps of a lake as a mount would.",
    "show": "Show the arrays of a payload.",
    "status": "Show the state of a lake or of a mount.",
    "trace": "Write what a mount does beside the profiler's trace.",
    "checkpoint": "Record that a checkpoint exists.",
    "reclaim": "Delete the steps that no checkpoint needs.",
    "retire-group": "End a training run that holds steps.",
    "retire-producer": "Give up a producer that will not come back.",
    "seal": "Declare a lake complete.",
    "fork": "Start a new lake from steps of another.",
    "replicate": "Keep the same lake in a second store.",
    "verify": "Read everything back and check it.",
    "help": "Show the manual.",
    "doctor": "Find out why it does not work here.",
}

app = new_program(
    "stepfs",
    "Global training steps, committed to object storage, read as files.",
    "0 done, 1 failure, 2 usage, 3 absent, 4 refused or busy, 5 corrupt, 6 store unreachable, 7 fenced (do not restart)",
    lazy_group("stepfs.cli.commands", SUMMARIES),
)

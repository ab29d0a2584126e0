"""The table of `stepfs-produce` commands. They import the library inside their functions, so help is immediate."""

from __future__ import annotations

from stepfs.cli.failure import reported
from stepfs.cli.program import new_program
from stepfs_producer.cli.check import check
from stepfs_producer.cli.find import find
from stepfs_producer.cli.lineage import lineage
from stepfs_producer.cli.replay import replay
from stepfs_producer.cli.run import run
from stepfs_producer.cli.simulate import simulate
from stepfs_producer.cli.text import text
from stepfs_producer.plan.packages import plan_packages

app = new_program(
    "stepfs-produce",
    "Turn data into global training steps, each in exactly one commit, across kills and restarts.",
    "0 the source is exhausted or the limit reached, 1 failure, 2 usage, 3 absent, 4 refused, 5 corrupt, 6 store "
    "unreachable, 7 fenced (do not restart), 130 or 143 stopped by SIGINT or SIGTERM (restart to continue)",
)
for command in (run, check, simulate, lineage, find, replay, text):
    app.command(command.__name__)(reported("stepfs-produce")(plan_packages()(command)))

"""Plans from Python: `Plan.run` and `Plan.simulate` do as the commands do.

    from stepfs_producer import Jsonl, Mix, Output, Parquet, Plan, Tokenizer, Until

    if __name__ == "__main__":  # workers import the script
        plan = Plan(
            output=Output(mesh="dp=8", sequence_length=4096),
            tokenizer=Tokenizer(kind="huggingface", file="tokenizer.json"),
            sources={"code": Parquet("s3://corpora/code/*.parquet", text_field="content"), "prose": Jsonl("web/")},
            mix=[Mix(weights={"code": 30, "prose": 70})],
            until=Until(steps=1000),
        )
        print(plan.simulate(steps=100)["fill"])
        plan.run("s3://training/run")

Relative names are below the current directory. A plan that is wrong, or a part of one, raises `PlanError` with all mistakes;
everything else raises what `stepfs.errors` has.
"""

from __future__ import annotations

import inspect
import multiprocessing
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, TypeVar

import trio

from stepfs._internal.declared_option import declared
from stepfs.errors import UsageError, leading_error
from stepfs.store.api import StoreOptions
from stepfs_producer.plan.packages import plan_packages

with plan_packages():
    from stepfs_producer.plan import model
    from stepfs_producer.run.check import simulate_plan
    from stepfs_producer.run.options import RunOptions, keywords_of
    from stepfs_producer.run.prepare import LocatedPlan
    from stepfs_producer.run.session import Stopping, run_plan
    from stepfs_producer.sources.holdout import with_documents
    from stepfs_producer.sources.hub import with_commits

_T = TypeVar("_T")


class Plan(model.Plan):
    """Which sources, in which shares, packed and balanced how. Keywords are the keys of a plan file."""

    def run(
        self,
        lake: str,
        *,
        holdout: bool = False,
        endpoint_url: str | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Run the plan into `lake`, created when absent, as `stepfs-produce run` does; run again, it continues exactly.

        Returns the document that `stepfs-produce run --json` prints (fs/JSON.md). The keywords are the command's options,
        as help() shows them: `workers`: a number, or "2:8"; `memory`, `max_live_bytes`: bytes, or text such as "8G";
        `max_lead`: steps. `max_live_bytes` None, and `max_lead` None or 0: no bound. In the main thread Ctrl-C ends it
        between two steps: everything appended is committed, then `KeyboardInterrupt` is raised; SIGTERM the same with
        `SystemExit`.
        """
        _refuse_import_by_worker("run")
        chosen = RunOptions(lake, **keywords_of(RunOptions, options), store_options=StoreOptions(endpoint_url))
        stopping = Stopping(_say)
        in_main = threading.current_thread() is threading.main_thread()
        with stopping if in_main else nullcontext():
            place = LocatedPlan(with_documents(with_commits(self), ""), held_out=holdout)
            try:
                result = _finished(partial(run_plan, place, chosen, stopping, say=_say))
            except KeyboardInterrupt:
                if not stopping.requested:
                    raise
        if stopping.exit_code == 128 + signal.SIGINT:
            raise KeyboardInterrupt
        if stopping.requested:
            raise SystemExit(stopping.exit_code)
        return result.document()

    def simulate(self, *, steps: int = 100, workers: int | None = None, holdout: bool = False) -> dict[str, Any]:
        """Plan the first `steps` steps over the real records, without a lake.

        Returns the document that `stepfs-produce simulate --json` prints (fs/JSON.md): shares, fill, balance.
        """
        _refuse_import_by_worker("simulate")
        if steps < 1:
            raise UsageError(f"steps={steps}: use at least 1")
        place = LocatedPlan(with_documents(with_commits(self), ""), held_out=holdout)
        return _finished(partial(simulate_plan, place, steps, workers, say=_say)).document()


def _with_options(run: Callable[..., object], options: type) -> inspect.Signature:
    """The signature of `run`, for help(): with the options that its `**options` stand for."""
    own = [one for one in inspect.signature(run).parameters.values() if one.kind is not one.VAR_KEYWORD]
    fields = inspect.signature(options).parameters
    known = [
        fields[name].replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=kind)
        for name, (kind, _) in declared(options).items()
    ]
    return inspect.Signature([*own, *known])


Plan.run.__signature__ = _with_options(Plan.run, RunOptions)  # type: ignore[attr-defined]


def _say(line: str) -> None:
    with suppress(OSError, RuntimeError):  # RuntimeError: a signal's handler in the middle of another line
        sys.stderr.write(f"stepfs_producer: {line}\n")


def _finished(work: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
    """What `work` returns. An error comes without the groups that nurseries wrap it in."""
    try:
        return trio.run(work)
    except BaseExceptionGroup as group:
        raise leading_error(group) from group


def _refuse_import_by_worker(method: str) -> None:
    """Workers are started by spawning, which imports the main script: it must not run the plan once more."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UsageError(
            f"Plan.{method}() was called while a worker imported this script; call it below `if __name__ == '__main__':`"
        )

"""The `stepfs` command: thin modules over the library, one per command; `app` puts them together."""

import gc


def main() -> None:
    """Entry point of the console script; `app` is imported here so that `stepfs.cli.failure` stays cheap."""
    from stepfs._internal.interruption import end_silently

    end_silently()
    from stepfs.cli.app import app
    from stepfs.cli.failure import log_to_stderr, open_standard_streams

    open_standard_streams()
    log_to_stderr()
    try:
        app()
    finally:
        gc.freeze()  # nothing is left for the interpreter's last collections: a tenth of a short command's CPU

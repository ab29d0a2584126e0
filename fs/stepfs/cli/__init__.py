"""The `stepfs` command: thin modules over the library, one per command; `app` puts them together."""


def main() -> None:
    """Entry point of the console script; `app` is imported here so that `stepfs.cli.failure` stays cheap."""
    from stepfs.interruption import end_silently

    end_silently()
    from stepfs.cli.app import app
    from stepfs.cli.failure import log_to_stderr, open_standard_streams

    open_standard_streams()
    log_to_stderr()
    app()

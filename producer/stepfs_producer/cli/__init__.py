"""The `stepfs-produce` command: thin modules over the planning and the producer; `app` puts them together."""


def main() -> None:
    from stepfs._internal.interruption import end_silently

    end_silently()
    from stepfs.cli.failure import log_to_stderr, open_standard_streams
    from stepfs_producer.cli.app import app

    open_standard_streams()
    log_to_stderr()
    app()

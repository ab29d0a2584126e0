"""The `stepfs-produce` command: thin modules over the planning and the producer; `app` puts them together."""


def main() -> None:
    """Entry point of the console script."""
    from stepfs.interruption import end_silently  # noqa: PLC0415

    end_silently()
    from stepfs.cli.failure import log_to_stderr, open_standard_streams  # noqa: PLC0415
    from stepfs_producer.cli.app import app  # noqa: PLC0415

    open_standard_streams()
    log_to_stderr()
    app()

"""The `stepfs-produce` command: thin rooms over the planning and the producer; `app` puts them together."""


def main() -> None:
    """Entry point of the console script."""
    from stepfs_producer.cli.app import app  # noqa: PLC0415

    app()

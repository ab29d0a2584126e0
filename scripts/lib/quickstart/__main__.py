"""scripts/quickstart: one of three stories, in a temporary directory of which nothing is left."""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from bench.machine import interrupt_once
from quickstart import plan_story, replica_story, text_story
from quickstart.story import Story, console, lake_url


def main() -> int:
    interrupt_once()
    with tempfile.TemporaryDirectory(prefix="stepfs-quickstart-") as name, ExitStack() as stack:
        directory = Path(name)
        story = Story(directory, stack.enter_context(lake_url(directory)))
        story.say(f"lake [bold]{story.lake}[/bold]")
        with ExitStack() as running:
            stories = {"--plan": plan_story.tell, "--replica": replica_story.tell}
            tell = next((told for word, told in stories.items() if word in sys.argv[1:]), text_story.tell)
            tell(story, running)
        story.check_nothing_left()
    return story.report()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        console.print("quickstart: interrupted; everything it started is stopped and removed")
        sys.exit(130)

"""The work of workers in a run: `tasks` make heads and bodies and payloads, `upload` puts a step under its ticket."""

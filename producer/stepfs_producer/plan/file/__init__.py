"""The plan as text: YAML, the text that a lake keeps, a schema. Only here is PyYAML known; nothing here opens a file."""

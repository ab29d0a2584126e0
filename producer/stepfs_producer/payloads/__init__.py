"""The payloads of a step: `step` gathers its tokens, `files` makes arrays and bytes of them. See PAYLOADS.md."""

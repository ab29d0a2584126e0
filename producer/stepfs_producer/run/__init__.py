"""A planned run: `session` opens it, `conductor` plans, `source_loader` brings samples in, `step_builder` makes steps."""

"""A planned run: `session` opens it, `conductor` plans, `load` brings samples in, `step_builder` makes steps."""

"""A planned run: `session` opens it, `pipeline` plans and makes steps, `load` brings samples in."""

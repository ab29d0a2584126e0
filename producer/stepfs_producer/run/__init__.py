"""A planned run: `session` opens it, `conductor` plans and makes steps, `load` brings samples in."""

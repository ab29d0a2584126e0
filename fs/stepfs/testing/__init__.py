"""Doubles for tests and scripts: a store in virtual time that fails on purpose. Nothing else imports this."""

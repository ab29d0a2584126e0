"""Ingestion into a lake beside a persistent broker: what is acknowledged how fast, and what of it outlives a kill -9."""

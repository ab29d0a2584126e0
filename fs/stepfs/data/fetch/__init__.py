"""GETs: how many, when again, and the checksum of every byte."""

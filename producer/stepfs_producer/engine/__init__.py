"""Workers: `api` is the face of an engine and repeats tasks whose worker died, `local` has processes of this machine."""

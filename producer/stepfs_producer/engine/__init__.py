"""Workers: `api` is the face of an engine, `local` runs tasks in processes of this machine, `failover` carries them out."""

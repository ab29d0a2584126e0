"""Where the functions of `roles` run: `api` is the face, `local` runs them in processes of this machine."""

"""Requests of the kernel and their answers: pyfuse3's handlers, handles, directories, notifications."""

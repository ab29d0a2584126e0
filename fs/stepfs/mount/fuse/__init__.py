"""What the kernel asks and how it is answered: pyfuse3's handlers, handles, directories, notifications."""

"""What a slice holds (`arrays`), and the bytes of its file (`encode`)."""

"""What a slice holds (`arrays`, `planned`), and the bytes of its file (`encode`, `planned_encode`). See PAYLOADS.md."""

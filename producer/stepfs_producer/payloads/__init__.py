"""The arrays of a rank's file (`rank_arrays`), and its bytes (`encode`). See PAYLOADS.md."""

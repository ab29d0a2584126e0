"""The arrays of a rank's file (`rank_arrays`, `columns`), and its bytes (`encode`). See PAYLOADS.md."""

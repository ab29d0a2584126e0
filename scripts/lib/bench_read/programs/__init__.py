"""Programs that a row starts in processes of their own."""

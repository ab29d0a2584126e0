"""Documents → rows: `best_fit` cuts no document, `concat` fills every row. Both keep a prefix of the drawn samples."""

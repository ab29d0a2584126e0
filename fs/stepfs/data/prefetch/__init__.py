"""Which slices to fetch before they are opened: access history, window, prefetcher."""

"""Rows → micro-batches of equal shape and equal cost: `partition` chooses the method, `deal` the rank and the index.

A partition of n costs into k bins is an index array [k, n / k]. No method dominates: on 512 ranks of 64 documents
differencing leaves 1.27 × the mean where `greedy` leaves 1.001; with 8 rows a rank it is the other way round.
"""

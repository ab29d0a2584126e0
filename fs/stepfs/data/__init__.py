"""The bytes of slices: fetch, verify, hold, fetch ahead, push into the page cache. No kernel, no names.

A *block* is the unit of everything here: one ranged GET, one buffer, one verification, one eviction. A slice of at
most `BLOCK_BYTES` lies in one block (perhaps beside its neighbours); a larger one is a row of blocks.
"""

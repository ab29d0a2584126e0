"""The pipeline of `stepfs-produce text`: one corpus, dealt to shards, documents end to end.

Lakes hold its positions, so its record rule, its shard rule and its position stay as they are. It is a pure function
of the files and a position: the same position always yields the same remaining steps, so a producer that is killed
continues from the last committed position without a gap or a repetition. Rooms, in the order data flows: `records` →
`pack` → `construct`, joined in `steps`; `beginning` and `finished` compare a start with what the lake holds.
"""

"""A lake's objects and the protocol on them: identity, log, floor, groups, forks, reclaim, verify."""

"""Reading a lake from Python alone, where /dev/fuse is not allowed: `Lake(url)[step][rank]`. A mount is the main way."""

from stepfs.reader.lake import Lake, LakeStep

__all__ = ["Lake", "LakeStep"]

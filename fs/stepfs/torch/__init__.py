"""`.pt` files, by torch: the one room that imports it, and only when a function here is called. `dump` is public."""

from stepfs.torch.save import dump

__all__ = ["dump"]

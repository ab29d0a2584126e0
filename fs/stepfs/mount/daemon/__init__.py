"""One daemon of a mount: a child of the keeper, which answers the kernel until another one does, or nobody asks any more."""

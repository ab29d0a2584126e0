"""What the files of a step are for: the grid of a lake, and the mesh of a trainer that reads them."""

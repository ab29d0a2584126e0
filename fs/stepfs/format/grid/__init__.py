"""The purpose of a step's files: the grid of a lake, and the mesh of a trainer that reads them."""

"""The site: the pages of the tree, cut at their headings, and a reference made of the code. None of it is in the tree."""

"""Looking at a plan before it runs: `inspection` of its sources, `estimate` of its shares and steps."""

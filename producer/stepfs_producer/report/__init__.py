"""Reports: what a plan gives and where a lake stands, as figures and as one page that needs no network and no script."""

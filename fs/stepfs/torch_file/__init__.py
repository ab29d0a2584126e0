"""`.pt` files, by torch: the one room below the trainers' that imports it, and only when a function here is called."""

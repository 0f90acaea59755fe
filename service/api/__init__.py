"""HTTP routes, one file per group, with the schemas of that group beside them."""

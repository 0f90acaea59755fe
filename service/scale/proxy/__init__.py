"""In Serve's proxy: the middleware, and the choice of a replica. No torch here: every node runs a proxy."""

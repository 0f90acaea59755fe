"""Server-side HTTP: connections, bodies, access, streams, and the life of a request."""

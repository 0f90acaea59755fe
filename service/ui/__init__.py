"""The playground: one page over the public HTTP API. ``source/`` has its TypeScript, ``built/`` the files served."""

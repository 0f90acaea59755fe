"""Parts of several commands: their server, options, files, progress and consoles."""

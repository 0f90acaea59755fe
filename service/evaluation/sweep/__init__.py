"""Many methods under many factors by several evaluations, and which of them to take."""

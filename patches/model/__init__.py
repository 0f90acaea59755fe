"""The way of an encoding into a loaded model: its geometry, its measurement and the seams."""

"""How an encoding reaches a loaded model: what is read off it, and the seams."""

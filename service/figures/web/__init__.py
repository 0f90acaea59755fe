"""Figures on pages: for wide and narrow screens, light and dark."""

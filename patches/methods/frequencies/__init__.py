"""Frequency schedules: the speed at which each rotary pair turns."""

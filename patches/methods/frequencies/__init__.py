"""Frequency schedules: how fast each rotary pair turns."""

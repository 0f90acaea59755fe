"""The machine that a process runs on: its processor, its free memory, its heap and its files."""

"""The generation thread: the order of its work, its long work in short steps, its memory and its cores."""

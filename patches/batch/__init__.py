"""What a batch is to attention: its sequences as segments, and the slot that names the encoding of each."""

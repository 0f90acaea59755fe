"""Whether what stands somewhere in a long context is found: passkey and needle in a haystack."""

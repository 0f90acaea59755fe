"""A result as one page for people: what was asked, the answer in words, pictures, numbers."""

"""One attention over a paged cache for any mixture of encodings: each is a row of numbers, chosen per sequence."""

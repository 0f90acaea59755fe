"""Pictures of encodings: wavelengths, distances, biases, and one picture per method for the documentation."""

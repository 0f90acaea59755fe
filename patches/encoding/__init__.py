"""What a positional encoding is: values and formulas that know no model."""

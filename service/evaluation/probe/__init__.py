"""How attention, copying and loss behave by distance."""

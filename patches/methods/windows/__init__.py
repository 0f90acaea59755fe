"""Windows: methods whose queries attend to some keys only."""

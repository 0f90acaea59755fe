"""One file per family: hyper-parameters in, recipe out. Methods never import each other."""

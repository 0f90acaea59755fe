"""A small evaluation for ``test_catalogue.py``: the NLL of the token that ends each length."""

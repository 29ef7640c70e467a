"""How bytes move from files to their place."""

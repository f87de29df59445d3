"""A cluster that runs, from outside: who is in it, what its metrics pages say, and what it does under a load."""

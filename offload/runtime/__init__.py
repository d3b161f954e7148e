"""HOW units move: bind a model to its units, fetch, evict, take gradients away.  torch lives here."""

"""HOW units move: bind, fetch, evict, take gradients away.  torch lives here."""

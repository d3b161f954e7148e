"""IN AND OUT: models made on disk, and weights in the formats of other systems."""

"""WHERE bytes live: the host slab, its regions and slots."""

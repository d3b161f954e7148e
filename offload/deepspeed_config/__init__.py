"""DeepSpeed's configuration files: read, checked, and turned into this engine's settings.  Pure."""

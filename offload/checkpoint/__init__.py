"""Checkpoints: a generation that stays, linked where the file system allows, else copied."""

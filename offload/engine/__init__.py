"""The engine: decisions, their connection, a step, reading and editing, the facade."""
